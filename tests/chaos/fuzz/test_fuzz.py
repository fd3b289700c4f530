"""The fuzzer, for a moment: nothing crashes, changes state or is unclear. `make mutants` says that it notices."""

from __future__ import annotations

import pytest

import tests.chaos.fuzz.__main__ as fuzz

LONG = pytest.mark.long("tests/chaos/fuzz", "geotrain/config", "geotrain/data", "geotrain/net", "geotrain/outer")


@pytest.mark.parametrize("seconds", [2.0, pytest.param(60.0, marks=LONG)])
def test_nothing_breaks(tmp_path, seconds):
    counts = fuzz.run(seconds, 11, tmp_path)
    for kind, found in counts.items():
        assert found["inputs"] > 0, kind
        assert not any(found[what] for what in ("crashes", "state_changes", "unclear_errors")), (kind, found)
