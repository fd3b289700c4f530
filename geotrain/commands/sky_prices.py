"""Run by the interpreter that has SkyPilot, not by this package's: reads tasks as JSON from standard input, has
SkyPilot validate them, and writes each one's dollars an hour, or null without a catalogue, as the last line."""

import json
import sys
from typing import Any


def usd_per_hour(sky: Any, config: dict[str, Any]) -> float | None:
    """The price of a task's cheapest machines in SkyPilot's catalogue. Raises SkyPilot's errors for a task that it
    does not take."""
    task = sky.Task.from_yaml_config(config)
    (wanted,) = task.resources
    try:
        offers = wanted.cloud.get_feasible_launchable_resources(wanted, task.num_nodes).resources_list
        prices = [offer.get_cost(3600) for offer in offers]
    except OSError as error:  # of requests: no catalogue is here, and none can be fetched
        print(error, file=sys.stderr)
        return None
    if not prices:
        where = wanted.region or "any region"
        raise ValueError(f"{task.name}: SkyPilot's catalogue has no {wanted} in {where} (`sky gpus list`)")
    return float(min(prices) * task.num_nodes)


if __name__ == "__main__":
    import sky

    print(json.dumps([usd_per_hour(sky, config) for config in json.load(sys.stdin)]))
