// Loss over tokens or over time: each region's own, thin, and the run's, smoothed.
import { clock, colour, count, hideTip, line, markup, showTip, ticks, timeTicks } from "./format.js";

const MARGIN = { left: 46, right: 14, top: 12, bottom: 36 };

// What is drawn of a run, and where. points: [number, time_s, tokens, loss, member index or −1]; validations: [number,
// time_s, tokens, loss]. axis: "tokens" or "time". part: the share of the run that is shown, counted from its end.
// least: height in pixels.
export function lossChart({ points: all, validations }, names, { axis, part }, width, least) {
  const height = Math.max(least, Math.min(400, width * 0.62));
  const column = axis === "tokens" ? 2 : 1;
  const last = all[all.length - 1];
  const from = all.length < 20 || part === 1 ? -Infinity : last[column] - part * (last[column] - all[0][column]);
  const points = all.filter((p) => p[column] >= from);
  const [floor, right] = [height - MARGIN.bottom, width - MARGIN.right];
  const around = (inside) => markup`<svg viewBox="0 0 ${width} ${height}" role="img" aria-label="Training loss">${inside}</svg>`;
  if (points.length < 2) {
    const text = "The curve begins with the second merge.";
    return { points: [], markup: around(markup`<text x="${width / 2}" y="${height / 2}" text-anchor="middle" class="empty">${text}</text>`) };
  }
  const smooth = smoothed(all).slice(-points.length);
  const xs = points.map((p) => p[column]);
  const [xLow, xHigh] = [xs[0], Math.max(xs[xs.length - 1], xs[0] + (column === 2 ? 1 : 0.001))];
  const checked = validations.filter((v) => v[column] >= xLow && v[column] <= xHigh);
  const [yLow, yHigh] = range(points.map((p) => p[3]), [...smooth, ...checked.map((v) => v[3])]);
  const x = (v) => MARGIN.left + ((v - xLow) / (xHigh - xLow)) * (right - MARGIN.left);
  const y = (v) => MARGIN.top + ((yHigh - v) / (yHigh - yLow)) * (floor - MARGIN.top);
  const curve = smooth.map((v, i) => [x(xs[i]), y(v)]);
  const end = curve[curve.length - 1];
  const decimals = yHigh - yLow < 0.2 ? 3 : yHigh - yLow < 2 ? 2 : 1;
  const wanted = Math.max(2, Math.floor(width / 110));
  const marks = axis === "tokens" ? ticks(xLow, xHigh, wanted).map((v) => [v, count(v)])
    : timeTicks(xLow, xHigh, wanted).filter(([v]) => x(v) <= width - 30);
  const place = (p) => [x(p[column]), y(p[3])];
  const own = names.map((_, i) => [i, points.filter((p) => p[4] === i)]).filter(([, mine]) => mine.length > 1);
  return { points, smooth, curve, width, markup: around(markup`
    ${ticks(yLow, yHigh, 5).map((v) => markup`<path class="grid" d="M${MARGIN.left} ${y(v)}H${right}"/>
      <text x="${MARGIN.left - 8}" y="${y(v) + 4}" text-anchor="end">${v.toFixed(decimals)}</text>`)}
    ${marks.map(([v, text]) => markup`<path class="grid" d="M${x(v)} ${floor}v4"/>
      <text x="${x(v)}" y="${floor + 17}" text-anchor="middle">${text}</text>`)}
    <text class="axis-name" x="${right}" y="${height - 3}" text-anchor="end">${column === 2 ? "tokens in the global weights" : "local time"}</text>
    <text class="axis-name" x="${MARGIN.left}" y="${height - 3}">nats a token</text>
    <clipPath id="loss-clip">
      <rect x="${MARGIN.left}" y="${MARGIN.top - 2}" width="${right - MARGIN.left + 4}" height="${floor - MARGIN.top + 4}"/></clipPath>
    <g clip-path="url(#loss-clip)">
      ${own.map(([i, mine]) => markup`<path class="raw" stroke="${colour(i, names.length)}" d="${line(mine.map(place))}"/>`)}
      <path class="curve-area" d="${line(curve)}L${end[0].toFixed(1)} ${floor}L${curve[0][0].toFixed(1)} ${floor}Z"/>
      <path class="curve" id="loss-curve" data-points="${points.length}" d="${line(curve)}"/>
      ${checked.map(place).map(([cx, cy]) => markup`<circle class="validation" cx="${cx}" cy="${cy}" r="4"/>`)}
    </g><circle cx="${end[0]}" cy="${end[1]}" r="4" fill="var(--accent)" stroke="var(--card)" stroke-width="2"/>
    <g id="loss-cursor" visibility="hidden"><path class="cursor" d="M0 ${MARGIN.top}V${floor}"/><circle r="4" fill="var(--accent)"/></g>`) };
}

// Says what is under the pointer. drawn: gives what `lossChart` has returned last.
export function followPointer(parent, names, drawn) {
  parent.addEventListener("pointermove", (event) => {
    const { points, smooth, curve, width } = drawn();
    if (!points.length) return;
    const box = parent.getBoundingClientRect();
    const at = ((event.clientX - box.left) * width) / box.width;
    const best = curve.reduce((near, [cx], i) => (Math.abs(cx - at) < Math.abs(curve[near][0] - at) ? i : near), 0);
    const [, time_s, tokens, loss, member] = points[best];
    const [vertical, circle] = document.getElementById("loss-cursor").children;
    vertical.setAttribute("transform", `translate(${curve[best][0]} 0)`);
    circle.setAttribute("transform", `translate(${curve[best]})`);
    document.getElementById("loss-cursor").setAttribute("visibility", "visible");
    const who = member >= 0 ? `${names()[member]}: ${loss.toFixed(4)}` : `mean of merges: ${loss.toFixed(4)}`;
    showTip(event, `loss ${smooth[best].toFixed(4)}\n${who}\n${count(tokens, 4)} tokens, ${clock(time_s)}`);
  });
  parent.addEventListener("pointerleave", () => {
    document.getElementById("loss-cursor")?.setAttribute("visibility", "hidden");
    hideTip();
  });
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
