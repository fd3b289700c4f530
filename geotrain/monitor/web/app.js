// Asks the server for what is new, once a second, and shows it.
import { followPointer, lossChart, smoothed } from "./chart.js";
import { PARTS, PART_COLOURS, PART_WORDS, bytes, clock, count, day, described, dot } from "./format.js";
import { hideTip, markup, percent, showTip, span } from "./format.js";
import { isFew, isGone, mapHeight, worldMap } from "./map.js";
import { isSlow, memberRows, paces } from "./members.js";
import { markList, timeline } from "./timeline.js";

const EVERY_MS = 1000; // from an answer to the next question
const HIDDEN_MS = 15000; // the same while nobody sees the page
const DEADLINE_MS = 8000; // of one answer
const $ = (id) => document.getElementById(id);

// What the server has said so far; `epoch` and `number` say which of it the next answer may leave out.
const known = { epoch: "", number: 0, points: [], validations: [], marks: [], ticks: {}, state: null, answered: 0 };
const view = { axis: "tokens", part: 1, period_s: 0 }; // what was pressed
let drawn = { points: [] }; // the loss chart

const shown = {}; // an element's markup, by its id
function put(id, content) {
  if (shown[id] !== String(content)) $(id).innerHTML = shown[id] = String(content);
}

async function ask() {
  try {
    const answer = await fetch(`/state.json?since=${known.number}&epoch=${known.epoch}`, { signal: AbortSignal.timeout(DEADLINE_MS), cache: "no-store" });
    if (!answer.ok) throw new Error(String(answer.status));
    take(await answer.json());
  } catch {
    if (known.state) health(known.state, performance.now() - known.answered);
    else pill("bad", "the global server does not answer");
  }
  setTimeout(ask, document.hidden ? HIDDEN_MS : EVERY_MS);
}

function take(state) {
  // A full answer replaces what is known. Otherwise it brings what is new, within the server's own bounds.
  if (state.full) Object.assign(known, { points: [], validations: [], marks: [], ticks: {} });
  known.points.push(...state.points);
  known.validations = [...known.validations, ...state.validations].slice(-500);
  known.marks = [...known.marks, ...state.marks].slice(-1000);
  for (const [name, more] of Object.entries(state.ticks)) known.ticks[name] = [...(known.ticks[name] ?? []), ...more].slice(-200);
  Object.assign(known, { epoch: state.epoch, number: state.number, state, answered: performance.now() });
  show();
}

function show() {
  const { state, marks, ticks } = known;
  const names = state.members.map((m) => m.name);
  document.title = `${state.facts.run} – GeoTrain`;
  put("run", markup`${state.facts.run}`);
  const levels = names.every((name) => state.facts.members[name].region === name) ? "region" : "worker";
  const sizes = [plural(names.length, levels), plural(state.facts.fragments.length, "fragment")];
  put("facts", markup`${[`${count(state.facts.parameters)} parameters`, ...sizes].join(" · ")}`);
  health(state, 0);
  put("waits", state.waits.slice(0, 8).map((w) => markup`<li>waits for ${w.whom ? markup`<b>${w.whom}</b>: ` : ""}${w.text} <i>${span(state.now_s - w.since_s)}</i></li>`).join(""));
  put("figures", figures(state).join(""));
  const few = isFew(state.members);
  document.querySelector("main").classList.toggle("few", few);
  const width = Math.max(280, $("map").parentElement.clientWidth - 36);
  const height = mapHeight(state.members, width);
  $("map").setAttribute("viewBox", `0 0 ${width} ${height}`); // it stays: its animations go on
  put("map", worldMap(state, width));
  drawn = lossChart(known, names, view, Math.max(260, $("loss").clientWidth), window.innerWidth > 860 && !few ? height : 300);
  put("loss", drawn.markup);
  put("members", memberRows(state, ticks).join(""));
  put("timeline", timeline(state, marks, ticks, Math.max(260, $("timeline").clientWidth), view.period_s));
  put("marks", markList(marks).join(""));
  put("server", footer(state).map((text) => markup`<span>${text}</span>`).join(""));
}

