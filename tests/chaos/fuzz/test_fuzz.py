"""The fuzzer itself, for a moment: nothing crashes, changes state or is unclear; and it would notice."""

from __future__ import annotations

import random

import pytest

import tests.chaos.fuzz.__main__ as fuzz
import tests.chaos.fuzz.files as fuzz_files
import tests.chaos.fuzz.messages as fuzz_messages
from geotrain.net.storage.journal import Journal
from geotrain.outer.server.server import Server
from tests.support.net_worlds import BUSY_S

LONG = pytest.mark.long("tests/chaos/fuzz", "geotrain/config", "geotrain/data", "geotrain/net", "geotrain/outer")


@pytest.mark.parametrize("seconds", [2.0, pytest.param(60.0, marks=LONG)])
def test_nothing_breaks(tmp_path, seconds):
    counts = fuzz.run(seconds, 11, tmp_path)
    for kind, found in counts.items():
        assert found["inputs"] > 0, kind
        assert not any(found[what] for what in ("crashes", "state_changes", "unclear_errors")), (kind, found)


def test_a_refusal_that_changes_something_is_noticed(monkeypatch):
    target = fuzz_messages.Messages()
    real = Server._on_join

    def careless(self, join):
        self.members["a" if "a" in self.members else "eu"].job += 1
        return real(self, join)

    monkeypatch.setattr(Server, "_on_join", careless)
    assert fuzz.fuzz(target, BUSY_S, random.Random(1), 0, "state_changes")["state_changes"] > 0


def test_records_lost_in_silence_and_crashes_are_noticed(tmp_path, monkeypatch):
    target = fuzz_files.Journals(tmp_path)
    real = Journal._replay_segment

    def forgiving(self, segment, last):
        try:
            yield from real(self, segment, last)
        except fuzz_files.JournalDamaged:
            self._begin_segment(segment + 1)

    monkeypatch.setattr(Journal, "_replay_segment", forgiving)
    assert fuzz.fuzz(target, BUSY_S, random.Random(1), 0, "state_changes")["state_changes"] > 0

    def crashing(self, segment, last):
        raise KeyError(segment)

    monkeypatch.setattr(Journal, "_replay_segment", crashing)
    assert fuzz.fuzz(target, BUSY_S, random.Random(1), 0, "crashes")["crashes"] > 0
