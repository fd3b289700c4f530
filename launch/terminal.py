"""Shows a run on the terminal, for `geotrain launch` and `geotrain status`: asks its servers for their status and
draws it.

On a terminal it is one picture that is redrawn; in a log, a plain line for each region.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from geotrain.common.files import OutputError, read_object, write_whole
from geotrain.common.names import ENDLESS_SAMPLES, GLOBAL
from geotrain.config import ClusterConfig, RegionConfig, RunConfig, Topology, is_loopback
from geotrain.net.transport.certs import OPERATOR, trust_between
from geotrain.net.transport.operator_client import ask_status
from geotrain.outer.server.liveness import Liveness

# Of one server, see `GrpcService.status`. One that does not answer now also has `as_of`, the Unix time of its status.
Status = Mapping[str, Any]
UNKNOWN = "–"
ASK_S = 2.0  # how long one server may take to answer
SEEN = "seen.json"  # in the run's folder: what servers said last to the launcher, for when they do not answer
SEEN_EVERY_S = 30.0
MOST_SHOWN = 8  # waits, or members that are missing
# Of several members' states the first one is shown.
WORST = (
    *(Liveness.LOST, Liveness.CUT_OFF, Liveness.QUARANTINED, Liveness.STALLED),
    *(Liveness.AWAY, Liveness.PAUSED, Liveness.UP, Liveness.LEFT),
)

# ------------------------------------------------------------------------------------------- asking the servers


def addresses(run: RunConfig, cluster: ClusterConfig) -> dict[str, str]:
    """Addresses of all servers of the run: site → host:port."""
    return {site: str(address) for site, address in Topology(run, cluster).servers.items()}


def ask(cluster: ClusterConfig, servers: Mapping[str, str], within_s: float = ASK_S) -> dict[str, Status]:
    """Ask every server for its status; returns those that answer in time. Raises CertificateError."""

    def ask_one(site: str) -> Status | None:
        trust = trust_between(cluster, "operator", OPERATOR, "global" if site == GLOBAL else "region", site)
        return ask_status(servers[site], within_s, trust)

    with ThreadPoolExecutor(max(1, len(servers))) as executor:
        answers = executor.map(ask_one, servers)
        return {site: status for site, status in zip(servers, answers, strict=True) if status is not None}


def last_words(folder: Path, sites: Iterable[str]) -> dict[str, Status]:
    """Read the last status of servers that have ended, by site, if their folders are on this machine."""
    said = {site: read_object(folder / "servers" / site / "status.json") for site in sites}
    return {site: words for site, words in said.items() if words}


def last_status(folder: Path) -> Status:
    """Read the last status of the run's global server; empty if it goes on, or was on another machine."""
    return last_words(folder, (GLOBAL,)).get(GLOBAL, {})


def aged(statuses: Mapping[str, Status], now_s: float) -> dict[str, Status]:
    """Mark statuses as those of now or, where they are, of earlier; what has ended stays as it is."""
    return {site: each if each.get("finished") else {"as_of": now_s, **each} for site, each in statuses.items()}


def last_seen(folder: Path) -> dict[str, Status]:
    """Read what servers said last to the run's launcher, by site; empty if there is nothing to be read."""
    return {site: said for site, said in read_object(folder / SEEN).items() if isinstance(said, dict)}


# --------------------------------------------------------------------------------------------- what is shown


def region_state(region: RegionConfig, statuses: Mapping[str, Status]) -> str:
    """Say how a region is: as the global server judges it or, where that does not answer, by its own answer."""
    top, own = statuses.get(GLOBAL, {}), statuses.get(region.name, {})
    names = {region.name, *(worker.name for worker in region.workers)}
    members = [member for name, member in top.get("members", {}).items() if name in names and "state" in member]
    if members and "as_of" not in top:
        worst = min(members, key=lambda member: WORST.index(Liveness(member["state"])))
        silent = Liveness(worst["state"]).missing
        return f"{worst['state']} {clock(worst['silent_s'])}" if silent else str(worst["state"])
    if "connected" in own and "as_of" not in own:
        return "up" if own["connected"] else "cut off"
    return "no answer" if "as_of" in own else UNKNOWN


