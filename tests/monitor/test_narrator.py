"""What a server says at its terminal: each thing that happens, once, and its progress once a minute."""

from __future__ import annotations

import logging

import pytest

from geotrain.monitor.events import LivenessChanged, MemberSampled, Record, ServerSampled, Trouble, WaitsChanged
from geotrain.monitor.narrator import Narrator
from geotrain.outer.events import Event, Joined, SentUp, Steered, UpdateApplied

UPDATE = UpdateApplied("a", 0, 1, 1, [7], 1, 8, 1, 2.5, {"tokens_per_s": 1200.0})
SAMPLE = ServerSampled(1, 2, 3, 4, 5, 6, 7, 0.5, [7])
LEASE = {"what": "lease", "whom": "a", "text": "the 2 leases that it holds", "since_s": 0.0}
DISK = {"what": "room", "whom": "", "text": "room on its disk", "since_s": 0.0}


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ((Joined("a", 0, "x"), Joined("a", 1, "x", False)), ["a: joined"]),
        ((LivenessChanged("a", "up", 0.0), LivenessChanged("a", "paused", 0.0)), []),
        ((LivenessChanged("a", "cut off", 6.0), LivenessChanged("a", "up", 9.0)),
         ["a: silent for 6 s", "a: back after 9 s"]),
        ((LivenessChanged("a", "left", 0.0),), ["a: left in good order"]),
        ((WaitsChanged([LEASE]), WaitsChanged([LEASE, DISK]), WaitsChanged([])),
         ["waits for a: the 2 leases that it holds", "waits for room on its disk"]),
        ((Steered("pause", ""), Steered("drain", "eu")), ["a person said: pause", "eu: a person said: drain"]),
        ((Trouble("its writer has logged it"), MemberSampled("a", 0.0, 0, 0, 0.0, 0.0, 0, {}), SAMPLE, SAMPLE), []),
        ((LivenessChanged("a", "up", 0.0), UPDATE, UPDATE, SentUp(0, 1, 2, 8), SAMPLE, UPDATE, SAMPLE),
         ["2 updates, 1 sent up, loss 2.5000, 1200 tokens/s, version 7; 1 training"]),
    ],
)  # fmt: skip
def test_what_is_said(told: tuple[Event, ...], said: list[str], caplog: pytest.LogCaptureFixture) -> None:
    narrator = Narrator()
    with caplog.at_level(logging.INFO, "geotrain"):
        for second, event in enumerate(told):
            narrator.on(Record(1000.0 + second, "eu", event))
    assert caplog.messages == said


def test_progress_is_said_again_a_minute_later(caplog: pytest.LogCaptureFixture) -> None:
    narrator = Narrator()
    with caplog.at_level(logging.INFO, "geotrain"):
        narrator.on(Record(1000.0, "eu", SentUp(0, 1, 2, 8)))
        for second in range(0, 600, 5):
            narrator.on(Record(1000.0 + second, "eu", UPDATE))
            narrator.on(Record(1000.0 + second, "eu", SAMPLE))
    assert len(caplog.messages) == 10 and caplog.messages[1].startswith("12 updates, loss 2.5000")
