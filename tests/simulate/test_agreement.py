"""A real run of processes over emulated links, and its simulation: the same updates in the same order."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from geotrain.launch import wan
from geotrain.simulate.agreement import least_gap_s
from tests.launch.trees import marked, new_mark

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from agreement import expected, launched, make_world, order


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(900)
def test_a_real_run_applies_what_its_simulation_applies(tmp_path: Path) -> None:
    """Paces and links decide. How long it takes is the benchmark's to tell, on a machine that is not busy."""
    assert wan.cannot_emulate() == ""
    files = make_world(tmp_path)
    simulation = expected(files)
    assert least_gap_s(simulation) > 0.5, "the script leaves the order to chance"
    mark = new_mark()
    reality = launched(files, mark)
    for site, updates in (("eu", 7), ("us", 3), ("global", 6)):
        assert order(reality, site) == order(simulation, site), site
        assert len(order(reality, site)) == updates
    assert marked(mark) == []