def region_cells(region: RegionConfig, statuses: Mapping[str, Status]) -> dict[str, str]:
    """Make one region's row: column → text. statuses: those that are known, by site."""
    names = [worker.name for worker in region.workers]
    top = statuses.get(GLOBAL, {})
    above = top.get("members", {}).get(region.name)  # the region, as the global server sees it
    # Without region servers, and before its region server has joined, workers are members of the global server.
    source = top if above is None else statuses.get(region.name, {})
    members = [member for name, member in source.get("members", {}).items() if name in names]
    if above is None:
        peers = [peer for name, peer in top.get("peers", {}).items() if name in names]
        up, down = sum(p["received_bytes"] for p in peers), sum(p["sent_bytes"] for p in peers)
    else:
        links = source.get("links", {})
        up, down = links.get("up_bytes", 0), links.get("down_bytes", 0)
    alive = [m for m in members if not Liveness(m.get("state", Liveness.UP)).missing]
    losses = [m["loss"] for m in members if "loss" in m]
    speeds = [m["tokens_per_s"] for m in alive if "tokens_per_s" in m]
    own = members if above is None else [above]
    stale = [m["staleness"] for m in own if "staleness" in m]
    sharing = top.get("sharing", 0)  # members of the global server, by whose number it divides
    return {
        "region": region.name,
        "state": region_state(region, statuses),
        "loss": f"{sum(losses) / len(losses):.3f}" if losses else UNKNOWN,
        "tokens/s": f"{sum(speeds):,.0f}" if speeds else UNKNOWN,
        "up": size(up),
        "down": size(down),
        "version": str(max(source.get("versions", []), default=0)),
        "global": str(max(source.get("global_versions", top.get("versions", [])), default=0)),
        "stale": str(int(max(stale))) if stale else UNKNOWN,
        "share": f"{sum(m.get('takes_part', False) for m in own) / sharing:.0%}" if sharing else UNKNOWN,
        "workers": f"{sum(1 for m in alive if m['joined'] and not m['left'])}/{len(names)}",
        "restarts": str(sum(m["restarts"] for m in (*members, above or {"restarts": 0}))),
    }


def shard_lines(statuses: Mapping[str, Status]) -> list[str]:
    """Make a line for each server whose shards are processes of their own."""
    found = []
    for site, status in statuses.items():
        words = [
            f"{v['shard']} {v['facts']:,} facts, {v['behind']:,} not in the ledger, {size(v['rss_bytes'])}"
            if v["up"]
            else f"{v['shard']} DOWN"
            for v in status.get("shards", ())
        ]
        if words and status.get("phase") != "ended":
            found.append(f"shards of {site}: {'; '.join(words)}")
    return found


def waits_of(statuses: Mapping[str, Status]) -> list[dict[str, Any]]:
    """List what the servers that answer wait for, the oldest first, each with its `server`."""
    answering = {site: status for site, status in statuses.items() if "as_of" not in status}
    found = [{"server": site, **wait} for site, status in answering.items() for wait in status.get("waits", ())]
    return sorted(found, key=lambda wait: float(wait["since_s"]))


def wait_lines(statuses: Mapping[str, Status], now_s: float) -> list[str]:
    """Make a line for each thing that servers wait for."""
    return [
        f"{wait['server']} waits for {wait['whom'] + ': ' if wait['whom'] else ''}{wait['text']} "
        f"(for {clock(max(0.0, now_s - wait['since_s']))})"
        for wait in waits_of(statuses)[:MOST_SHOWN]
    ]


def share_of(top: Status) -> float:
    """The share of the run's samples that are committed; 0 of a run without an end. top: the global server's
    status."""
    whole = top.get("train_samples", 0)
    return float(top["committed_samples"]) / whole if 0 < whole < ENDLESS_SAMPLES else 0.0


