// A lane for each region: merges are ticks, joins and losses are marks, and the time for which it was lost is a band.
import { clock, colour, dot, markup, timeTicks } from "./format.js";
import { isGone } from "./map.js";

const COLOURS = { joined: "good", found: "good", unbanned: "good", lost: "bad", quarantined: "bad", trouble: "bad", refused: "warn",
  left: "faint", snapshot: "accent" };
const colourOf = (kind) => `var(--${COLOURS[kind] ?? "ink"})`;
const SHAPES = { lost: "M-4-4 4 4M4-4-4 4", snapshot: "M0-4 4 0 0 4-4 0Z", left: "M-4-4h8v8h-8Z", start: "M-3.500-5 5 0-3.500 5Z" };
const DOT = "M-4.500 0a4.500 4.500 0 1 0 9 0a4.500 4.500 0 1 0-9 0"; // of all others
const SHOWN = 60; // marks in the list below

// period_s: how far back; 0: the whole run.
export function timeline(state, marks, ticks, width, period_s) {
  const many = state.members.length > 16;
  const lane = many ? 13 : 26;
  const [left, longest] = width < 520 ? [62, 8] : [120, 16]; // of names
  const names = ["", ...state.members.map((m) => m.name)];
  const height = names.length * lane + 30;
  const end = state.now_s;
  const begin = period_s ? end - period_s : Math.min(state.first_s ?? end, end - 30);
  const x = (t) => left + ((t - begin) / (end - begin)) * (width - left - 12);
  const y = (i) => i * lane + lane / 2 + 4;
  const scale = timeTicks(begin, end, Math.max(2, Math.floor(width / 110))).map(([t, text]) => markup`
    <path class="grid" d="M${x(t)} 2V${height - 24}"/>
    ${x(t) < width - 24 ? markup`<text x="${x(t)}" y="${height - 8}" text-anchor="middle">${text}</text>` : ""}`);
  const lanes = names.map((name, i) => markup`${!many || i ? markup`<path class="lane" d="M${left} ${y(i)}H${width - 12}"/>` : ""}
    <text x="${left - 12}" y="${y(i) + 4}" text-anchor="end" font-size="${many ? 10 : 12}">${shorten(name || "global", longest)}</text>`);
  const bands = state.members.map((m, i) => lostSpans(m, marks, end).filter(([, until]) => until > begin).map(([from, until]) => {
    const start = x(Math.max(begin, from));
    const wide = Math.max(1, x(until) - start);
    return markup`<rect class="lost-band" x="${start}" y="${y(i + 1) - lane / 2 + 2}" width="${wide}" height="${lane - 4}" rx="3"/>`;
  }));
  const merges = state.members.map((m, i) => {
    const recent = (ticks[m.name] ?? []).filter((t) => t[1] >= begin);
    const d = recent.map((t) => `M${x(t[1]).toFixed(1)} ${(y(i + 1) - lane * 0.28).toFixed(1)}v${(lane * 0.56).toFixed(1)}`).join("");
    return markup`<path class="tick" d="${d}" stroke="${colour(i, state.members.length)}"/>`;
  });
  const signs = marks.filter(([, t, , member]) => t >= begin && names.includes(member)).map(([, t, kind, member, text]) => markup`
    <g transform="translate(${x(t).toFixed(1)} ${y(names.indexOf(member))})" data-tip="${clock(t)}  ${member || "global"}\n${text}">
    <path d="${SHAPES[kind] ?? DOT}" fill="${colourOf(kind)}" stroke="${colourOf(kind)}" stroke-width="${kind === "lost" ? 2.4 : 0}"/>
    <rect x="-8" y="-8" width="16" height="16" fill="transparent"/></g>`);
  return markup`<svg viewBox="0 0 ${width} ${height}" role="img" aria-label="Timeline">${scale}${lanes}${bands.flat()}${merges}${signs}</svg>`;
}

// [from, until] of each time for which a member was lost.
function lostSpans(member, marks, end) {
  const spans = [];
  let from = null;
  for (const [, t, kind, name] of marks) {
    if (name !== member.name) continue;
    if (kind === "lost") from ??= t;
    else if (from !== null && ["joined", "found", "left"].includes(kind)) {
      spans.push([from, t]);
      from = null;
    }
  }
  return from !== null && isGone(member) ? [...spans, [from, end]] : spans;
}

export const markList = (marks) => marks.filter((m) => m[2] !== "snapshot").slice(-SHOWN).reverse().map(([, t, kind, member, text]) => markup`
  <li><time>${clock(t)}</time>${dot(colourOf(kind))}<span>${member ? markup`<b>${member}</b> ` : ""}${text}</span></li>`);

const shorten = (name, most) => (name.length > most ? `${name.slice(0, most - 1)}…` : name);
