"""Which way hides a worker's own communication best, by the optimizer and the link."""

from __future__ import annotations

import pytest

from geotrain.parallelism.acco_forms import BITS, best_hiding, least_step_s


@pytest.mark.parametrize(
    ("muon", "sending", "form", "bits", "gain"),
    [
        (True, 0.05, None, None, 1.0),  # the last backward and the first forward hide it
        (True, 0.25, None, BITS, 1.12),
        (True, 1.0, "delayed", None, 1.88),
        (True, 2.0, "delayed", BITS, 2.88),
        (True, 4.0, "delayed", BITS, 3.18),
        (False, 1.0, None, BITS, 1.49),
        (False, 4.0, None, BITS, 2.03),
    ],
)
def test_the_way_follows_from_the_optimizer_and_the_link(
    muon: bool, sending: float, form: str | None, bits: tuple[int, int] | None, gain: float
) -> None:
    """sending: of a step's gradients and weights, over its compute, in eight micro-batches."""
    best = best_hiding(muon, 8, 1.0, sending / 2, sending / 2, (2, 2))
    assert (best.form, best.bits) == (form, bits)
    assert least_step_s(None, 8, 1.0, sending / 2, sending / 2) / best.step_s == pytest.approx(gain, abs=0.006)
