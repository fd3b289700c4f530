"""Short runs: what goes wrong in their worlds, and what the last line says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.studies import short


def test_the_last_line_is_of_the_default(tmp_path: Path, capsys, monkeypatch) -> None:
    found, kept = {"sync": (2.0, 0.8), "merged": (2.1, 0.7), "wait": (1.99, 0.75)}, tmp_path / "rows.jsonl"
    about = dict(zip(short.KEY, ("2x1x8x20", "muon", "", 0, 1.0), strict=True))
    rows = [{**about, "rule": rule, "loss": loss, "utilization": used} for rule, (loss, used) in found.items()]
    kept.write_text("\n".join(map(json.dumps, rows)))
    command = ["short", "--runs", "2x1x8x20", "--optimizers", "muon", "--seeds", "0", "--rules", *found]
    monkeypatch.setattr("sys.argv", [*command, "--results", str(kept)])
    short.main()
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["worst_over_sync"] == pytest.approx(-0.005) and last["over_sync"]["2x1x8x20 muon merged"] > 0
    assert last["utilization_below_merged"] == pytest.approx(-0.05)


def test_the_last_region_has_the_trouble() -> None:
    usual, dead, cut, slow = (short.world(2, 1, 0, 1000, 100, what) for what in ("", "dead", "cut", "slow"))
    assert dead.workers[1].away == cut.regions[1].link.outages == (pytest.approx((1.75, 3.0)),)
    assert slow.workers[1].step_s == 2.5 * usual.workers[1].step_s
    assert usual.regions[0] == dead.regions[0] == cut.regions[0] == slow.regions[0]
