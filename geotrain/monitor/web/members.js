// One row a region: what its time goes to, its speed, how stale its updates are, what its link carries.
import { PARTS, PART_COLOURS, PART_WORDS, bytes, clock, colour, count, described, dot, line, markup, percent, span } from "./format.js";
import { isGone, words } from "./map.js";

const BADGES = { away: "warn", paused: "warn", left: "calm", "no worker": "warn" };
const SLOW = 0.6; // a region is called slow below this share of the median speed

// name → speed of its workers as a share of the median over all regions that train
export function paces(state) {
  const speeds = state.members
    .filter((m) => m.state === "up" && m.tokens_per_s)
    .map((m) => [m.name, m.tokens_per_s / Math.max(1, m.metrics.workers || state.facts.members[m.name].workers)]);
  const sorted = speeds.map(([, v]) => v).sort((a, b) => a - b);
  const median = sorted[Math.floor((sorted.length - 1) / 2)] ?? 1;
  const upper = sorted[Math.floor(sorted.length / 2)] ?? median;
  return new Map(speeds.map(([name, v]) => [name, v / Math.max(1e-9, (median + upper) / 2)]));
}
export const isSlow = (pace) => pace !== undefined && pace < SLOW;

// Rows of all members, those that need a look first. ticks: name → merges, with their staleness.
export function memberRows(state, ticks) {
  const pace = paces(state);
  const rows = state.members.map((m, i) => row(state, m, colour(i, state.members.length), pace.get(m.name), ticks[m.name] ?? []));
  return rows.sort((a, b) => a.order - b.order).map((r) => r.markup);
}

function row({ now_s, facts }, m, own, pace, ticks) {
  const [kind, text, why] = m.state !== "up" ? [BADGES[m.state] ?? "bad", words(m, now_s)]
    : isSlow(pace) ? ["warn", `slow: ${percent(pace)}`, `${percent(pace)} of the median speed of a worker`]
    : m.refused ? ["warn", `${m.refused} refused`] : ["", ""];
  const known = m.shares.compute !== undefined;
  const worst = PARTS.slice(1).reduce((a, b) => ((m.shares[a] ?? 0) >= (m.shares[b] ?? 0) ? a : b));
  const rest = known && m.shares[worst] >= 0.1 ? [`${percent(m.shares[worst])} ${PART_WORDS[worst]}`] : [];
  const mfu = m.mfu ? [`MFU ${percent(m.mfu)}`] : [];
  let begin = 0;
  const bars = PARTS.map((part) => {
    const [x, share] = [begin, m.shares[part] ?? 0];
    begin += share;
    return markup`<rect x="${x}" width="${share}" height="1" fill="${PART_COLOURS[part]}"/>`;
  });
  const recent = ticks.slice(-60).map((t) => t[2]);
  const high = Math.max(1, ...recent);
  const spark = recent.length > 1 ? line(recent.map((v, i) => [(120 * i) / (recent.length - 1), 24 - (22 * v) / high])) : "";
  const stale = m.staleness.filter((v) => v !== null);
  return { order: kind === "bad" ? 1 : kind === "warn" ? 2 : 3, markup: markup`<div class="row" data-member="${m.name}" data-state="${m.state}">
    <div class="name">${dot(own)}<b title="${m.name}">${m.name}</b><span class="badge ${kind}" title="${why}">${text}</span></div>
    <div class="c-share" data-tip="${shareTip(m, facts.metrics)}">
      <svg class="bar" viewBox="0 0 1 1" preserveAspectRatio="none">${bars}</svg>
      <div class="under">${known ? [`${percent(m.shares.compute)} computing`, ...rest, ...mfu].join(" · ") : "no update yet"}</div></div>
    <div class="right c-speed">${m.state === "up" ? count(m.tokens_per_s) : "–"}</div>
    <div class="right c-loss">${m.loss === null ? "–" : m.loss.toFixed(3)}</div>
    <div class="spark c-stale" data-tip="${staleTip(m, facts.fragments)}"><svg viewBox="0 0 120 26" preserveAspectRatio="none">
      <path fill="none" stroke="${own}" stroke-width="1.5" vector-effect="non-scaling-stroke" d="${spark}"/></svg>
      <b>${stale.length ? Math.max(...stale) : "–"}</b></div>
    <div class="c-link">↑ ${bytes(m.received_bytes_per_s)}/s   ↓ ${bytes(m.sent_bytes_per_s)}/s</div>
    <div class="right under c-silent">${m.state === "left" || m.silent_s === null ? "–" : `${span(m.silent_s)} ago`}</div></div>` };
}

function shareTip(m, { worker, server }) {
  const lines = PARTS.filter((p) => m.shares[p] !== undefined).map((p) => `${PART_WORDS[p]} ${(100 * m.shares[p]).toFixed(1)} %`);
  if (m.updated_s) lines.push(`last merge ${clock(m.updated_s)}, ${m.updates} so far`);
  lines.push(...described(m, worker));
  if (m.delta_norm !== null) lines.push(`delta norm ${count(m.delta_norm)}`);
  for (const name of ["workers", "retries", "shards_down"]) {
    if (m.metrics[name] !== undefined) lines.push(`${name.replace("_", " ")} ${m.metrics[name]}`);
  }
  lines.push(...described(m.metrics, server).map((text) => `server: ${text}`));
  return lines.join("\n") || "no update yet";
}

function staleTip(m, fragments) {
  const lines = fragments.slice(0, 12).map((name, f) => `${name}: ${m.staleness[f] ?? "–"}`);
  return ["versions that passed since its anchor", ...lines, ...(fragments.length > 12 ? ["…"] : [])].join("\n");
}
