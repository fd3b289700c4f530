"""Traces, metrics and logs, as a collector of OTLP receives them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from geotrain.monitor import otlp
from geotrain.monitor.events import Event, LossSpike, Merged, Record, SentUp, UpdateApplied, UpdateStage
from geotrain.monitor.otlp import Otlp
from geotrain.outer.events import Acknowledged
from tests.support.own_loops import AloneRun, own_runs

KINDS = {
    "/v1/traces": (ExportTraceServiceRequest, "resource_spans", "scope_spans", "spans"),
    "/v1/metrics": (ExportMetricsServiceRequest, "resource_metrics", "scope_metrics", "metrics"),
    "/v1/logs": (ExportLogsServiceRequest, "resource_logs", "scope_logs", "log_records"),
}


class Collector:
    """A receiver of OTLP over HTTP. Each list: (who sent it, what it sent)."""

    def __init__(self) -> None:
        self.received: dict[str, list[tuple[str, Any]]] = {path: [] for path in KINDS}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                kind, *way = KINDS[self.path]
                request: Any = kind.FromString(body)  # type: ignore[attr-defined]
                for resource in getattr(request, way[0]):
                    said = {each.key: each.value.string_value for each in resource.resource.attributes}
                    for scope in getattr(resource, way[1]):
                        outer.received[self.path] += [
                            (said["service.instance.id"], item) for item in getattr(scope, way[2])
                        ]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def spans(self) -> list[tuple[str, Any]]:
        return self.received["/v1/traces"]


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.mark.long("geotrain/monitor", "geotrain/worker")
def test_a_job_is_one_trace_over_worker_and_server(collector: Collector, tmp_path: Path) -> None:
    with own_runs(tmp_path, AloneRun) as made:
        run = made("traced")
        run.serve(steps=80, changes=(f"monitor.otlp={collector.url}",))
        run.join("eu", 80)
        run.ended()
    traces: dict[bytes, dict[str, tuple[str, Any]]] = {}
    for source, span in collector.spans:
        traces.setdefault(span.trace_id, {})[span.name] = source, span
    assert len(traces) == 10  # of 8 steps each
    for spans in traces.values():
        assert {name: source for name, (source, _) in spans.items()} == {
            "train": "eu-0", "send": "eu-0", "update": "eu-0", "apply": "global", "answer": "global"
        }  # fmt: skip
        root = spans["update"][1]
        assert not root.parent_span_id
        for name, (_, span) in spans.items():
            assert name == "update" or span.parent_span_id == root.span_id
            assert root.start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= root.end_time_unix_nano
        assert spans["train"][1].end_time_unix_nano > spans["train"][1].start_time_unix_nano
    logs = [(source, record) for source, record in collector.received["/v1/logs"]]
    applied = [record for source, record in logs if record.event_name == "geotrain.UpdateApplied"]
    assert {record.trace_id for record in applied} == set(traces)
    assert {source for source, _ in logs} == {"eu-0", "global"}


def applied(member: str, sequence: int) -> UpdateApplied:
    return UpdateApplied(member, 0, sequence, sequence, [sequence], 1, 8, 100, 2.5, {})


def test_an_update_that_is_adopted_before_its_acknowledgement_is_noted_was_sent_by_then(collector: Collector) -> None:
    sender, said = (
        Otlp(collector.url, "run", "eu-0"),
        [UpdateStage("eu-0/0.1", stage) for stage in ("sent", "adopted")],
    )
    for time_s, event in enumerate([*said, Acknowledged("eu-0", "life-1", 0, 1)]):
        sender.on(Record(time_s, "eu-0", event))
    sender.close()
    assert {span.name: span.end_time_unix_nano for _, span in collector.spans} == {"update": 10**9, "send": 10**9}


def test_a_regions_update_leads_to_those_in_it(collector: Collector) -> None:
    def say(source: str, *said: Event) -> None:
        sink = Otlp(collector.url, "r", source)
        for number, event in enumerate(said):
            sink.on(Record(1e9 + number, source, event))
        sink.close()

    merged = SentUp(0, 1, 2, 9), applied("eu-0", 2), Merged(0, 1, [1], 9), SentUp(0, 2, 1, 9)
    say("eu", applied("eu-0", 1), applied("eu-1", 1), *merged)
    say("global", applied("eu", 1), UpdateStage("eu/0.1", "answered"), LossSpike(9.0, 3.0, 64))
    by_name = {(source, span.name, index): span for index, (source, span) in enumerate(collector.spans)}
    [up, up_again] = [span for (_, name, _), span in by_name.items() if name == "sent up"]
    [first, second, third] = [s for (source, name, _), s in by_name.items() if (source, name) == ("eu", "apply")]
    assert [link.trace_id for link in up.links] == [first.trace_id, second.trace_id]
    assert [link.trace_id for link in up_again.links] == [third.trace_id]
    [root] = [span for (_, name, _), span in by_name.items() if name == "update"]
    assert root.end_time_unix_nano - root.start_time_unix_nano == 2_000_000_000
    above = [span for (source, _, _), span in by_name.items() if source == "global"]
    assert {span.trace_id for span in above} == {up.trace_id} and {s.parent_span_id for s in above} == {root.span_id}
    [told] = [r for _, r in collector.received["/v1/logs"] if r.event_name == "geotrain.LossSpike"]
    assert told.severity_text == "WARN" or told.severity_number == 13
    assert told.body.string_value == "loss 9.0000, where 3.0000 was usual"
    names = {metric.name for source, metric in collector.received["/v1/metrics"] if source == "global"}
    assert {"geotrain_loss", "geotrain_updates"} <= names


@pytest.mark.parametrize("how", ["dead", "hangs", "sends without end"])
def test_a_process_ends_in_time_whatever_its_collector_does(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "STOP_S", 2.0)
    sent = [0]

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(65536)
            if how != "hangs":
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 4000000000\r\n\r\n")
                while sent[0] < 1 << 30:
                    sent[0] += connection.send(bytes(1 << 20))
            connection.recv(1 << 20)

    def serve(listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listening.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        if how == "dead":
            listening.close()
        else:
            threading.Thread(target=serve, args=(listening,), daemon=True).start()
        port = 9 if how == "dead" else listening.getsockname()[1]
        sink = Otlp(f"http://127.0.0.1:{port}", "r", "eu")
        for sequence in range(100):
            sink.on(Record(1e9, "eu", applied("eu-0", sequence)))
        begin = time.monotonic()
        sink.close()
        assert time.monotonic() - begin < 20 and sent[0] < 64 << 20
