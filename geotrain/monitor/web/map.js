// The regions around the global server, each with its link: how full it is, and how much flows which way.
import { PARTS, PART_COLOURS, PART_WORDS, bytes, colour, count, html, percent, say, set, span, svg, tipOn } from "./format.js";

const LOADS = [[0.6, 0.6], [0.3, 0.9], [0.1, 1.3], [0.02, 1.9], [0, 2.6]]; // from which load on, a dash's seconds
const STATES = { up: "var(--good)", lost: "var(--bad)", away: "var(--comm)", left: "var(--faint)" };
export const WORDS = { up: "training", lost: "lost", away: "not here yet", left: "finished" };

export class WorldMap {
  constructor(parent) {
    Object.assign(this, { parent, key: "" });
  }

  show(state) {
    this.state = state;
    const width = Math.max(280, this.parent.clientWidth);
    const key = `${width} ${state.members.map((m) => m.name)}`;
    if (key !== this.key) this.build(state.members, width);
    this.key = key;
    this.update(state);
  }

  build(members, width) {
    const of = members.length;
    const many = of > 12;
    this.narrow = width < 460;
    this.height = many ? Math.min(width, 620) : Math.min(430, Math.max(200, width * 0.62));
    this.size = many ? Math.max(5, Math.min(11, (2.2 * width) / of)) : 23;
    const root = svg("svg", { viewBox: `0 0 ${width} ${this.height}`, role: "img", "aria-label": "Map of regions" });
    this.links = svg("g", {}, root);
    const [cx, cy] = [width / 2, this.height / 2];
    const rx = many ? Math.min(cx, cy) - 82 : Math.min(cx - 62, 300);
    const ry = many ? rx : cy - this.size - 36;
    this.nodes = members.map((member, i) => {
      const angle = (2 * Math.PI * i) / of - (of <= 2 ? Math.PI : Math.PI / 2); // two stand left and right
      return this.node(root, member.name, colour(i, of), [cx, cy], [cx + rx * Math.cos(angle), cy + ry * Math.sin(angle)], angle, many);
    });
    const hub = svg("g", { class: "hub", "text-anchor": "middle" }, root);
    svg("circle", { cx, cy, r: 30, fill: "var(--accent)" }, hub);
    svg("text", { x: cx, y: cy - 1, "font-size": 12.5 }, hub, "global");
    this.version = svg("text", { x: cx, y: cy + 14, class: "sub", "font-size": 11 }, hub);
    this.nodes.forEach((node, i) => tipOn(node.g, () => this.tip(i)));
    this.parent.replaceChildren(root);
  }


  node(root, name, stroke, [cx, cy], [x, y], angle, many) {
    const long = Math.hypot(cx - x, cy - y) || 1;
    const beside = [-(cy - y) / long, (cx - x) / long].map((d) => d * (many ? 1.5 : 5));
    const flows = Object.fromEntries([["up", 1], ["down", -1]].map(([way, sign]) => {
      const [sx, sy] = beside.map((d) => d * sign);
      const ends = { x1: cx + sx, y1: cy + sy, x2: x + sx, y2: y + sy, stroke }; // what goes up runs backwards
      return [way, { base: svg("line", { ...ends, class: "link" }, this.links), dash: svg("line", { ...ends, class: `flow ${way}` }, this.links) }];
    }));
    const g = svg("g", { class: "node", "text-anchor": "middle" }, root);
    svg("circle", { class: "disc", cx: x, cy: y, r: this.size + 1 }, g);
    const ring = { cx: x, cy: y, r: this.size - (many ? 1 : 3), pathLength: 1, "stroke-width": many ? 2 : 5, transform: `rotate(-90 ${x} ${y})` };
    svg("circle", { ...ring, class: "track" }, g);
    const arcs = PARTS.map((part) => svg("circle", { ...ring, class: "arc", stroke: PART_COLOURS[part] }, g));
    const core = svg("circle", { class: "core", cx: x, cy: y, r: many ? this.size / 2 : 5 }, g);
    if (many) {
      const left = Math.cos(angle) < -0.001;
      const out = [x + (this.size + 6) * Math.cos(angle), y + (this.size + 6) * Math.sin(angle)];
      svg("text", { x: out[0], y: out[1], dy: "0.35em", "font-size": 10.5, "text-anchor": left ? "end" : "start",
        transform: `rotate(${(angle * 180) / Math.PI + (left ? 180 : 0)} ${out})` }, g, name);
      return { g, flows, arcs, core };
    }
    const line = y < cy - 20 ? y - this.size - 20 : y + this.size + 16;
    svg("text", { x, y: line, class: "label" }, g, name);
    const small = svg("text", { x, y: line + 14 }, g);
    const load = svg("text", { class: "load", x: x + (cx - x) * 0.45, y: y + (cy - y) * 0.45 + 4 }, g);
    return { g, flows, arcs, core, small, load };
  }

