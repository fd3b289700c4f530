"""Starts what shows in one process how the run goes: what `monitor` in the run file asks for, fed by the process's
events."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

from geotrain.common.names import GLOBAL
from geotrain.config import ClusterConfig, RunConfig
from geotrain.monitor.board import TensorBoard, Wandb
from geotrain.monitor.dispatch import STOP_S, EventDispatcher, Sink, end_within
from geotrain.monitor.events import EventLog
from geotrain.monitor.history import History, PageFacts
from geotrain.monitor.http import HttpServer, Route, read_token
from geotrain.monitor.metrics import Metrics
from geotrain.monitor.narrator import Narrator
from geotrain.monitor.page import page_routes

log = logging.getLogger(__name__)

LAUNCHER = "launcher"


class Monitor:
    """A process's page, metrics and curves. It is a context manager, around everything that writes to `events`.

    site: "global", "launcher" or a region. facts: those of the run, on the global server, whose page shows them; None
    elsewhere, where there is no page.
    page_url, metrics_url: where they are served; None: they are not. Raises ConfigError.
    """

    def __init__(
        self, run: RunConfig, cluster: ClusterConfig, site: str, events: EventLog, facts: PageFacts | None = None
    ) -> None:
        config = run.monitor
        self.page_url: str | None = None
        self.metrics_url: str | None = None
        self._servers: list[HttpServer] = []
        self._dispatchers: list[EventDispatcher] = []
        self._closing = ExitStack()
        if not config.enabled:
            return
        token = read_token(config.token_file)
        with_past: list[Sink] = []
        live: list[Sink] = []
        ends, boards = list[Callable[[], object]](), list[TensorBoard | Wandb]()  # of sinks
        with ExitStack() as opened:  # if a later part cannot be opened, the earlier ones are closed
            opened.callback(lambda: end_within(STOP_S, *ends, *(board.close for board in boards)))

            def serve(port: int, routes: Mapping[str, Route]) -> str:
                self._servers.append(HttpServer(config.host, port, routes, token))
                opened.callback(self._servers[-1].close)
                return self._servers[-1].url

            port = metrics_port(run, cluster, site)
            if port is not None:
                links = {name: m["gbps"] for name, m in facts.members.items() if m["gbps"]} if facts else {}
                metrics = Metrics(run.name, site, facts.target_tokens if facts else 0, links)
                live.append(metrics.on)
                self.metrics_url = serve(port, {"/metrics": metrics.route}) + "metrics"
            if facts is not None and config.page_port is not None:
                history = History(facts, uuid.uuid4().hex[:8])
                with_past.append(history.on)
                self.page_url = serve(config.page_port, page_routes(history))
            if site == GLOBAL and config.tensorboard is not None:
                boards.append(TensorBoard(Path(config.tensorboard)))
            if site == GLOBAL and config.wandb is not None:
                boards.append(Wandb(config.wandb, run))
            if config.otlp is not None:
                from geotrain.monitor.otlp import Otlp  # here, because its packages need not be there

                sink = Otlp(config.otlp, run.name, site)
                ends.append(sink.close)
                live.append(sink.on)
            if site != LAUNCHER:  # which has a display
                live.append(Narrator().on)
            # Boards wait for disks and networks; neither the page nor each other does.
            self._dispatchers = [EventDispatcher(events, with_past, live)] if with_past or live else []
            self._dispatchers += [EventDispatcher(events, live=[board.on]) for board in boards]
            self._closing = opened.pop_all()

    def __enter__(self) -> Monitor:
        for server in self._servers:
            server.start()
            self._closing.callback(server.stop)
        for dispatcher in self._dispatchers:
            dispatcher.start()
        # Closed first, while the boards still take the last events.
        self._closing.callback(end_within, STOP_S, *(dispatcher.stop for dispatcher in self._dispatchers))
        for what, url in (("status page", self.page_url), ("metrics", self.metrics_url)):
            if url:
                log.info("%s: %s", what, url)
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()

    def staying(self, run: RunConfig) -> RunConfig:
        """Give the run with the ports in it that were found free here, for whoever begins again in this place."""
        found = {"page_port": self.page_url, "metrics_port": self.metrics_url}
        ports = {key: urlsplit(url).port for key, url in found.items() if url and not getattr(run.monitor, key)}
        return run.model_copy(update={"monitor": run.monitor.model_copy(update=ports)})


def metrics_port(run: RunConfig, cluster: ClusterConfig, site: str) -> int | None:
    """The port of a site's metrics: monitor.metrics_port for the global server, the next for the launcher, then one
    for each region. None: no metrics; 0: any free port."""
    base = run.monitor.metrics_port
    return base and base + [GLOBAL, LAUNCHER, *(region.name for region in cluster.regions)].index(site)