def committed(top: Status, form: str) -> str:
    """Format how much is committed: as a share or, of a run without an end, in samples."""
    endless = top.get("train_samples", 0) >= ENDLESS_SAMPLES
    return f"{top['committed_samples']:,} samples" if endless else format(share_of(top), form)


class Eta:
    """Estimates the seconds until all samples are committed, from the mean speed since the first commit it saw."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None

    def update(self, share: float, now_s: float) -> float | None:
        if share <= 0:
            return None
        if self._first is None:
            self._first = (now_s, share)
        begin_s, begin_share = self._first
        if share <= begin_share:
            return None
        return (1 - share) * (now_s - begin_s) / (share - begin_share)


def lines(cluster: ClusterConfig, statuses: Mapping[str, Status], left_s: float | None) -> list[str]:
    """Make the lines for a log, one for each region of which something is known. left_s: time until the run's end."""
    rows = [region_cells(region, statuses) for region in cluster.serving]
    top = statuses.get(GLOBAL, {})
    end = at_rest(top) or f"{clock(left_s)} left"
    return [
        f"{c['region']}: {unusual(c['state'])}loss {c['loss']}, {c['tokens/s']} tokens/s, "
        f"up {c['up']}, down {c['down']}, "
        f"version {c['version']} (global {c['global']}), staleness {c['stale']}, share {c['share']}, "
        f"workers {c['workers']}, restarts {c['restarts']}, committed {committed(top, '.0%')}, {end}"
        for c in rows
        if c["loss"] != UNKNOWN or not c["workers"].startswith("0/")
    ]


def unusual(state: str) -> str:
    return "" if state in (UNKNOWN, Liveness.UP) else f"{state}; "


def at_rest(top: Status) -> str:
    """The phase in which no remaining time can be estimated: the run is paused, or stops before its data ends. Else
    empty. top: the global server's status."""
    return str(top["phase"]) if top.get("phase") in ("paused", "stopping") else ""


def missing(top: Status) -> dict[str, Mapping[str, Any]]:
    """Return the members that are silent. top: the global server's status."""
    members = {} if "as_of" in top else top.get("members", {})
    return {name: m for name, m in members.items() if "state" in m and Liveness(m["state"]).missing}


def headline(top: Status, state: str, reason: str = "") -> str:
    """Describe the state of a run in one line. top: the global server's status. reason: why the run has failed."""
    words = [state]
    if top.get("draining"):
        words.append(f"draining {', '.join(top['draining'])}")
    words += [f"{name} {member['state']}" for name, member in missing(top).items()][:MOST_SHOWN]
    if "train_samples" in top:
        ago = f", {clock(time.time() - top['as_of'])} ago" if "as_of" in top else ""
        words.append(f"{committed(top, '.1%')} committed{ago}")
    if (ends_s := top.get("ends_s")) and top.get("phase") in ("running", "paused"):
        words.append(f"stops in {clock(max(0.0, ends_s - time.time()))}")
    if validated := top.get("validation"):
        words.append(f"validation loss {validated['loss']:.4f} (at {validated['samples']:,} samples)")
    if (effective := top.get("effective")) is not None:
        words.append(f"{effective:.1%} effective training time")
    if spike := top.get("loss_spike"):
        words.append(f"loss spike: {spike['loss']:.4f}, where {spike['usual']:.4f} was usual")
    return "; ".join([*words, reason] if reason else words)


def draw(title: str, cluster: ClusterConfig, statuses: Mapping[str, Status], left_s: float | None = None) -> Group:
    """Draw the picture for a terminal: the title, a row for each region, and the status page's address if it is
    up."""
    table = table_of([region_cells(region, statuses) for region in cluster.serving], left=("region", "state"))
    top = statuses.get(GLOBAL, {})
    page = None if top.get("phase") == "ended" else top.get("page")
    return Group(
        Text(title if left_s is None or at_rest(top) else f"{title}; {clock(left_s)} left"),
        table,
        *map(Text, [*shard_lines(statuses), *wait_lines(statuses, time.time())]),
        *([Text(page_line(cluster, page))] if page else []),
    )