  update({ members, facts, versions, now_s }) {
    const peak = Math.max(1, ...members.flatMap((m) => [m.sent_bytes_per_s, m.received_bytes_per_s]));
    const thickest = this.size > 12 ? 9 : 5;
    members.forEach((member, i) => {
      const node = this.nodes[i];
      const gone = member.state === "lost";
      const rates = { up: member.received_bytes_per_s, down: member.sent_bytes_per_s };
      const capacity = facts.members[member.name].gbps * 125e6; // bytes a second; 0: the cluster file states none
      for (const [way, rate] of Object.entries(rates)) {
        const { base, dash } = node.flows[way];
        const load = Math.min(1, rate / (capacity || peak));
        const thick = 2 + (thickest - 2) * Math.sqrt(load);
        const seconds = `${LOADS.find(([from]) => load >= from)[1]}s`;
        base.setAttribute("stroke-width", thick.toFixed(1));
        dash.setAttribute("stroke-width", Math.min(4, thick * 0.7).toFixed(1));
        base.classList.toggle("gone", gone);
        dash.classList.toggle("still", rate <= 0 || gone);
        if (dash.style.animationDuration !== seconds) dash.style.animationDuration = seconds; // begins anew
      }
      let begin = 0;
      PARTS.forEach((part, k) => {
        const share = member.state === "up" ? member.shares[part] ?? 0 : 0;
        set(node.arcs[k], { "stroke-dasharray": `${share} 1`, "stroke-dashoffset": -begin, visibility: share > 0 ? "visible" : "hidden" });
        begin += share;
      });
      node.core.setAttribute("fill", STATES[member.state]);
      if (!node.small) return;
      const speed = member.state === "up" && member.tokens_per_s ? `${count(member.tokens_per_s)} tokens/s` : WORDS[member.state];
      say(node.small, gone ? `lost ${span(now_s - member.since_s)} ago` : speed);
      node.small.style.fill = gone ? "var(--bad)" : "";
      const load = capacity ? [percent(Math.max(rates.up, rates.down) / capacity)] : [];
      const rate = capacity && this.narrow ? [] : [`${bytes(rates.up + rates.down)}/s`];
      say(node.load, gone || rates.up + rates.down <= 0 ? "" : [...rate, ...load].join(" · "));
    });
    say(this.version, `v ${Math.max(0, ...versions)}`);
  }

  tip(i) {
    const m = this.state.members[i];
    const { gbps, rtt_ms } = this.state.facts.members[m.name];
    const lines = [`${m.name} — ${WORDS[m.state]}`]; // its speed, time and rates are in its row below
    lines.push(`so far ${bytes(m.received_bytes)} up, ${bytes(m.sent_bytes)} down`);
    if (gbps) lines.push(`link ${gbps} Gbit/s, ${rtt_ms} ms`);
    return lines.join("\n");
  }
}

export function mapLegend(parent) {
  for (const part of PARTS) {
    const item = html("span", {}, parent);
    html("i", {}, item).style.background = PART_COLOURS[part];
    item.append(PART_WORDS[part]);
  }
}
