"""Connects a worker's rank to its run: for GeoTrain's own trainer and for a training loop of the user's own alike."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from geotrain.common.device_state import DeviceState
from geotrain.config import ClusterConfig, RunConfig, Topology, WorkerConfig
from geotrain.monitor.dispatch import EventDispatcher
from geotrain.monitor.events import FAILED_MARK, DeviceFailed, DeviceSampled, EventLog, JobTrained, Trouble
from geotrain.net.transport.certs import Trust, trust_between
from geotrain.net.transport.fragment_links import shards_above
from geotrain.net.transport.worker_client import CONNECT_S, WorkerClient
from geotrain.outer.identity import identity_of
from geotrain.parameters.parameter_map import ParameterMap, parameter_map_of
from geotrain.worker.device_watch import DeviceWatch
from geotrain.worker.job_line import say
from geotrain.worker.loop import RunMember


@contextmanager
def _exported(run: RunConfig, events: EventLog, source: str) -> Iterator[None]:
    """Send the events to the run's OpenTelemetry collector, if it has one. Raises ConfigError."""
    if run.monitor.otlp is None:
        yield
        return
    from geotrain.monitor.otlp import Otlp  # here, because its packages need not be there

    sink = Otlp(run.monitor.otlp, run.name, source)
    dispatcher = EventDispatcher(events, live=[sink.on])
    dispatcher.start()
    try:
        yield
    finally:
        dispatcher.stop()
        sink.close()


@contextmanager
def connected(
    run: RunConfig,
    cluster: ClusterConfig,
    worker: WorkerConfig,
    *,
    data_digest: str = "",
    parameter_map: ParameterMap | None = None,
    trust: Trust | None = None,
    connect_s: float = CONNECT_S,
    report: Callable[[dict[str, Any]], None] = lambda numbers: None,
    trouble: Callable[[str], None] = lambda what: None,
) -> Iterator[RunMember]:
    """Open this rank's connection to the server above its worker, and the worker's event log; closes both.

    data_digest: sha256 of the training data that is here; "": what the run file says. parameter_map, trust: None:
    those that the run and the cluster file say. connect_s: how long a join
    tries to reach the server. report, trouble: called after the log has got a job's numbers, or what a person should
    know. Raises CertificateError.
    """
    topology, parameter_map = Topology(run, cluster), parameter_map or parameter_map_of(run)
    site = topology.server_of(worker.name)
    trust = trust or trust_between(cluster, "worker", worker.name, "global" if topology.flat else "region", site)
    shards = shards_above(cluster, parameter_map, "worker", worker.name, site)
    client = WorkerClient(str(topology.servers[site]), trust=trust, connect_s=connect_s, shards=shards)
    log = run.run_folder / "events" / f"{worker.name}.jsonl"
    opened = EventLog(log, source=worker.name, enabled=run.monitor.enabled)
    with closing(client), opened as events, _exported(run, events, worker.name), ExitStack() as watches:

        def on_job(numbers: dict[str, Any]) -> None:
            events.write(JobTrained(worker=worker.name, retries=float(client.retries), **numbers))
            report(numbers)

        def on_trouble(what: str) -> None:
            events.write(Trouble(what))
            trouble(what)

        host = socket.gethostname()

        def on_failed(rank: int, device: str, what: str) -> None:
            event = DeviceFailed(worker.name, rank, host, device, what)
            events.write(event)
            say(FAILED_MARK + json.dumps(asdict(event)), sys.stderr)
            on_trouble(f"rank {rank} on {host}: device {device} is not fit: {what}; reset or replace it")

        def watch_device(on: torch.device, rank: int) -> DeviceWatch:
            def on_sample(state: DeviceState) -> None:
                events.write(DeviceSampled(worker.name, rank, state.numbers()))

            def on_unwatched(why: str) -> None:
                on_trouble(f"rank {rank} on {host}: its device is not watched: {why}; training goes on")

            watch = DeviceWatch(on, partial(on_failed, rank), on_unwatched, on_sample)
            watches.callback(watch.stop)
            return watch

        yield RunMember(
            run,
            worker.name,
            identity_of(run, parameter_map, data_digest),
            parameter_map,
            client,
            workers=len(topology.home),
            report=on_job,
            trouble=on_trouble,
            write_event=events.write,
            watch_device=watch_device,
            device_failed=on_failed,
        )
