// One row a region: what its time goes to, its speed, how stale its updates are, what its link carries.
import { PARTS, PART_WORDS, bytes, clock, colour, count, described, html, line, percent, say, span, svg, tipOn } from "./format.js";
import { WORDS } from "./map.js";

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

export class Members {
  constructor(parent) {
    Object.assign(this, { parent, key: "", rows: [] });
  }

  show(state, ticks) {
    this.state = state;
    const key = state.members.map((m) => m.name).join(" ");
    if (key !== this.key) {
      this.key = key;
      this.build(state);
    }
    const pace = paces(state);
    const peak = Math.max(1, ...state.members.flatMap((m) => [m.sent_bytes_per_s, m.received_bytes_per_s]));
    state.members.forEach((member, i) => this.update(this.rows[i], member, pace.get(member.name), ticks[member.name] ?? [], state.now_s, peak));
  }

  build(state) {
    const titles = html("div", { class: "row title" });
    this.parent.className = "rows";
    for (const [text, right] of [["region"], ["time"], ["tokens/s", 1], ["loss", 1], ["staleness of its updates"], ["link: up ↑ and down ↓"], ["heard", 1]]) {
      html("div", right ? { class: "right" } : {}, titles, text);
    }
    this.rows = state.members.map((member, i) => this.row(member, i, state.members.length));
    this.parent.replaceChildren(titles, ...this.rows.map((r) => r.root));
  }

  row(member, i, of) {
    const root = html("div", { class: "row", "data-member": member.name });
    const name = html("div", { class: "name" }, root);
    html("i", {}, name).style.background = colour(i, of);
    html("b", { title: member.name }, name, member.name);
    const badge = html("span", { class: "badge" }, name);
    const share = html("div", { class: "c-share" }, root);
    const bar = html("div", { class: "bar" }, share);
    const parts = Object.fromEntries(PARTS.map((part) => [part, html("span", { class: part }, bar)]));
    const shareText = html("div", { class: "under" }, share);
    const speed = html("div", { class: "right c-speed" }, root);
    const loss = html("div", { class: "right c-loss" }, root);
    const stale = html("div", { class: "spark c-stale" }, root);
    const spark = svg("svg", { viewBox: "0 0 120 26", preserveAspectRatio: "none" }, stale);
    const sparkLine = svg("path", { fill: "none", stroke: colour(i, of), "stroke-width": 1.5, "vector-effect": "non-scaling-stroke" }, spark);
    const staleText = html("b", {}, stale);
    const link = html("div", { class: "c-link" }, root);
    const heard = html("div", { class: "right under c-heard" }, root);
    tipOn(share, () => this.shareTip(i));
    tipOn(stale, () => this.staleTip(i));
    return { root, badge, parts, shareText, speed, loss, sparkLine, staleText, link, heard };
  }

  update(row, member, pace, ticks, now_s, peak) {
    row.root.dataset.state = member.state;
    const [kind, text, why] = member.state === "lost" ? ["bad", `lost ${span(now_s - member.since_s)} ago`]
      : member.state !== "up" ? [member.state === "away" ? "warn" : "calm", WORDS[member.state]]
      : isSlow(pace) ? ["warn", `slow: ${percent(pace)}`, `${percent(pace)} of the median speed of a worker`]
      : member.refused ? ["warn", `${member.refused} refused`] : ["", ""];
    row.badge.className = `badge ${kind}`;
    say(row.badge, text);
    row.badge.title = why ?? "";
    row.root.style.order = kind === "bad" ? 1 : kind === "warn" ? 2 : 3; // those that need a look come first
    for (const part of PARTS) row.parts[part].style.flexGrow = String(member.shares[part] ?? 0);
    const known = member.shares.compute !== undefined;
    const worst = PARTS.slice(1).reduce((a, b) => ((member.shares[a] ?? 0) >= (member.shares[b] ?? 0) ? a : b));
    const rest = known && member.shares[worst] >= 0.1 ? [`${percent(member.shares[worst])} ${PART_WORDS[worst]}`] : [];
    const mfu = member.mfu ? [`MFU ${percent(member.mfu)}`] : [];
    say(row.shareText, known ? [`${percent(member.shares.compute)} computing`, ...rest, ...mfu].join(" · ") : "no update yet");
    say(row.speed, member.state === "up" ? count(member.tokens_per_s) : "–");
    say(row.loss, member.loss === null ? "–" : member.loss.toFixed(3));
    const recent = ticks.slice(-60).map((t) => t[2]);
    const high = Math.max(1, ...recent);
    row.sparkLine.setAttribute("d", recent.length > 1 ? line(recent.map((v, i) => [(120 * i) / (recent.length - 1), 24 - (22 * v) / high])) : "");
    const stale = member.staleness.filter((v) => v !== null);
    say(row.staleText, stale.length ? String(Math.max(...stale)) : "–");
    say(row.link, `↑ ${bytes(member.received_bytes_per_s)}/s   ↓ ${bytes(member.sent_bytes_per_s)}/s`);
    say(row.heard, member.state === "left" || member.silent_s === null ? "–" : `${span(member.silent_s)} ago`);
  }

  shareTip(i) {
    const m = this.state.members[i];
    const lines = PARTS.filter((p) => m.shares[p] !== undefined).map((p) => `${PART_WORDS[p]} ${(100 * m.shares[p]).toFixed(1)} %`);
    if (m.updated_s) lines.push(`last merge ${clock(m.updated_s)}, ${m.updates} so far`);
    const { worker, server } = this.state.facts.metrics;
    lines.push(...described(m, worker));
    if (m.delta_norm !== null) lines.push(`delta norm ${count(m.delta_norm)}`);
    for (const name of ["workers", "retries", "shards_down"]) {
      if (m.metrics[name] !== undefined) lines.push(`${name.replace("_", " ")} ${m.metrics[name]}`);
    }
    lines.push(...described(m.metrics, server).map((text) => `server: ${text}`));
    return lines.join("\n") || "no update yet";
  }

  staleTip(i) {
    const m = this.state.members[i];
    const shown = this.state.facts.fragments.slice(0, 12);
    const lines = shown.map((name, f) => `${name}: ${m.staleness[f] ?? "–"}`);
    return ["versions that passed since its anchor", ...lines, ...(this.state.facts.fragments.length > 12 ? ["…"] : [])].join("\n");
  }
}
