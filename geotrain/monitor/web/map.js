// The regions around the global server, each with its link: how full it is, and how much flows which way.
import { PARTS, PART_COLOURS, bytes, colour, count, html, percent, say, set, span, svg, tipOn } from "./format.js";

// A link's dashes run the faster, the fuller it is.
const BUCKETS = [0, 0.02, 0.1, 0.3, 0.6]; // from which load on
const SECONDS = [2.6, 1.9, 1.3, 0.9, 0.6]; // of one period
const STATES = { up: "var(--good)", lost: "var(--bad)", away: "var(--comm)", left: "var(--faint)" };
export const WORDS = { up: "training", lost: "lost", away: "not here yet", left: "finished" };

export class WorldMap {
  constructor(parent) {
    Object.assign(this, { parent, key: "", nodes: [], members: [], infos: {} });
  }

  show(state) {
    this.members = state.members;
    this.infos = state.facts.members;
    const width = Math.max(280, this.parent.clientWidth);
    const key = `${width} ${state.members.map((m) => m.name)}`;
    if (key !== this.key) {
      this.key = key;
      this.build(state.members, width);
    }
    this.update(state);
  }

  build(members, width) {
    const many = members.length > 12;
    const low = members.length <= 2 && width < 460 ? 200 : 330;
    const height = many ? Math.min(width, 620) : Math.max(low, Math.min(430, width * (low < 330 ? 0.5 : 0.72)));
    this.height = height;
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Map of regions" });
    this.links = svg("g", {}, root);
    const front = svg("g", {}, root);
    const narrow = width < 460;
    const size = many ? Math.max(5, Math.min(11, (2.2 * width) / members.length)) : narrow ? 19 : 25;
    const reach = many ? (narrow ? 34 : 82) : narrow ? 52 : 76;
    let [cx, cy] = [width / 2, height / 2 - (many ? 0 : 8)];
    const [rx, ry] = many ? [Math.min(cx, cy) - reach, Math.min(cx, cy) - reach] : [Math.min(cx - reach, 300), cy - size - 34];
    // one or two regions stand left and right; an odd number begins at the top, an even one at the top left
    const of = members.length;
    const first = of <= 2 ? Math.PI : of % 2 || many ? Math.PI / 2 : Math.PI / 2 + Math.PI / of;
    const angles = members.map((_, i) => (2 * Math.PI * i) / of - first);
    const wide = Math.max(0.3, ...angles.map((a) => Math.abs(Math.cos(a))));
    const [top, bottom] = [Math.min(-0.3, ...angles.map(Math.sin)), Math.max(0.3, ...angles.map(Math.sin))];
    const high = (bottom - top) / 2;
    cy -= (ry * (top + bottom)) / 2 / high; // centres the whole picture, not the hub
    this.nodes = members.map((member, i) => {
      const angle = angles[i];
      const at = [cx + (rx * Math.cos(angle)) / wide, cy + (ry * Math.sin(angle)) / high];
      return this.node(front, member.name, i, members.length, at, [cx, cy], size, angle, many, narrow);
    });
    const roomy = !(many && narrow);
    const hub = svg("g", { class: "hub", "text-anchor": "middle" }, front);
    svg("circle", { cx, cy, r: roomy ? 33 : 20, fill: "var(--accent)" }, hub);
    if (roomy) svg("text", { x: cx, y: cy - 1, "font-size": 12.5 }, hub, "global");
    this.hubText = roomy ? svg("text", { x: cx, y: cy + 14, class: "sub", "font-size": 11 }, hub, "") : null;
    tipOn(hub, () => `global server\nversion ${this.version ?? 0}`);
    this.parent.replaceChildren(root);
  }

