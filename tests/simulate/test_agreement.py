"""A real run of processes over emulated links, and its simulation: the same updates in the same order."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.agreement import launched, least_gap_s, make_world, order, simulated
from geotrain.emulate import wan
from tests.support.process_trees import marked, new_mark


@pytest.mark.long("geotrain/simulate", "geotrain/outer", "benchmarks/agreement.py")
@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(900)
def test_a_real_run_applies_what_its_simulation_applies(tmp_path: Path) -> None:
    """Paces and links decide. How long it takes is the benchmark's to tell, on a machine that is not busy."""
    assert wan.cannot_emulate() == ""
    files = make_world(tmp_path)
    simulation = simulated(files)
    assert least_gap_s(simulation) > 0.5, "the script leaves the order to chance"
    mark = new_mark()
    reality = launched(files, mark)
    for site, updates in (("eu", 7), ("us", 3), ("global", 6)):
        assert order(reality, site) == order(simulation, site), site
        assert len(order(reality, site)) == updates
    assert marked(mark) == []
