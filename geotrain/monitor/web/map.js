// The regions around the global server, each with its link: how full it is, and how much flows which way.
import { PARTS, PART_COLOURS, bytes, colour, count, markup, percent, span } from "./format.js";

const PERIODS = [[0.6, 0.6], [0.3, 0.9], [0.1, 1.3], [0.02, 1.9], [0, 2.6]]; // from which load on, seconds of a dash
const STATES = { up: "good", paused: "comm", stalled: "bad", "cut off": "bad", lost: "bad", quarantined: "bad", away: "comm", left: "faint", "no worker": "comm" };
export const WORDS = { up: "training", away: "not here yet", left: "finished" }; // of other states, the word itself
export const isGone = (m) => m.state === "lost" || m.state === "cut off";
export const words = (m, now_s) => (isGone(m) ? `${m.state} for ${span(now_s - m.since_s)}` : WORDS[m.state] ?? m.state);
const isMany = (members) => members.length > 12;
export const isFew = (members) => members.length <= 2; // then all stand in one line, across the page

export const mapHeight = (members, width) => (isFew(members) ? 136 : isMany(members) ? Math.min(width, 620) : Math.min(430, Math.max(200, width * 0.62)));

export function worldMap({ members, facts, versions, now_s }, width) {
  const [of, many, height] = [members.length, isMany(members), mapHeight(members, width)];
  const cy = height / 2;
  const rx = many ? Math.min(width / 2, cy) - 82 : Math.min(width / 2 - 62, 300);
  const cx = width / 2 + (of === 1 ? rx / 2 : 0);
  const size = many ? Math.max(3, Math.min(11, (2.5 * rx) / of)) : 23;
  const ry = many ? rx : cy - size - 36;
  const peak = Math.max(1, ...members.flatMap((m) => [m.sent_bytes_per_s, m.received_bytes_per_s]));
  const placed = members.map((m, i) => {
    const angle = (2 * Math.PI * i) / of - (isFew(members) ? Math.PI : Math.PI / 2); // two stand left and right
    const [x, y] = [cx + rx * Math.cos(angle), cy + ry * Math.sin(angle)];
    const { gbps, rtt_ms } = facts.members[m.name];
    const lines = [`${m.name} — ${words(m, now_s)}`]; // its speed, time and rates are in its row below
    lines.push(`so far ${bytes(m.received_bytes)} up, ${bytes(m.sent_bytes)} down`);
    if (gbps) lines.push(`link ${gbps} Gbit/s, ${rtt_ms} ms`);
    const capacity = gbps * 125e6; // bytes a second; 0: not known
    return { m, x, y, angle, size, many, stroke: colour(i, of), capacity, tip: lines.join("\n") };
  });
  return markup`${placed.map((p) => link(p, cx, cy, peak))}${placed.map((p) => node(p, cx, cy, now_s, width < 460))}
    <g class="hub" text-anchor="middle"><circle cx="${cx}" cy="${cy}" r="30" fill="var(--accent)"/>
    <text x="${cx}" y="${cy - 1}" font-size="12.5">global</text>
    <text x="${cx}" y="${cy + 14}" font-size="11" class="sub">v ${Math.max(0, ...versions)}</text></g>`;
}

// Two lines side by side; what flows up runs from the region to the hub.
function link({ m, x, y, size, many, stroke, capacity }, cx, cy, peak) {
  const long = Math.hypot(cx - x, cy - y) || 1;
  const gone = isGone(m);
  return [[1, m.received_bytes_per_s], [-1, m.sent_bytes_per_s]].map(([sign, rate]) => {
    const load = Math.min(1, rate / (capacity || peak));
    const thick = 2 + (size > 12 ? 7 : 3) * Math.sqrt(load);
    const [dx, dy] = [cy - y, x - cx].map((d) => (d / long) * sign * (many ? 1.5 : 5));
    const way = markup`d="M${cx + dx} ${cy + dy}L${x + dx} ${y + dy}" stroke="${stroke}"`;
    const period_s = PERIODS.find(([from]) => load >= from)[1];
    return markup`<path class="link ${gone ? "gone" : ""}" ${way} stroke-width="${thick.toFixed(1)}"/>
      <path class="flow ${rate <= 0 || gone ? "still" : ""}" ${way} stroke-width="${Math.min(4, thick * 0.7).toFixed(1)}">
      <animate attributeName="stroke-dashoffset" from="0" to="${14 * sign}" dur="${period_s}s" repeatCount="indefinite"/></path>`;
  });
}

function node({ m, x, y, angle, size, many, capacity, tip }, cx, cy, now_s, narrow) {
  const centre = markup`cx="${x}" cy="${y}"`;
  const ring = markup`${centre} r="${size - (many ? 1 : 3)}" pathLength="1" stroke-width="${many ? 2 : 5}" transform="rotate(-90 ${x} ${y})"`;
  let begin = 0;
  const arcs = PARTS.map((part) => {
    const share = m.state === "up" ? m.shares[part] ?? 0 : 0;
    begin += share;
    const dash = markup`stroke-dasharray="${share} 1" stroke-dashoffset="${share - begin}"`;
    return share ? markup`<circle ${ring} class="arc" stroke="${PART_COLOURS[part]}" ${dash}/>` : "";
  });
  return markup`<g class="node" text-anchor="middle" data-tip="${tip}"><circle class="disc" ${centre} r="${size + 1}"/>
    <circle ${ring} class="track"/>${arcs}<circle ${centre} r="${many ? size / 2 : 5}" fill="var(--${STATES[m.state]})"/>
    ${many ? nameAround(m, x, y, angle, size) : labels(m, x, y, size, cx, cy, now_s, capacity, narrow)}</g>`;
}

function nameAround(m, x, y, angle, size) {
  const left = Math.cos(angle) < -0.001;
  const at = [x + (size + 6) * Math.cos(angle), y + (size + 6) * Math.sin(angle)];
  const turn = (angle * 180) / Math.PI + (left ? 180 : 0);
  return markup`<text x="${at[0]}" y="${at[1]}" dy="0.35em" font-size="10.5" text-anchor="${left ? "end" : "start"}"
    transform="rotate(${turn} ${at.join(" ")})">${m.name}</text>`;
}

function labels(m, x, y, size, cx, cy, now_s, capacity, narrow) {
  const line = y < cy - 20 ? y - size - 20 : y + size + 16;
  const speed = m.state === "up" && m.tokens_per_s ? `${count(m.tokens_per_s)} tokens/s` : words(m, now_s);
  const rates = [m.received_bytes_per_s, m.sent_bytes_per_s];
  const sum = rates[0] + rates[1];
  const load = capacity ? [percent(Math.max(...rates) / capacity)] : [];
  const rate = capacity && narrow ? [] : [`${bytes(sum)}/s`];
  const on = [x + (cx - x) * 0.45, y + (cy - y) * 0.45 + 4]; // the link
  return markup`<text x="${x}" y="${line}" class="label">${m.name}</text>
    <text x="${x}" y="${line + 14}" class="${isGone(m) ? "lost" : ""}">${speed}</text>
    <text class="load" x="${on[0]}" y="${on[1]}">${isGone(m) || sum <= 0 ? "" : [...rate, ...load].join(" · ")}</text>`;
}
