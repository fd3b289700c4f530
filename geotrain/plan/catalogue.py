"""Reads prices from a catalogue of SkyPilot's: vms.csv of one provider, as it lies in ~/.sky/catalogs/v8/<provider>/.

One row is one type of machine in a region, or one of its zones: InstanceType, AcceleratorName, AcceleratorCount,
Region, AvailabilityZone, Price and SpotPrice in USD an hour of the whole machine; empty: not offered. Rows that price
accelerators without their machine, as Google's, are left out. It has no quotas, nor how often a host is taken back.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from geotrain.config import ClusterConfig, ConfigError, parse
from geotrain.plan.inventory import hosts_of

PRICES = {"usd_per_hour": "Price", "spot_usd_per_hour": "SpotPrice"}
COLUMNS = {"InstanceType", "AcceleratorName", "AcceleratorCount", "Region", "AvailabilityZone", *PRICES.values()}


def with_catalogue(cluster: ClusterConfig, path: Path) -> ClusterConfig:
    """Return the cluster with the catalogue's prices in its offers, of the cheapest machine with as many accelerators
    as a host has. Raises ConfigError.

    A region has the name of the catalogue's region or zone, a device that of its accelerator, in any case. Prices of
    what the catalogue does not have stay as they are.
    """
    try:
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row.get("InstanceType") and row.get("AcceleratorName")]
        if not rows or not rows[0].keys() >= COLUMNS:
            raise ValueError(f"no machine with accelerators, or not with all columns of {', '.join(sorted(COLUMNS))}")
        found: dict[tuple[str, str], dict[str, float]] = {}
        wanted = {(r.name, str(h.device), h.slots) for r in cluster.regions for h in hosts_of(r)}
        for region, kind, slots in sorted(wanted):
            for row in rows:
                fits = row["AcceleratorName"].lower() == kind.lower() and float(row["AcceleratorCount"]) == slots
                for key, column in (
                    PRICES.items() if fits and region in (row["Region"], row["AvailabilityZone"]) else ()
                ):
                    if row[column]:
                        offer = found.setdefault((region, kind), {})
                        offer[key] = min(offer.get(key, float("inf")), float(row[column]) / slots)
    except (OSError, ValueError, TypeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read as a catalogue of SkyPilot's: {error}") from None
    if not found:
        asked = ", ".join(f"{slots} × {kind} in {region}" for region, kind, slots in sorted(wanted))
        raise ConfigError(
            f"{path}: has no price of {asked}; name regions as its Region or AvailabilityZone, devices as its "
            "AcceleratorName"
        )
    raw: dict[str, Any] = cluster.model_dump(by_alias=True, mode="json")
    for entry in raw["regions"]:
        for kind in {kind for name, kind in found if name == entry["name"]}:
            entry["offers"][kind] = {**entry["offers"].get(kind, {}), **found[entry["name"], kind]}
    return parse(ClusterConfig, raw, str(path))
