"""What stands for torch.cuda where there is no GPU."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import torch


class Event:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name
        self.happened, self.waited_for = threading.Event(), threading.Event()

    def synchronize(self) -> None:
        self.log.append(f"{threading.current_thread().name.split('_')[0]} waits for {self.name}")
        self.waited_for.set()
        assert self.happened.wait(60)


class Stream:
    def __init__(self, cuda: Cuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: Stream) -> None:
        self.cuda.log.append(f"{self.name} after {other.name}")

    def record_event(self) -> Event:
        event = Event(self.cuda.log, f"event {len(self.cuda.events)}")
        self.cuda.events.append(event)
        if not self.cuda.late:
            event.happened.set()
        return event

    def wait_event(self, event: Event) -> None:
        self.cuda.log.append(f"{self.name} after {event.name}")


class Cuda:
    """Stands for torch.cuda: operations happen at once, events when they are told to."""

    def __init__(self, late: bool = False) -> None:
        self.late = late
        self.log: list[str] = []
        self.events: list[Event] = []
        self.training = Stream(self, "training")

    def Stream(self, device: torch.device) -> Stream:
        return Stream(self, "exchange")

    def current_stream(self, device: torch.device) -> Stream:
        return self.training

    @contextmanager
    def stream(self, stream: Stream):
        self.log.append("[")
        yield
        self.log.append("]")
