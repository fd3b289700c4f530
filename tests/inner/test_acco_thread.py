"""ACCO's communication thread on a device, which is stood in for: what it does around each collective."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch


class Stream:
    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def synchronize(self) -> None:
        self.log.append("the host waits")

    def wait_event(self, event: Any) -> None:
        pass


class Event:
    def record(self) -> None:
        pass


class Place:
    """Place of rank 0 of two replicas."""

    dp_rank, dp_size, tp_rank, is_last_stage, dp_group, model_group = 0, 2, 0, True, "dp", "model"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    from geotrain.inner.acco import communication_thread

    seen: list[Any] = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(communication_thread.platform, "HAS_CUDA", True)
    monkeypatch.setattr(communication_thread.platform, "DEVICES", 2)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: Stream(seen))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(seen))
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: seen.append((threading.current_thread().name, str(d))))
    monkeypatch.setattr(communication_thread, "group_like", lambda group, backend, timeout: (group, backend, timeout))
    monkeypatch.setattr(communication_thread.dist, "new_group", lambda **_: None)
    monkeypatch.setattr(communication_thread.dist, "destroy_process_group", lambda group: None)
    monkeypatch.setattr(communication_thread.dist, "all_reduce", lambda tensor, group: seen.append(group))
    for name in ("reduce_scatter_fn", "allgather_fn", "all_to_all_single"):
        monkeypatch.setattr(
            communication_thread.ds_comm,
            name,
            lambda *_, group, name=name, **__: seen.append((name, group[:2])) or SimpleNamespace(wait=lambda: None),
        )
    return seen


@pytest.mark.parametrize(
    ("call", "collective"),
    [("reduce_scatter", "reduce_scatter_fn"), ("all_gather", "allgather_fn"), ("exchange", "all_to_all_single")],
)
def test_hosts_meet_before_a_collective_and_its_thread_waits_for_it(
    log: list[Any], call: str, collective: str
) -> None:
    from datetime import timedelta

    from geotrain.inner.acco.communication_thread import CommunicationThread

    thread, flat = CommunicationThread(Place(), 7.0), torch.zeros(8)  # type: ignore[arg-type]
    arguments = ([flat], [flat.clone()]) if call == "exchange" else (flat,)
    thread.start(lambda: getattr(thread, call)(*arguments)).wait(60.0)
    thread.close()
    meeting = ("dp", "gloo", timedelta(seconds=7))
    assert log == [("acco_0", "cuda:1"), meeting, (collective, ("dp", "nccl")), "the host waits"]
