"""Prices from a catalogue of SkyPilot's."""

from __future__ import annotations

from pathlib import Path

import pytest

from geotrain.config import ConfigError
from geotrain.plan.catalogue import with_catalogue
from tests.support.plan_cases import inventory, planned, small_run

# Columns as SkyPilot's schema v8 has them; machines and zones with prices of a catalogue's order.
HEADER = (
    "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,"
    "AvailabilityZone,Arch"
)
ROWS = """p4d.24xlarge,A100,8.0,96.0,1152.0,,32.0,16.0,us-east-1,us-east-1a,x86_64
p4d.24xlarge,A100,8.0,96.0,1152.0,,32.0,8.0,us-east-1,us-east-1b,x86_64
p4d.48xlarge,A100,8.0,96.0,1152.0,,40.0,,us-east-1,us-east-1b,x86_64
g5.xlarge,A10G,1.0,4.0,16.0,,1.006,0.4,us-east-1,us-east-1b,x86_64
m5.large,,,2.0,8.0,,0.096,0.04,us-east-1,us-east-1b,x86_64
,A100,8.0,,,,20.0,1.0,us-east-1,us-east-1b,
p4d.24xlarge,A100,8.0,96.0,1152.0,,,9.6,eu-west-1,eu-west-1a,x86_64
"""


def test_prices_by_region_zone_and_size_of_a_host(tmp_path: Path) -> None:
    (tmp_path / "vms.csv").write_text(f"{HEADER}\n{ROWS}")
    regions = {name: [(8, "a100"), (4, "a100")] for name in ("us-east-1", "us-east-1a", "eu-west-1", "mars")}
    cluster = inventory(regions, a100={"usd_per_hour": 9.0})
    cluster = cluster.model_copy(
        update={"regions": tuple(r.model_copy(update={"hosts": r.hosts[:1]}) for r in cluster.regions)}
    )
    priced = with_catalogue(cluster, tmp_path / "vms.csv")
    offers = {region.name: region.offers.get("a100") for region in priced.regions}
    assert offers["mars"] is None
    prices = {name: (o.usd_per_hour, o.spot_usd_per_hour) for name, o in offers.items() if o}
    assert prices == {"us-east-1": (4.0, 1.0), "us-east-1a": (4.0, 2.0), "eu-west-1": (None, 1.2)}
    cheap = planned(small_run(), priced, objective="cost")
    assert [r.name for r in cheap.cluster.regions if r.workers] == ["us-east-1"], "its spot hosts are the cheapest"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read as a catalogue of SkyPilot's: .*No such file"),
        ("", "no machine with accelerators"),
        ("InstanceType,AcceleratorName\nx,A100\n", "not with all columns of AcceleratorCount, "),
        (f"{HEADER}\nx,A100,eight,1,1,,1,1,a,a,\n", "could not convert string to float: 'eight'"),
        (f"{HEADER}\nx,A100,8.0,1,1,,dear,1,a,a,\n", "could not convert string to float: 'dear'"),
        (f"{HEADER}\nx,H100,8.0,1,1,,1,1,a,a,\n", "has no price of 8 × a100 in a; name regions as its Region or"),
    ],
)
def test_a_catalogue_that_is_none(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "vms.csv").write_text(text)
    cluster = inventory({"a": [(8, "a100")]}, a100={})
    with pytest.raises(ConfigError, match=words):
        with_catalogue(cluster, tmp_path / "vms.csv")
