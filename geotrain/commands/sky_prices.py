"""Run by the interpreter that has SkyPilot, not by this package's: reads a question as JSON from standard input, and
writes the answer as the last line.

Tasks, a list: SkyPilot validates them; the answer is each one's dollars an hour, or null without a catalogue. null:
what providers offer, a list of [cloud, accelerator, how many, place, USD an hour, USD an hour as spot or null].
"""

import json
import math
import sys
from typing import Any

NO_CLOUDS = {"kubernetes", "slurm", "ssh", "vsphere"}  # machines that one has, without a price


def usd_per_hour(sky: Any, config: dict[str, Any]) -> float | None:
    """The price of a task's machines where they are dearest in SkyPilot's catalogue, of all regions and zones that
    the task allows: SkyPilot goes there if others have none. Raises SkyPilot's errors for a task that it does not
    take."""
    from sky.utils.resources_utils import make_launchables_for_valid_region_zones as in_each_place

    task = sky.Task.from_yaml_config(config)
    (wanted,) = task.resources
    try:
        offers = wanted.cloud.get_feasible_launchable_resources(wanted, task.num_nodes).resources_list
        prices = [there.get_cost(3600) for offer in offers for there in in_each_place(offer)]
    except OSError as error:  # of requests: no catalogue is here, and none can be fetched
        print(error, file=sys.stderr)
        return None
    if not prices:
        where = wanted.region or "any region"
        raise ValueError(f"{task.name}: SkyPilot's catalogue has no {wanted} in {where} (`sky gpus list`)")
    return float(max(prices) * task.num_nodes)


def offers(sky: Any) -> list[list[Any]]:
    """All machines with accelerators in the catalogues of those clouds that SkyPilot may use; of all clouds where its
    server does not say which."""
    from sky import catalog
    from sky.client import sdk
    from sky.utils.registry import CLOUD_REGISTRY

    try:
        clouds = {str(cloud).lower() for cloud in sdk.get(sdk.enabled_clouds())}
    except Exception as error:  # whatever keeps a server from answering
        print(error, file=sys.stderr)
        clouds = set(CLOUD_REGISTRY)
    found = []
    for cloud in sorted(clouds - NO_CLOUDS):
        try:
            kinds = catalog.list_accelerators(gpus_only=False, all_regions=True, clouds=cloud)
        except Exception as error:  # of one cloud: its catalogue is not here, or its package
            print(error, file=sys.stderr)
            continue
        for rows in kinds.values():
            for row in rows:
                prices = [None if math.isnan(usd) else float(usd) for usd in (row.price, row.spot_price)]
                found.append([cloud, row.accelerator_name, row.accelerator_count, row.region, *prices])
    return found


if __name__ == "__main__":
    import sky

    asked = json.load(sys.stdin)
    print(json.dumps(offers(sky) if asked is None else [usd_per_hour(sky, config) for config in asked]))