const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;

// ---- the one sentence

function pill(kind, text) {
  $("health").className = `health ${kind}`;
  put("health", markup`<i></i><span>${text}</span>`);
}

function health(state, late_ms) {
  const [away, left, bare] = ["away", "left", "no worker"].map((s) => state.members.filter((m) => m.state === s));
  const lost = state.members.filter(isGone);
  const pace = paces(state);
  const slow = state.members.filter((m) => isSlow(pace.get(m.name)));
  const refused = state.members.filter((m) => m.refused);
  if (late_ms > 4000) return pill("bad", `the global server has not answered for ${span(late_ms / 1000)}; this is what was known`);
  if (left.length === state.members.length) return pill("good", isTrained(state) ? "finished: all tokens are trained" : "ended: all have left");
  if (lost.length) return pill("bad", `${list(lost)} ${lost[0].state} for ${span(state.now_s - Math.min(...lost.map((m) => m.since_s)))}; ${up(state)} go on`);
  // Two snapshots and the journal between them take about three times the server's memory; a large disk has room for many.
  const { disk_free_bytes: free, disk_total_bytes: total, rss_bytes: memory } = state.server ?? {};
  if (total && free < 0.05 * total && free < 4 * memory) {
    return pill("bad", `the global server's disk is nearly full: ${bytes(free)} left`);
  }
  const down = state.shards.filter((v) => !v.up).map((v) => `the global server's shard ${v.shard}`);
  down.push(...state.members.filter((m) => m.metrics.shards_down).map((m) => `${m.metrics.shards_down} of the shards of ${m.name}`));
  if (down.length) return pill("bad", `${down.join(", ")} down; updates wait for it`);
  const idle = state.members.filter((m) => m.state === "stalled" || m.state === "quarantined");
  if (idle.length) return pill("bad", `${list(idle)} ${idle[0].state}; see below`);
  if (refused.length) return pill("warn", `messages of ${list(refused)} were refused; see below`);
  if (slow.length) return pill("warn", `${list(slow)} ${slow.length > 1 ? "are" : "is"} slow: ${percent(pace.get(slow[0].name))} of the median`);
  if (state.phase === "paused") return pill("warn", "paused: no more data is handed out; “geotrain resume” lets it go on");
  if (state.phase === "stopping") return pill("warn", "stopping: workers finish their jobs and leave");
  if (away.length) return pill("warn", `waiting for ${list(away)}`);
  if (bare.length && !isTrained(state)) return pill("warn", `no worker of ${list(bare)} is here`);
  const training = state.members.length - left.length;
  return pill("good", training === 1 ? "training" : `all ${training} training`);
}

const isTrained = ({ tokens, facts }) => facts.target_tokens > 0 && tokens >= facts.target_tokens;
const up = (state) => `${state.members.filter((m) => m.state === "up").length} of ${state.members.length}`;
const list = (some) => some.slice(0, 3).map((m) => m.name).join(", ") + (some.length > 3 ? ` and ${some.length - 3} more` : "");

// ---- the figures

