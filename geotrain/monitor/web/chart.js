// Loss over tokens or over time: each region's own, thin, and the run's, smoothed.
import { clock, colour, count, hideTip, line, set, showTip, svg, ticks, timeTicks } from "./format.js";

const MARGIN = { left: 46, right: 14, top: 12, bottom: 36 };

export class LossChart {
  constructor(parent) {
    // height: the least in pixels. part: the share of the run that is shown, counted from its end.
    Object.assign(this, { parent, axis: "tokens", height: 300, part: 1, points: [], validations: [], names: [] });
  }

  // points: [number, time_s, tokens, loss, member index or −1]; validations: [number, time_s, tokens, loss]
  show(points, validations, names) {
    Object.assign(this, { points, validations, names });
    this.draw();
  }

  draw() {
    const width = Math.max(260, this.parent.clientWidth);
    const height = Math.max(this.height, Math.min(400, width * 0.62));
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Training loss" });
    const column = this.axis === "tokens" ? 2 : 1;
    const all = this.points;
    const from = all.length < 20 ? -Infinity : all[all.length - 1][column] - this.part * (all[all.length - 1][column] - all[0][column]);
    const points = all.filter((p) => this.part === 1 || p[column] >= from);
    if (points.length < 2) {
      svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle", class: "empty" }, root, "The curve begins with the second merge.");
      this.parent.replaceChildren(root);
      return;
    }
    const smooth = smoothed(this.points).slice(-points.length);
    const xs = points.map((p) => p[column]);
    const [xLow, xHigh] = [xs[0], Math.max(xs[xs.length - 1], xs[0] + (column === 2 ? 1 : 0.001))];
    const checked = this.validations.filter((v) => v[column] >= xLow && v[column] <= xHigh);
    const [yLow, yHigh] = range(points.map((p) => p[3]), [...smooth, ...checked.map((v) => v[3])]);
    const x = (v) => MARGIN.left + ((v - xLow) / (xHigh - xLow)) * (width - MARGIN.left - MARGIN.right);
    const y = (v) => MARGIN.top + ((yHigh - v) / (yHigh - yLow)) * (height - MARGIN.top - MARGIN.bottom);
    this.axes(root, width, height, x, y, [xLow, xHigh], [yLow, yHigh]);
    const clip = svg("clipPath", { id: "loss-clip" }, root);
    svg("rect", { x: MARGIN.left, y: MARGIN.top - 2, width: width - MARGIN.left - MARGIN.right + 4, height: height - MARGIN.top - MARGIN.bottom + 4 }, clip);
    const inside = svg("g", { "clip-path": "url(#loss-clip)" }, root);
    this.names.forEach((_, member) => {
      const own = points.filter((p) => p[4] === member);
      if (own.length > 1) svg("path", { class: "raw", stroke: colour(member, this.names.length), d: line(own.map((p) => [x(p[column]), y(p[3])])) }, inside);
    });
    const curve = smooth.map((v, i) => [x(xs[i]), y(v)]);
    const floor = height - MARGIN.bottom;
    svg("path", { class: "curve-area", d: `${line(curve)}L${curve[curve.length - 1][0].toFixed(1)} ${floor}L${curve[0][0].toFixed(1)} ${floor}Z` }, inside);
    svg("path", { class: "curve", id: "loss-curve", "data-points": points.length, d: line(curve) }, inside);
    const [ex, ey] = curve[curve.length - 1];
    svg("circle", { cx: ex, cy: ey, r: 4, fill: "var(--accent)", stroke: "var(--card)", "stroke-width": 2 }, root);
    for (const v of checked) svg("circle", { class: "validation", cx: x(v[column]), cy: y(v[3]), r: 4 }, inside);
    this.pointer(root, width, height, curve, smooth, points);
    this.parent.replaceChildren(root);
  }

