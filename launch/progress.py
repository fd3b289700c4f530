"""How a run goes, from its servers' status: a row for each region, live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.live import Live
from rich.table import Table

from geotrain.config import ClusterConfig, ConfigError, RunConfig, is_loopback, load_cluster, load_run
from geotrain.net.certs import OPERATOR, trust_between
from geotrain.net.status import ask_status
from geotrain.outer.messages import GLOBAL

Status = Mapping[str, Any]
ASK_S = 2.0  # how long one server may take to answer


@dataclass(frozen=True)
class Row:
    """One region. None: not known yet. loss: mean over its workers. restarts: of its workers and its server."""

    region: str
    loss: float | None
    tokens_per_s: float | None
    up_bytes: int
    down_bytes: int
    version: int
    global_version: int
    staleness: int | None
    workers: int
    workers_here: int
    restarts: int


@dataclass(frozen=True)
class View:
    """What is shown. eta_s: None while nothing can be said."""

    rows: tuple[Row, ...]
    share: float
    global_version: int
    eta_s: float | None


def addresses(run: RunConfig, cluster: ClusterConfig) -> dict[str, str]:
    """Every server of the run: site → host:port."""
    regions = {r.name: str(r.server) for r in cluster.serving} if run.outer.levels == 2 else {}
    return {GLOBAL: str(cluster.global_server), **regions}


def status_of_run(folder: Path) -> tuple[ClusterConfig, dict[str, Status]]:
    """What the servers of a run say; of those that have ended, what they said last.

    Raises ConfigError: there is no run, or none of its servers has said anything.
    """
    run, cluster = load_run(folder / "run.json"), load_cluster(folder / "cluster.json")
    servers = addresses(run, cluster)
    found = {**last_words(folder, servers), **ask(cluster, servers)}
    if not found:
        where = ", ".join(f"{site} at {address}" for site, address in servers.items())
        raise ConfigError(f"{folder}: no server answers ({where}), and none has left its last status")
    return cluster, found


def last_words(folder: Path, sites: Iterable[str]) -> dict[str, Status]:
    """What those servers said when they last ended, as far as their folders are on this machine."""
    files = {site: folder / "servers" / site / "status.json" for site in sites}
    return {site: json.loads(file.read_text()) for site, file in files.items() if file.exists()}


def ask(cluster: ClusterConfig, servers: Mapping[str, str], within_s: float = ASK_S) -> dict[str, Status]:
    """The status of every server that answers in time. Raises CertificateError."""

    def ask_one(site: str) -> Status | None:
        trust = trust_between(cluster, "operator", OPERATOR, "global" if site == GLOBAL else "region", site)
        return ask_status(servers[site], within_s, trust)

    with ThreadPoolExecutor(max(1, len(servers))) as executor:
        answers = executor.map(ask_one, servers)
        return {site: status for site, status in zip(servers, answers, strict=True) if status is not None}


def view(cluster: ClusterConfig, statuses: Mapping[str, Status], eta_s: float | None = None) -> View:
    """Pure. statuses: by site, as far as they are known."""
    top = statuses.get(GLOBAL, {})
    rows = tuple(
        _row(region.name, [w.name for w in region.workers], top, statuses.get(region.name))
        for region in cluster.serving
    )
    return View(rows, share_of(top), max(top.get("versions", []), default=0), eta_s)


def share_of(top: Status) -> float:
    """The share of the run's samples that is committed, by the global server's status."""
    return float(top.get("committed_samples", 0)) / max(1, top.get("train_samples", 1))


def _row(region: str, workers: list[str], top: Status, server: Status | None) -> Row:
    flat = region not in top.get("members", {})  # the workers speak to the global server themselves
    source = top if flat else (server or {})
    members = [m for name, m in source.get("members", {}).items() if name in workers]
    losses = [m["loss"] for m in members if "loss" in m]
    speeds = [m["tokens_per_s"] for m in members if "tokens_per_s" in m]
    if flat:
        peers = [p for name, p in top.get("peers", {}).items() if name in workers]
        up, down = sum(p["received_bytes"] for p in peers), sum(p["sent_bytes"] for p in peers)
        stale = [m["staleness"] for m in members if "staleness" in m]
    else:
        links = source.get("links", {})
        up, down = links.get("up_bytes", 0), links.get("down_bytes", 0)
        above = top["members"][region]
        stale = [above["staleness"]] if "staleness" in above else []
    return Row(
        region,
        sum(losses) / len(losses) if losses else None,
        sum(speeds) if speeds else None,
        up,
        down,
        max(source.get("versions", []), default=0),
        max(source.get("global_versions", top.get("versions", [])), default=0),
        int(max(stale)) if stale else None,
        len(workers),
        sum(1 for m in members if m["joined"] and not m["left"]),
        sum(m["restarts"] for m in [*members, *([] if flat else [top["members"][region]])]),
    )


class Eta:
    """Seconds until all samples are committed, at the mean speed since the first commit that was seen."""

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


def line(row: Row, seen: View) -> str:
    """One region, for a log."""
    cells = _cells(row, seen)
    return (
        f"{row.region}: loss {cells[1]}, {cells[2]} tokens/s, up {cells[3]}, down {cells[4]}, version {cells[5]} "
        f"(global {cells[6]}), staleness {cells[7]}, workers {cells[8]}, restarts {cells[9]}, "
        f"committed {cells[10]}, {cells[11]} left"
    )


HEADINGS = (
    "region",
    "loss",
    "tokens/s",
    "up",
    "down",
    "version",
    "global",
    "stale",
    "workers",
    "restarts",
    "done",
    "left",
)


def new_console() -> Console:
    """For tables: as wide as the terminal, or wide enough where there is none."""
    return Console() if Console().is_terminal else Console(width=160)


def table(seen: View) -> Table:
    made = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in HEADINGS:
        made.add_column(heading, justify="left" if heading == "region" else "right", no_wrap=True)
    for row in seen.rows:
        made.add_row(*_cells(row, seen))
    return made


def _cells(row: Row, seen: View) -> tuple[str, ...]:
    return (
        row.region,
        "–" if row.loss is None else f"{row.loss:.3f}",
        "–" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
        size(row.up_bytes),
        size(row.down_bytes),
        str(row.version),
        str(row.global_version),
        "–" if row.staleness is None else str(row.staleness),
        f"{row.workers_here}/{row.workers}",
        str(row.restarts),
        f"{seen.share:.0%}",
        "–" if seen.eta_s is None else f"{seen.eta_s // 60:.0f}:{seen.eta_s % 60:02.0f}",
    )


def size(count_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count_bytes < 1000:
            return f"{count_bytes:.0f} {unit}" if unit == "B" else f"{count_bytes:.1f} {unit}"
        count_bytes /= 1000
    return f"{count_bytes:.1f} TB"


class Display:
    """Asks the servers on a thread of its own; `show` draws what is known. A context manager."""

    def __init__(self, run: RunConfig, cluster: ClusterConfig, console: Console) -> None:
        self._cluster, self._console = cluster, console
        self._servers = addresses(run, cluster)
        self._every_s = run.monitor.every_s
        self._latest: dict[str, Status] = {}
        self._eta = Eta()
        self._page: str | None = None  # the status page's address, once it was told
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask_on, name="status", daemon=True)
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Display:
        self._thread.start()
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(2 * ASK_S)
        if self._live:
            self._live.stop()

    def finish(self, folder: Path) -> None:
        """Show once more, with the last words of the servers that have ended."""
        self._latest = {**self._latest, **last_words(folder, self._servers)}
        self.show()

    def show(self) -> None:
        latest = dict(self._latest)
        share = share_of(latest.get(GLOBAL, {}))
        seen = view(self._cluster, latest, self._eta.update(share, time.monotonic()))
        if self._live:
            self._live.update(table(seen), refresh=True)
            return
        for text in lines(seen):
            self._console.print(text, highlight=False, soft_wrap=True)

    def _ask_on(self) -> None:
        while not self._stop.wait(self._every_s):
            self._latest = {**self._latest, **ask(self._cluster, self._servers)}
            self._tell_page(self._latest.get(GLOBAL, {}).get("page"))

    def _tell_page(self, url: str | None) -> None:
        if url and url != self._page:
            self._page = url
            self._console.print(page_line(self._cluster, url), highlight=False, soft_wrap=True)


def page_line(cluster: ClusterConfig, url: str) -> str:
    """Where a person finds the status page."""
    if cluster.global_ssh is None or not is_loopback(urlsplit(url).hostname or ""):
        return f"status page: {url}"
    port = urlsplit(url).port
    tunnel = f"ssh -N -L {port}:127.0.0.1:{port} {cluster.global_ssh}"
    return f"status page: {url} on {cluster.global_ssh}; to see it here: {tunnel}"


def lines(seen: View) -> Iterable[str]:
    """Regions of which something is known."""
    return [line(row, seen) for row in seen.rows if row.workers_here or row.loss is not None]
