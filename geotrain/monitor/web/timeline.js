// A lane for each region: merges are ticks, joins and losses are marks, and the time for which it was lost is a band.
import { clock, colour, html, say, svg, timeTicks, tipOn } from "./format.js";

const COLOURS = { joined: "good", found: "good", unbanned: "good", lost: "bad", quarantined: "bad", trouble: "bad", refused: "warn",
  left: "faint", snapshot: "accent" };
const colourOf = (kind) => `var(--${COLOURS[kind] ?? "ink"})`;
const SHAPES = { lost: "M-4-4 4 4M4-4-4 4", snapshot: "M0-4 4 0 0 4-4 0Z", left: "M-4-4h8v8h-8Z", start: "M-3.500-5 5 0-3.500 5Z" };
const DOT = "M-4.500 0a4.500 4.500 0 1 0 9 0a4.500 4.500 0 1 0-9 0"; // of all others
const SHOWN = 60; // marks in the list below

export class Timeline {
  constructor(parent, list) {
    Object.assign(this, { parent, list, period_s: 0, listed: "" });
  }

  show(state, marks, ticks) {
    this.last = [state, marks, ticks];
    this.draw();
  }

  draw() {
    if (!this.last) return;
    const [state, marks, ticks] = this.last;
    const width = Math.max(260, this.parent.clientWidth);
    const many = state.members.length > 16;
    const lane = many ? 13 : 26;
    const left = width < 520 ? 62 : 120;
    const names = ["", ...state.members.map((m) => m.name)];
    const height = names.length * lane + 30;
    const end = state.now_s;
    const begin = this.period_s ? end - this.period_s : Math.min(state.first_s ?? end, end - 30);
    const x = (t) => left + ((t - begin) / (end - begin)) * (width - left - 12);
    const y = (i) => i * lane + lane / 2 + 4;
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Timeline" });
    for (const [t, text] of timeTicks(begin, end, Math.max(2, Math.floor(width / 110)))) {
      svg("line", { class: "grid", x1: x(t), x2: x(t), y1: 2, y2: height - 24 }, root);
      if (x(t) < width - 24) svg("text", { x: x(t), y: height - 8, "text-anchor": "middle" }, root, text);
    }
    names.forEach((name, i) => {
      if (!many || i) svg("line", { class: "lane", x1: left, x2: width - 12, y1: y(i), y2: y(i) }, root);
      svg("text", { x: left - 12, y: y(i) + 4, "text-anchor": "end", "font-size": many ? 10 : 12 }, root, shorten(name || "global", width < 520 ? 8 : 16));
    });
    state.members.forEach((member, i) => this.lane(root, member, i, state, marks, ticks[member.name] ?? [], { x, y, lane, begin, end }));
    this.marks(root, names, marks, { x, y, begin });
    this.parent.replaceChildren(root);
    this.describe(marks);
  }

  lane(root, member, i, state, marks, ticks, { x, y, lane, begin, end }) {
    let from = null;
    const own = marks.filter((m) => m[3] === member.name);
    for (const [, t, kind] of [...own, [0, end, member.state === "lost" ? "end" : ""]]) {
      if (kind === "lost") from = t;
      else if (from !== null && ["joined", "found", "left", "end"].includes(kind)) {
        const start = Math.max(begin, from);
        if (t > begin) svg("rect", { class: "lost-band", x: x(start), y: y(i + 1) - lane / 2 + 2, width: Math.max(1, x(t) - x(start)), height: lane - 4, rx: 3 }, root);
        from = null;
      }
    }
    const reach = lane * 0.28;
    const d = ticks.filter((t) => t[1] >= begin).map((t) => `M${x(t[1]).toFixed(1)} ${(y(i + 1) - reach).toFixed(1)}v${(2 * reach).toFixed(1)}`).join("");
    if (d) svg("path", { class: "tick", d, stroke: colour(i, state.members.length) }, root);
  }

  marks(root, names, marks, { x, y, begin }) {
    for (const [, t, kind, member, text] of marks) {
      const at = names.indexOf(member);
      if (t < begin || at < 0) continue;
      const g = svg("g", { transform: `translate(${x(t).toFixed(1)} ${y(at)})` }, root);
      const fill = colourOf(kind);
      svg("path", { d: SHAPES[kind] ?? DOT, fill, stroke: fill, "stroke-width": kind === "lost" ? 2.4 : 0, "stroke-linecap": "round" }, g);
      svg("rect", { x: -8, y: -8, width: 16, height: 16, fill: "transparent" }, g);
      tipOn(g, () => `${clock(t)}  ${member || "global"}\n${text}`);
    }
  }

  describe(marks) {
    const told = marks.filter((m) => m[2] !== "snapshot").slice(-SHOWN).reverse();
    const key = `${told.length} ${told[0]?.[0]}`;
    if (key === this.listed) return;
    this.listed = key;
    this.list.replaceChildren(...told.map(([, t, kind, member, text]) => {
      const item = html("li");
      html("time", {}, item, clock(t));
      html("i", {}, item).style.background = colourOf(kind);
      const words = html("span", {}, item);
      if (member) html("b", {}, words, `${member} `);
      words.append(text);
      return item;
    }));
    if (!told.length) say(this.list, "");
  }
}

const shorten = (name, most) => (name.length > most ? `${name.slice(0, most - 1)}…` : name);