  axes(root, width, height, x, y, [xLow, xHigh], [yLow, yHigh]) {
    const decimals = yHigh - yLow < 0.2 ? 3 : yHigh - yLow < 2 ? 2 : 1;
    for (const v of ticks(yLow, yHigh, 5)) {
      svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(v), y2: y(v) }, root);
      svg("text", { x: MARGIN.left - 8, y: y(v) + 4, "text-anchor": "end" }, root, v.toFixed(decimals));
    }
    const wanted = Math.max(2, Math.floor(width / 110));
    const marks = this.axis === "tokens"
      ? ticks(xLow, xHigh, wanted).map((v) => [v, count(v)])
      : timeTicks(xLow, xHigh, wanted);
    for (const [v, text] of marks) {
      if (x(v) > width - 30 && this.axis === "time") continue;
      svg("line", { class: "grid", x1: x(v), x2: x(v), y1: height - MARGIN.bottom, y2: height - MARGIN.bottom + 4 }, root);
      svg("text", { x: x(v), y: height - MARGIN.bottom + 17, "text-anchor": "middle" }, root, text);
    }
    svg("text", { class: "axis-name", x: width - MARGIN.right, y: height - 3, "text-anchor": "end" }, root,
      this.axis === "tokens" ? "tokens in the global weights" : "local time");
    svg("text", { class: "axis-name", x: MARGIN.left, y: height - 3 }, root, "nats a token");
  }

  pointer(root, width, height, curve, smooth, points) {
    const cursor = svg("line", { class: "cursor", y1: MARGIN.top, y2: height - MARGIN.bottom, visibility: "hidden" }, root);
    const dot = svg("circle", { r: 4, fill: "var(--accent)", visibility: "hidden" }, root);
    const plane = svg("rect", { x: MARGIN.left, y: 0, width: width - MARGIN.left, height, fill: "transparent" }, root);
    plane.addEventListener("pointermove", (event) => {
      const box = root.getBoundingClientRect();
      const at = ((event.clientX - box.left) * width) / box.width;
      let best = 0;
      curve.forEach(([cx], i) => { if (Math.abs(cx - at) < Math.abs(curve[best][0] - at)) best = i; });
      const [, time_s, tokens, loss, member] = points[best];
      const [cx, cy] = curve[best];
      set(cursor, { x1: cx, x2: cx, visibility: "visible" });
      set(dot, { cx, cy, visibility: "visible" });
      const who = member >= 0 ? `${this.names[member]}: ${loss.toFixed(4)}` : `mean of merges: ${loss.toFixed(4)}`;
      showTip(event, `loss ${smooth[best].toFixed(4)}\n${who}\n${count(tokens, 4)} tokens, ${clock(time_s)}`);
    });
    plane.addEventListener("pointerleave", () => {
      for (const mark of [cursor, dot]) set(mark, { visibility: "hidden" });
      hideTip();
    });
  }
}

// Each loss replaced by the mean of its neighbourhood, about a fortieth of all points. Towards the ends it narrows
// evenly on both sides, so that it stays centred and the curve is not shifted.
export function smoothed(points) {
  const reach = Math.max(1, Math.round(points.length / 80));
  const sums = [0];
  for (const p of points) sums.push(sums[sums.length - 1] + p[3]);
  return points.map((_, i) => {
    const near = Math.min(reach, i, points.length - 1 - i);
    return (sums[i + near + 1] - sums[i - near]) / (2 * near + 1);
  });
}

// [low, high] of the vertical axis: room for the smoothed curve and all but the most extreme single losses, which
// would flatten everything else.
function range(values, smooth) {
  const sorted = [...values].sort((a, b) => a - b);
  const at = (share) => sorted[Math.round(share * (sorted.length - 1))];
  let low = Math.min(at(0.005), ...sample(smooth));
  let high = Math.max(at(0.995), ...sample(smooth));
  if (high - low < 1e-6) { low -= 0.5; high += 0.5; }
  const room = (high - low) * 0.06;
  return [low - room, high + room];
}

const sample = (values) => values.filter((_, i) => i % Math.max(1, Math.floor(values.length / 2000)) === 0 || i === values.length - 1);