function figures(state) {
  const { facts } = state;
  const smooth = smoothed(known.points);
  const share = facts.target_tokens ? state.tokens / facts.target_tokens : null; // null: the run has no end
  const left = share !== null && state.tokens_per_s && state.phase === "running" ? (facts.target_tokens - state.tokens) / state.tokens_per_s : null;
  const rates = state.members.map((m) => [m.received_bytes_per_s, m.sent_bytes_per_s]);
  const [upRate, downRate] = [0, 1].map((k) => rates.reduce((sum, r) => sum + r[k], 0));
  const training = state.members.filter((m) => m.state === "up" && m.shares.compute !== undefined);
  const busy = training.reduce((sum, m) => sum + m.shares.compute, 0) / Math.max(1, training.length);
  const loss = (v) => (v < 1000 ? v.toFixed(3) : count(v));
  const checked = known.validations.length ? `${loss(known.validations[known.validations.length - 1][3])} validated` : "";
  return [
    figure("loss", "Loss", smooth.length ? loss(smooth[smooth.length - 1]) : "–", checked, trend(smooth)),
    share === null ? figure("tokens", "Tokens", count(state.tokens), "", "no end is set")
      : figure("tokens", "Tokens", count(state.tokens), `of ${count(facts.target_tokens)}`, percent(share), share),
    figure("speed", "Speed", count(state.tokens_per_s), "tokens/s", "committed, last 2 min"),
    figure("left", "Time left", share >= 1 ? "done" : span(left), "", left && share < 1 ? `until ${when(state.now_s + left)}` : ""),
    figure("busy", "Computing", training.length ? percent(busy) : "–", "", "of the workers' time"),
    figure("wan", "Between regions", `${bytes(upRate + downRate)}/s`, "", `↑ ${bytes(upRate)}/s ↓ ${bytes(downRate)}/s`),
  ];
}

const figure = (key, title, value, unit, text, share = null) => markup`<dl class="figure" id="figure-${key}"><dt>${title}</dt>
  <dd><span>${value}</span><small>${unit}</small></dd>
  ${share === null ? "" : markup`<progress max="1" value="${Math.min(1, share)}" aria-label="${title}"></progress>`}<p>${text}</p></dl>`;

const when = (time_s) => (time_s - Date.now() / 1000 > 72000 ? day(time_s) : clock(time_s, false));

// How the smoothed loss changed over the last fifth of the curve, in words.
function trend(smooth) {
  if (smooth.length < 10) return "";
  const change = smooth[smooth.length - 1] - smooth[Math.floor(smooth.length * 0.8)];
  if (Math.abs(change) < 0.0005) return "level, last fifth";
  return `${change < 0 ? "▼" : "▲"} ${Math.abs(change).toFixed(3)}, last fifth`;
}

function footer({ server: s, facts, shards }) {
  if (!s) return [];
  const flush = s.journal_flushes ? `${((1000 * s.journal_flush_s) / s.journal_flushes).toFixed(1)} ms` : "–";
  const each = shards.map((v) => (v.up ? `shard ${v.shard}: ${v.facts} facts, ${v.behind} not in the ledger, memory ${bytes(v.rss_bytes)}`
    : `shard ${v.shard}: down`));
  return ["global server:", ...described(s, facts.metrics.server), `journal flush ${flush}`, ...each];
}

// ---- what can be pressed

function pressed(id, key, choose) {
  $(id).addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    for (const other of $(id).children) other.setAttribute("aria-pressed", String(other === button));
    view[key] = choose(button.dataset);
    if (known.state) show();
  });
}
pressed("loss-switch", "axis", ({ x }) => x);
pressed("loss-zoom", "part", ({ part }) => Number(part));
pressed("timeline-switch", "period_s", ({ s }) => Number(s));
put("map-legend", PARTS.map((part) => markup`<span>${dot(PART_COLOURS[part])}${PART_WORDS[part]}</span>`).join(""));
followPointer($("loss"), () => known.state.members.map((m) => m.name), () => drawn);
// A tooltip is the text of the element's data-tip.
document.addEventListener("pointermove", (event) => {
  const element = event.target.closest("[data-tip]");
  if (element) showTip(event, element.dataset.tip);
  else if (!event.target.closest("#loss")) hideTip();
});
let drawing = 0;
function drawAgain() {
  cancelAnimationFrame(drawing);
  drawing = requestAnimationFrame(() => { if (known.state) show(); });
}
document.addEventListener("visibilitychange", drawAgain);
window.addEventListener("resize", drawAgain);
ask();
