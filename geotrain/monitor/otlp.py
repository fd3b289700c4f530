"""Sends what a process's events say to an OpenTelemetry collector, by OTLP: traces, metrics and logs.

A worker's update is a trace. Its id follows from the run's name and the update's, so that worker and servers, which
know nothing of each other's spans, write into the same one. A region's own update is another trace, which has links
to those of the updates in it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from geotrain.config import ConfigError
from geotrain.monitor import events
from geotrain.monitor.dispatch import STOP_S, end_within
from geotrain.monitor.history import MARKS
from geotrain.monitor.metrics import NAMESPACE, Metrics
from geotrain.monitor.registry import METRICS
from geotrain.outer.messages import update_id
from geotrain.outer.metrics import Metric

try:
    import requests
    from opentelemetry._logs import LogRecord, SeverityNumber
    from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context
except ImportError:
    raise ConfigError("monitor.otlp: its packages are not installed here: pip install 'geotrain[otlp]'") from None

TIMEOUT_S = 10.0  # of a request; what a collector does not take then is lost, and the run goes on
MOST_OPEN = 4096  # updates whose spans have begun
WORRYING = "trouble", "refused", "quarantined"  # kinds of marks


class Otlp:
    """Sends events, in batches, on threads of its own; `on` is a sink. endpoint: the collector's URL. source: the
    process."""

    def __init__(self, endpoint: str, run: str, source: str) -> None:
        self.run, self.source, base = run, source, endpoint.rstrip("/")
        self._resource = Resource.create(
            {"service.name": NAMESPACE, "service.instance.id": source, "geotrain.run": run}
        )

        def exporter(kind: Any, signal: str) -> Any:
            return kind(f"{base}/v1/{signal}", timeout=TIMEOUT_S, session=_session())

        self._spans = BatchSpanProcessor(exporter(OTLPSpanExporter, "traces"))
        self._logs = LoggerProvider(self._resource, shutdown_on_exit=False)  # `close` has a deadline
        self._logs.add_log_record_processor(BatchLogRecordProcessor(exporter(OTLPLogExporter, "logs")))
        self._logger = self._logs.get_logger(NAMESPACE)
        reader = PeriodicExportingMetricReader(exporter(OTLPMetricExporter, "metrics"))
        self._meters = MeterProvider([reader], self._resource, shutdown_on_exit=False)
        self._metrics = _OtlpMetrics(run, source, meters=self._meters)
        self._begun: dict[tuple[str, str], float] = {}  # (what, of which update or job) → when
        self._merged: list[str] = []  # updates applied since the last that went up

    def on(self, record: events.Record) -> None:
        self._metrics.on(record)
        self._log(record)
        now, event = record.time_s, record.event
        match event:
            case events.LeaseBegun():
                self._begin("job", str(event.job), now)
            case events.UpdateEncoded():
                begun = self._begun.get(("job", str(event.job)), now)
                self._begin("update", event.update, begun)
                made = {"job": event.job, "payload_bytes": event.payload_bytes}
                self._span("train", event.update, begun, now, made)
            case events.UpdateStage(update=update, stage="sent"):
                self._begin("send", update, now)
            case events.Acknowledged():
                update = update_id(event.member, event.fragment, event.sequence)
                self._span("send", update, self._since("send", update, now), self._since("adopted", update, now))
            case events.UpdateStage(update=update, stage="arrived"):
                self._begin("apply", update, now)
            case events.UpdateApplied():
                update = update_id(event.member, event.fragment, event.sequence)
                said = {"staleness": event.staleness, "samples": event.samples, "loss": event.loss}
                numbers = {name: value for name, value in said.items() if value is not None}
                self._span("apply", update, self._since("apply", update, now), now, numbers)
                self._merged = [*self._merged, update][-MOST_OPEN:]
            case events.UpdateStage(update=update, stage="answered"):
                self._span("answer", update, now, now)
            case events.UpdateStage(update=update, stage="adopted"):
                if ("send", update) in self._begun:  # its acknowledgement is noted after it
                    self._begin("adopted", update, now)
                self._span("update", update, self._since("update", update, now), now, root=True)
            case events.SentUp():
                update = update_id(self.source, event.fragment, event.sequence)
                self._begin("update", update, now)
                self._span("sent up", update, now, now, links=self._merged)
                self._merged = []
            case events.Merged():
                update = update_id(self.source, event.fragment, event.sequence)
                self._span("update", update, self._since("update", update, now), now, root=True)

    def close(self) -> None:
        """Send what is left, within STOP_S."""
        end_within(STOP_S, self._spans.shutdown, self._logs.shutdown, self._meters.shutdown)

    # -- inside

    def _begin(self, what: str, of: str, now: float) -> None:
        self._begun[what, of] = now
        if len(self._begun) > MOST_OPEN:
            del self._begun[next(iter(self._begun))]  # the oldest

    def _since(self, what: str, of: str, now: float) -> float:
        return self._begun.pop((what, of), now)

    def _context(self, update: str, span: str = "") -> SpanContext:
        """Make the context of a span of that update; without a name, of its root."""
        trace = hashlib.sha256(f"{self.run} {update}".encode()).digest()
        own = hashlib.sha256(f"{self.run} {update} {span}".encode()).digest()
        flags = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(int.from_bytes(trace[:16]), int.from_bytes(own[:8]), True, flags)

    def _span(
        self,
        name: str,
        update: str,
        begin_s: float,
        end_s: float,
        numbers: Mapping[str, Any] | None = None,
        root: bool = False,
        links: Iterable[str] = (),
    ) -> None:
        self._spans.on_end(
            ReadableSpan(
                name,
                self._context(update, "" if root else f"{name} {self.source}"),
                None if root else self._context(update),
                self._resource,
                {"update": update, **(numbers or {})},
                links=[Link(self._context(each)) for each in links],
                start_time=int(begin_s * 1e9),
                end_time=int(end_s * 1e9),
            )
        )

    def _log(self, record: events.Record) -> None:
        fields = {name: getattr(record.event, name) for name in record.event.__dataclass_fields__}
        plain: dict[str, Any] = {
            k: v if isinstance(v, (str, int, float)) else json.dumps(v, default=str) for k, v in fields.items()
        }
        update = fields.get("update") or (
            update_id(fields["member"], fields["fragment"], fields["sequence"])
            if {"member", "fragment", "sequence"} <= fields.keys()
            else ""
        )
        mark = MARKS.get(type(record.event))
        worrying = mark is not None and mark[0] in WORRYING
        self._logger.emit(
            LogRecord(
                timestamp=int(record.time_s * 1e9),
                context=set_span_in_context(NonRecordingSpan(self._context(update))) if update else None,
                severity_number=SeverityNumber.WARN if worrying else SeverityNumber.INFO,
                body=mark[2](record.event) if mark else type(record.event).__name__,
                event_name=f"{NAMESPACE}.{type(record.event).__name__}",
                attributes=plain,
            )
        )


def _session() -> requests.Session:
    """Make what sends requests, and reads no more of an answer than its head: a body may be endless."""
    session = requests.Session()
    session.stream = True
    session.hooks["response"].append(lambda answer, **_: answer.close())
    return session


class _OtlpMetrics(Metrics):
    """The metrics that Prometheus would read, as OpenTelemetry's instruments."""

    def __init__(self, run: str, site: str, meters: MeterProvider) -> None:
        self._meter = meters.get_meter(NAMESPACE)
        super().__init__(run, site)

    def _open(self) -> None:
        self._instruments = {metric: self._instrument(metric) for metric in METRICS}

    def _instrument(self, metric: Metric) -> Any:
        make = self._meter.create_gauge if metric.kind == "gauge" else self._meter.create_counter
        return make("_".join(filter(None, (NAMESPACE, metric.name, metric.unit))), metric.unit, metric.help)

    def _put(self, metric: Metric, value: float, labels: tuple[str, ...]) -> None:
        instrument, said = self._instruments[metric], dict(zip(metric.labels, labels, strict=True))
        if metric.kind == "gauge":
            instrument.set(value, said)
        else:
            instrument.add(value, said)

    def _remove(self, metric: Metric, *labels: str) -> None:
        """Do nothing: a series that is not set any more stays as it was last."""