  node(parent, name, i, of, [x, y], [cx, cy], size, angle, many, narrow) {
    const [dx, dy] = [cx - x, cy - y];
    const length = Math.hypot(dx, dy) || 1;
    const side = [(-dy / length) * (many ? 1.5 : 5), (dx / length) * (many ? 1.5 : 5)];
    const flows = {};
    for (const [way, sign] of [["up", 1], ["down", -1]]) {
      const bend = many ? 0 : 14 * sign;
      const from = [x + sign * side[0], y + sign * side[1]];
      const to = [cx + sign * side[0], cy + sign * side[1]];
      const middle = [(from[0] + to[0]) / 2 + (side[0] / 5) * bend, (from[1] + to[1]) / 2 + (side[1] / 5) * bend];
      // drawn from the hub to the region; what goes up runs backwards
      const d = `M${to} Q${middle} ${from}`;
      const base = svg("path", { class: "link", d, stroke: colour(i, of) }, this.links);
      const dash = svg("path", { class: `flow ${way}`, d, stroke: colour(i, of) }, this.links);
      flows[way] = { base, dash, bucket: -1 };
    }
    const g = svg("g", { class: "node", "text-anchor": "middle" }, parent);
    const node = { g, flows, size };
    svg("circle", { class: "disc", cx: x, cy: y, r: size + 1 }, g);
    const ring = { cx: x, cy: y, r: size - (many ? 1 : 3), "stroke-width": many ? 2 : 5, transform: `rotate(-90 ${x} ${y})` };
    svg("circle", { ...ring, class: "track" }, g);
    node.circumference = 2 * Math.PI * ring.r;
    node.arcs = PARTS.map((part) => svg("circle", { ...ring, class: "arc", stroke: PART_COLOURS[part] }, g));
    node.core = svg("circle", { class: "core", cx: x, cy: y, r: many ? size * 0.5 : 5 }, g);
    if (many) {
      if (!narrow) {
        const out = [cx - dx * (1 + (size + 6) / length), cy - dy * (1 + (size + 6) / length)];
        const turn = (angle * 180) / Math.PI;
        const left = Math.cos(angle) < 0;
        svg("text", { x: out[0], y: out[1], dy: "0.35em", "font-size": 10.5, "text-anchor": left ? "end" : "start",
          transform: `rotate(${left ? turn + 180 : turn} ${out})` }, g, name);
      }
    } else {
      const above = y < cy - 20;
      const line = above ? [y - size - 20, y - size - 7] : [y + size + 16, y + size + 30];
      svg("text", { x, y: line[0], class: "label" }, g, name);
      node.small = svg("text", { x, y: line[1] }, g, "");
      node.narrow = narrow;
      const share = narrow ? 0.42 : 0.46;
      node.load = svg("text", { class: "load", x: x + dx * share, y: y + dy * share + 4, "text-anchor": "middle" }, parent, "");
    }
    tipOn(g, () => this.tip(i));
    return node;
  }

  update(state) {
    const peak = Math.max(1, ...state.members.flatMap((m) => [m.sent_bytes_per_s, m.received_bytes_per_s]));
    state.members.forEach((member, i) => {
      const node = this.nodes[i];
      const gone = member.state === "lost";
      const { gbps } = this.infos[member.name];
      const capacity = gbps ? (gbps * 1e9) / 8 : null;
      for (const [way, rate] of [["up", member.received_bytes_per_s], ["down", member.sent_bytes_per_s]]) {
        const flow = node.flows[way];
        const load = capacity ? Math.min(1, rate / capacity) : rate / peak;
        const bucket = rate <= 0 || gone ? -2 : BUCKETS.findLastIndex((b) => load >= b);
        const thick = (node.size > 12 ? 2 : 1) + (node.size > 12 ? 7 : 3) * Math.sqrt(load);
        flow.base.setAttribute("stroke-width", thick.toFixed(1));
        flow.dash.setAttribute("stroke-width", Math.min(4, thick * 0.7).toFixed(1));
        flow.base.classList.toggle("gone", gone);
        if (bucket !== flow.bucket) {
          flow.bucket = bucket;
          flow.dash.classList.toggle("still", bucket < 0);
          if (bucket >= 0) flow.dash.style.animationDuration = `${SECONDS[bucket]}s`;
        }
      }
      let begin = 0;
      PARTS.forEach((part, k) => {
        const share = member.state === "up" ? member.shares[part] ?? 0 : 0;
        const long = share * node.circumference;
        set(node.arcs[k], {
          "stroke-dasharray": `${long.toFixed(2)} ${node.circumference.toFixed(2)}`,
          "stroke-dashoffset": (-begin * node.circumference).toFixed(2),
          "stroke-width": node.size > 12 ? 5 : 2,
          visibility: share > 0 ? "visible" : "hidden",
        });
        begin += share;
      });
      node.core.setAttribute("fill", STATES[member.state]);
      if (node.small) {
        const speed = member.tokens_per_s ? `${count(member.tokens_per_s)} tokens/s` : WORDS[member.state];
        say(node.small, gone ? `lost ${span(state.now_s - member.since_s)} ago` : member.state === "up" ? speed : WORDS[member.state]);
        node.small.style.fill = gone ? "var(--bad)" : "";
        const rate = member.sent_bytes_per_s + member.received_bytes_per_s;
        const busiest = Math.max(member.sent_bytes_per_s, member.received_bytes_per_s);
        const load = capacity ? percent(busiest / capacity) : "";
        say(node.load, gone || rate <= 0 ? "" : !capacity ? `${bytes(rate)}/s` : node.narrow ? load : `${bytes(rate)}/s · ${load}`);
      }
    });
    this.version = Math.max(0, ...state.versions);
    if (this.hubText) say(this.hubText, `v ${this.version}`);
  }

  tip(i) {
    const m = this.members[i];
    const info = this.infos[m.name];
    const lines = [`${m.name} — ${WORDS[m.state]}`]; // its speed, time and rates are in its row below
    lines.push(`so far ${bytes(m.received_bytes)} up, ${bytes(m.sent_bytes)} down`);
    if (info.gbps) lines.push(`link ${info.gbps} Gbit/s, ${info.rtt_ms} ms`);
    return lines.join("\n");
  }
}

export function mapLegend(parent) {
  for (const [part, text] of [["compute", "computing"], ["communication", "exposed communication"], ["waiting", "waiting"]]) {
    const item = html("span", {}, parent);
    html("i", {}, item).style.background = PART_COLOURS[part];
    item.append(text);
  }
}