def page_line(cluster: ClusterConfig, url: str) -> str:
    """Describe how to open the status page, through an ssh tunnel if it is on another machine's loopback."""
    if cluster.global_ssh is None or not is_loopback(urlsplit(url).hostname or ""):
        return f"status page: {url}"
    at = urlsplit(url)
    tunnel = f"ssh -N -L {at.port}:{at.netloc} {cluster.global_ssh}"
    return f"status page: {url} on {cluster.global_ssh}; to see it here: {tunnel}"


class RunDisplay:
    """The launcher's display, a context manager. A thread asks the servers; `show` draws what is known, without
    waiting."""

    def __init__(self, run: RunConfig, cluster: ClusterConfig, console: Console, folder: Path) -> None:
        self._run, self._cluster, self._console, self._folder = run, cluster, console, folder
        self._servers = addresses(run, cluster)
        self.latest: dict[str, Status] = {}
        self._eta = Eta()
        self._page: str | None = None  # the status page's address, once it was printed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask_on, name="status", daemon=True)
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> RunDisplay:
        self._thread.start()
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(2 * ASK_S)
        if self._live:
            self._live.stop()

    def finish(self) -> None:
        """Show the run once more, with the last status of the servers that have ended."""
        self.latest = {**self.latest, **last_words(self._folder, self._servers)}
        self.show()
        top = self.latest.get(GLOBAL)
        if top and not self._live:
            state = "finished" if top.get("complete") else str(top["phase"])
            self._console.print(f"{self._run.name}: {headline(top, state)}", highlight=False, soft_wrap=True)

    def show(self) -> None:
        latest = self.latest  # the thread replaces this dict and never changes it, so no lock is needed
        top = latest.get(GLOBAL, {})
        left_s = self._eta.update(share_of(top), time.monotonic())
        if self._live:
            title = f"{self._run.name}: {headline(top, top.get('phase', 'starting'))}"
            self._live.update(draw(title, self._cluster, latest, left_s), refresh=True)
            return
        shown = lines(self._cluster, latest, left_s)
        if (page := top.get("page")) and page != self._page:
            self._page = page
            shown.insert(0, page_line(self._cluster, page))
        for line in shown:
            self._console.print(line, highlight=False, soft_wrap=True)

    def _ask_on(self) -> None:
        kept_s = -SEEN_EVERY_S
        while not self._stop.wait(self._run.monitor.every_s):
            live, now_s = ask(self._cluster, self._servers), time.time()
            self.latest = {**aged(self.latest, now_s), **live}
            if live and time.monotonic() - kept_s >= SEEN_EVERY_S:
                kept_s = time.monotonic()
                with contextlib.suppress(OutputError):  # without room, nothing can be shown later
                    write_whole(self._folder / SEEN, json.dumps(aged(self.latest, now_s)))


# ------------------------------------------------------------------------------------------- for all commands


def new_console() -> Console:
    """Make a console for tables: as wide as the terminal, or wide enough if there is none."""
    return Console() if Console().is_terminal else Console(width=160)


def table_of(rows: Sequence[Mapping[str, str]], left: Collection[str] | None = None) -> Table:
    """Make a table without lines. rows: column → text, each with the same columns. left: the columns aligned to the
    left, all others are aligned to the right; None: all are aligned to the left."""
    table = Table(box=None, pad_edge=False)
    for heading in rows[0] if rows else ():
        table.add_column(heading, justify="left" if left is None or heading in left else "right")
    for row in rows:
        table.add_row(*row.values())
    return table


def size(count_bytes: float) -> str:
    """Format a number of bytes, with a decimal prefix."""
    for unit in ("B", "kB", "MB", "GB"):
        if count_bytes < 1000:
            return f"{count_bytes:.0f} {unit}" if unit == "B" else f"{count_bytes:.1f} {unit}"
        count_bytes /= 1000
    return f"{count_bytes:.1f} TB"


def clock(seconds: float | None) -> str:
    """Format a time in minutes and seconds."""
    return UNKNOWN if seconds is None else f"{seconds // 60:.0f}:{seconds % 60:02.0f}"
