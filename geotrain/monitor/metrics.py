"""Prometheus metrics of one process, fed by its events. `geotrain.monitor.registry` declares them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from geotrain.monitor.events import LivenessChanged, Record
from geotrain.monitor.http import Query, Response
from geotrain.monitor.registry import EVENTS, LINK_CAPACITY, MEMBER_SAYS, MEMBER_UP, METRICS, READERS, TARGET_TOKENS
from geotrain.outer.metrics import Metric

NAMESPACE = "geotrain"
ALWAYS = ("run", "site")  # labels of all metrics
MAX_SAID = 64  # so many different names of numbers in heartbeats are shown


class Metrics:
    """The metrics of one process; `on` is a sink. All carry the labels `run` and `site` (global, a region or
    launcher).

    target_tokens: of the whole run; 0 if not known. links: region → Gbit/s of its link, if the cluster file states
    it.
    """

    def __init__(self, run: str, site: str, target_tokens: int = 0, links: Mapping[str, float] | None = None) -> None:
        self._always = run, site
        self._said: set[str] = set()  # names of numbers in heartbeats
        self._totals: dict[tuple[Metric, tuple[str, ...]], float] = defaultdict(float)
        self._open()
        if target_tokens:
            self._write(TARGET_TOKENS, target_tokens)
        for member, gbps in (links or {}).items():
            self._write(LINK_CAPACITY, gbps * 1e9 / 8, member)

    def route(self, query: Query) -> Response:
        return Response(generate_latest(self.registry), CONTENT_TYPE_LATEST)

    def on(self, record: Record) -> None:
        event = record.event
        self._write(EVENTS, 1.0, type(event).__name__)
        for metric, read in READERS.get(type(event), ()):
            value = read(event, record.time_s)
            if isinstance(event, LivenessChanged) and metric is MEMBER_UP and value is None:
                self._remove(metric, event.member)
            if isinstance(value, Mapping):
                labels = [str(getattr(event, label)) for label in metric.labels[:-1]]
                for last, each in value.items():
                    if metric is not MEMBER_SAYS or self._may_say(last):
                        self._write(metric, each, *labels, str(last))
            elif value is not None:
                self._write(metric, value, *(str(getattr(event, label)) for label in metric.labels))

    def _may_say(self, what: str) -> bool:
        """Whether a number of a heartbeat is shown. Another machine chose its name, and a series stays for as long as
        this process."""
        if len(self._said) < MAX_SAID:
            self._said.add(what)
        return what in self._said

    def _write(self, metric: Metric, value: float, *labels: str) -> None:
        if metric.kind == "total":
            # A counter takes increments only. A total that fell has begun anew with its process: it adds nothing.
            before, self._totals[metric, labels] = self._totals[metric, labels], value
            value = max(0.0, value - before)
        self._put(metric, value, labels)

    # -- where they go

    def _open(self) -> None:
        self.registry = CollectorRegistry()
        self._series = {metric: collector(metric, self.registry) for metric in METRICS}

    def _put(self, metric: Metric, value: float, labels: tuple[str, ...]) -> None:
        """Set a gauge, or add to a counter."""
        series = self._series[metric].labels(*self._always, *labels)
        if isinstance(series, Gauge):
            series.set(value)
        else:
            series.inc(value)

    def _remove(self, metric: Metric, *labels: str) -> None:
        self._series[metric].remove(*self._always, *labels)


def collector(metric: Metric, registry: CollectorRegistry | None = None) -> Gauge | Counter:
    """The metric in the words of Prometheus's client."""
    kind = Gauge if metric.kind == "gauge" else Counter
    labels = (*ALWAYS, *metric.labels)
    return kind(metric.name, metric.help, labels, namespace=NAMESPACE, unit=metric.unit, registry=registry)
