// Numbers and times as people read them; small helpers for SVG, HTML and the tooltip.

// The parts of a worker's time: their names in the data, their colours, and the words for them.
export const PARTS = ["compute", "communication", "waiting"];
export const PART_COLOURS = { compute: "var(--accent)", communication: "var(--comm)", waiting: "var(--wait)" };
export const PART_WORDS = { compute: "computing", communication: "communicating", waiting: "waiting" };

function scaled(value, units) {
  let unit = 0;
  while (Math.abs(value) >= 999.5 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return [value, units[unit], unit];
}

export function count(number, digits = 3) {
  if (number === null || number === undefined || !Number.isFinite(number)) return "–";
  const [value, name, unit] = scaled(number, ["", "k", "M", "B", "T"]);
  return unit === 0 && Number.isInteger(value) ? String(value) : `${Number(value.toPrecision(digits))} ${name}`.trim();
}

export function bytes(number) {
  const [value, name, unit] = scaled(number, ["B", "kB", "MB", "GB", "TB", "PB"]);
  return `${unit ? Number(value.toPrecision(3)) : Math.round(value)} ${name}`;
}

export function span(seconds) {
  if (seconds === null || !Number.isFinite(seconds)) return "–";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Number((seconds / 3600).toPrecision(2))} h`;
  return `${Number((seconds / 86400).toPrecision(3))} days`;
}

// "title value" of each number that is there. titles: key → [title, unit], in the order of the lines.
export const described = (numbers, titles) => Object.entries(titles)
  .filter(([key]) => typeof numbers[key] === "number")
  .map(([key, [title, unit]]) => `${title} ${unit === "bytes" ? bytes(numbers[key]) : unit === "ratio" ? percent(numbers[key]) : count(numbers[key])}`);

export const percent = (share) => `${Math.round(100 * share)} %`;

export function clock(time_s, withSeconds = true) {
  const options = { hour: "2-digit", minute: "2-digit", hour12: false };
  if (withSeconds) options.second = "2-digit";
  return new Date(time_s * 1000).toLocaleTimeString([], options);
}

export function day(time_s) {
  return new Date(time_s * 1000).toLocaleDateString([], { month: "short", day: "numeric" });
}

// Colours that are easy to tell apart: eight chosen ones or, for more regions, hues a golden angle apart.
const PALETTE = ["#2f6feb", "#e8871e", "#12a37f", "#b14fd8", "#e0447c", "#0aa5c0", "#8a9a1b", "#8b6b4f"];
export function colour(index, of = 0) {
  if (index < PALETTE.length && of <= PALETTE.length) return PALETTE[index];
  return `hsl(${Math.round((215 + index * 137.508) % 360)} 62% 52%)`;
}

// Markup from a template. What is put in is text and never markup, since names and reasons come from other machines;
// but for what was made by this function, and lists of that.
const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
class Markup extends String {}
export function markup(parts, ...values) {
  const put = (value) => (value instanceof Markup ? value : String(value ?? "").replace(/[&<>"']/g, (c) => ESCAPES[c]));
  return new Markup(String.raw({ raw: parts }, ...values.map((value) => [value].flat(Infinity).map(put).join(""))));
}
export const dot = (fill) => markup`<svg class="dot" viewBox="0 0 10 10"><circle cx="5" cy="5" r="5" fill="${fill}"/></svg>`;
export const line = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

// About `wanted` round numbers from low to high.
export function ticks(low, high, wanted, steps = [1, 2, 2.5, 5, 10]) {
  const rough = (high - low) / Math.max(1, wanted);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = steps.map((s) => s * power).find((s) => s >= rough * 0.999) ?? 10 * power;
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) found.push(at);
  return found;
}

const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];
export function timeTicks(low, high, wanted) {
  const step = TIME_STEPS.find((s) => s >= (high - low) / Math.max(1, wanted)) ?? 604800;
  // Steps are counted in local time, so that marks stand at whole hours and days of the reader's clock.
  const offset = new Date(low * 1000).getTimezoneOffset() * 60;
  const found = [];
  for (let at = Math.ceil((low - offset) / step) * step + offset; at <= high; at += step) {
    found.push([at, step >= 86400 ? day(at) : clock(at, step < 60)]);
  }
  return found;
}

export function showTip(event, text) {
  const box = document.getElementById("tip");
  box.textContent = text;
  box.hidden = false;
  const x = Math.min(event.clientX + 14, window.innerWidth - box.offsetWidth - 8);
  const below = event.clientY + 16 + box.offsetHeight < window.innerHeight;
  box.style.transform = `translate(${Math.max(8, x)}px, ${below ? event.clientY + 16 : event.clientY - box.offsetHeight - 12}px)`;
}
export function hideTip() { document.getElementById("tip").hidden = true; }
