"""An inventory of what providers offer, and plans for a budget on it."""

from __future__ import annotations

import re

import pytest

from geotrain.parameters.parameter_map import parameter_count
from geotrain.plan.inventory import PlanError, Wish
from geotrain.plan.offers import HOSTS, REGIONS, Offer, inventory_of
from geotrain.plan.planner import plan
from tests.support.plan_cases import small_run, task

OFFERS = [
    Offer("aws", "H100", 8, "us-east-2", 55.0),
    Offer("aws", "H100", 8, "us-west-2", 66.0),
    Offer("aws", "L4", 1, "us-east-2", 0.8),  # dearer an operation than the H100 there
    Offer("gcp", "H100", 8, "us-central1", 44.0),
    Offer("gcp", "H100", 4, "us-central1", 22.0),  # as dear, and smaller
    Offer("oci", "A100", 8, "eu", 12.0),
    Offer("lambda", "V100", 8, "us-1", 0.1),  # no bf16
    Offer("azure", "H100", 8, "eastus", 90.0),
]
PARAMETERS = parameter_count(small_run().architecture)


def test_the_regions_that_compute_the_most_for_a_dollar() -> None:
    inventory, offered = inventory_of(OFFERS, PARAMETERS, spot=False)
    assert [*offered] == ["oci-eu", "gcp-us-central1", "aws-us-east-2", "aws-us-west-2"] and len(offered) == REGIONS
    gcp = inventory.region("gcp-us-central1")
    assert [(host.slots, host.device, host.spot) for host in gcp.hosts] == [(8, "H100", False)] * HOSTS
    assert gcp.offers["H100"].usd_per_hour == 5.5 and gcp.offers["H100"].spot_usd_per_hour is None
    spot, _ = inventory_of(OFFERS, PARAMETERS, spot=True)
    assert spot.region("oci-eu").hosts[0].spot and spot.region("oci-eu").offers["A100"].spot_usd_per_hour == 1.5


def test_machines_that_hold_the_model() -> None:
    _, offered = inventory_of(OFFERS, 60_000_000_000, spot=False)
    assert {offer.kind for offer in offered.values()} == {"H100"}, "two hosts of A100 have 608 GB"
    told = "offer no machines of which 2 would hold 6e+11 parameters, of kinds B200, "
    with pytest.raises(PlanError, match=re.escape(told)):
        inventory_of(OFFERS, 600_000_000_000, spot=False)


@pytest.mark.parametrize("spot", [False, True])
def test_time_in_which_nothing_is_trained_is_paid_from_the_budget(spot: bool) -> None:
    planned = task(small_run(), inventory_of(OFFERS[:2], PARAMETERS, spot)[0])
    paid = plan(planned, Wish(1e9, usd=100.0, idle_s=1800.0)).prediction
    assert paid.usd_per_hour is not None
    assert paid.usd_per_hour * (0.5 + paid.seconds(1e9) / 3600) <= 102.0
    assert paid.usd_per_hour < (plan(planned, Wish(1e9, usd=100.0)).prediction.usd_per_hour or 0.0)
    with pytest.raises(PlanError, match=r"--usd 20 is too little: the cheapest plan costs \d+ USD"):
        plan(planned, Wish(1e9, usd=20.0, idle_s=1800.0))
