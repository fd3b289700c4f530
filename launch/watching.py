"""What a launcher writes down as events: the processes that it starts, and how they end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from geotrain.config import RunConfig
from geotrain.launch.supervise import Process
from geotrain.monitor.events import EventLog, ProcessEnded, ProcessStarted
from geotrain.monitor.monitor import LAUNCHER


def event_log(run: RunConfig, folder: Path, sites: tuple[str, ...] = ()) -> EventLog:
    """In the run's folder on this machine. sites: of a far launcher, whose folder may be this one."""
    name = "-".join((LAUNCHER, *sites))
    return EventLog(folder / "events" / f"{name}.jsonl", source=name, enabled=run.monitor.enabled)


def writer(events: EventLog) -> Callable[[Process, int | None], None]:
    """For `Supervisor(watch=…)`."""

    def watch(process: Process, code: int | None) -> None:
        if code is None:
            events.write(ProcessStarted(process.name, process.role))
        else:
            events.write(ProcessEnded(process.name, code))

    return watch
