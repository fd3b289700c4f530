"""All that shows how a run goes, in one process: what `monitor` in the run file asks for, fed by its event log."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path

from geotrain.config import ClusterConfig, RunConfig
from geotrain.monitor.board import TensorBoard, Wandb
from geotrain.monitor.events import EventLog
from geotrain.monitor.feed import Feed, Sink
from geotrain.monitor.history import Facts, History
from geotrain.monitor.http import HttpServer, read_token
from geotrain.monitor.metrics import Metrics
from geotrain.monitor.page import page_routes

log = logging.getLogger(__name__)

GLOBAL, LAUNCHER = "global", "launcher"


class Monitor:
    """A context manager, around everything that writes to `events`.

    site: "global", "launcher" or a region. facts: for the global server's page. Raises ConfigError.
    page_url, metrics_url: where they are served; None: they are not.
    """

    def __init__(
        self, run: RunConfig, cluster: ClusterConfig, site: str, events: EventLog, facts: Facts | None = None
    ) -> None:
        config = run.monitor
        self.page_url: str | None = None
        self.metrics_url: str | None = None
        self._servers: list[HttpServer] = []
        self._boards: list[TensorBoard | Wandb] = []
        self._feed: Feed | None = None
        if not config.enabled:
            return
        token = read_token(config.token_file)
        with_past: list[Sink] = []
        live: list[Sink] = []
        try:
            port = metrics_port(run, cluster, site)
            if port is not None:
                tokens = run.data.train_samples * run.data.sequence_length if site == GLOBAL else 0
                metrics = Metrics(run.name, site, tokens, _capacities(cluster) if site == GLOBAL else {})
                live.append(metrics.on)
                self._servers.append(HttpServer(config.host, port, {"/metrics": metrics.route}, token))
                self.metrics_url = self._servers[-1].url + "metrics"
            if facts is not None and config.page_port is not None:
                history = History(facts, uuid.uuid4().hex[:8])
                with_past.append(history.on)
                self._servers.append(HttpServer(config.host, config.page_port, page_routes(history), token))
                self.page_url = self._servers[-1].url
            if site == GLOBAL:
                self._boards = _boards(run)
                live += [board.on for board in self._boards]
            if with_past or live:
                self._feed = Feed(events, with_past, live)
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> Monitor:
        if self._feed:
            self._feed.start()
        for server in self._servers:
            server.start()
        for what, url in (("status page", self.page_url), ("metrics", self.metrics_url)):
            if url:
                log.info("%s: %s", what, url)
        return self

    def __exit__(self, *error: object) -> None:
        if self._feed:
            self._feed.stop()
        for server in self._servers:
            server.stop()
        self._servers = []
        self._close()

    def _close(self) -> None:
        for server in self._servers:
            server.close()
        for board in self._boards:
            board.close()


def metrics_port(run: RunConfig, cluster: ClusterConfig, site: str) -> int | None:
    """monitor.metrics_port for the global server, then the launcher, then the regions; None: no metrics."""
    base = run.monitor.metrics_port
    if not base:
        return base
    return base + [GLOBAL, LAUNCHER, *(region.name for region in cluster.regions)].index(site)


def _boards(run: RunConfig) -> list[TensorBoard | Wandb]:
    boards: list[TensorBoard | Wandb] = []
    folder = run.run_folder
    if run.monitor.tensorboard is not None:
        boards.append(TensorBoard(folder / run.monitor.tensorboard))
    if run.monitor.wandb is not None:
        boards.append(Wandb(run.monitor.wandb, run.name, Path(folder)))
    return boards


def _capacities(cluster: ClusterConfig) -> dict[str, float]:
    """Region → Gbit/s of its link to the global server, where the cluster file states it."""
    return {end: li.gbps for li in cluster.links if GLOBAL in li.regions for end in li.regions if end != GLOBAL}
