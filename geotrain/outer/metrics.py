"""Declares metrics. Each number that a process measures of itself is declared once, at the field of the event that
carries it; `geotrain.monitor` makes Prometheus metrics, curves, the status page and its documentation from there.

The declarations of servers and shards are in `geotrain.monitor.events`. Those of workers are here, because region
servers combine the numbers of their workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_type_hints

from geotrain.outer.events import Event


@dataclass(frozen=True)
class Metric:
    """One metric, as every view shows it.

    name: in Prometheus, between "geotrain_" and the unit. help: what it is. labels: besides `run` and `site`, which
    all metrics have. unit: as Prometheus spells it; it ends the metric's name there. kind: "gauge" for the newest
    value; "counter" where the event carries what is to be added; "total" for a counter of which the event carries
    the sum so far.
    """

    name: str
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    kind: Literal["gauge", "counter", "total"] = "gauge"

    @property
    def title(self) -> str:
        """The name for people, who see the unit at the value."""
        return self.name.replace("_", " ")


ADDED_UP = "a region's value is the sum of its workers' values"  # marks a field; all others are averaged
MEMBER = ("member",)
Maybe = float | None
MOST = 1e18  # of a number that a member says; sums of these stay finite


class JobTrained(Event):
    """A worker trained a lease: its inner steps are done, its deltas on their way.

    compute_s, communication_s and waiting_s are all the time since the last such event, but for checkpoint_s.
    """

    worker: Annotated[str, "its name"]
    job: Annotated[int, "number of the lease, by worker"]
    start: Annotated[int, "the lease's first sample"]
    loss: Annotated[float, "mean training loss over the job"]
    lr: Annotated[float, Metric("learning_rate", "Learning rate of the member's last step", MEMBER)]
    grad_norm: Annotated[float, Metric("gradient_norm", "Gradient norm of the last step, before clipping", MEMBER)]
    tokens: Annotated[float, "trained in this job", ADDED_UP]
    tokens_per_s: Annotated[
        float, Metric("tokens_per_second", "Training speed, exchanges included", MEMBER), ADDED_UP
    ]
    steps: Annotated[float, "inner steps", ADDED_UP]
    waited_s: Annotated[float, "with training at rest, for an answer"]
    compute_s: Annotated[float, "in inner steps"] = 0.0
    communication_s: Annotated[float, "exposed communication: making deltas, waiting for and adopting answers"] = 0.0
    waiting_s: Annotated[float, "for a lease, or for data"] = 0.0
    checkpoint_s: Annotated[float, "in which training stood still to save the optimizer"] = 0.0
    memory_bytes: Annotated[float, "the rank's highest: of its device, or else of the process"] = 0.0
    mfu: Annotated[
        float | None,
        Metric("mfu", "Model FLOPs utilization while computing; needs the cluster's `devices`", MEMBER, unit="ratio"),
    ] = None
    # Of the devices of the worker's ranks, where their driver knows.
    device_busy: Annotated[Maybe, Metric("device_busy", "Time in which a kernel ran, mean", MEMBER, "ratio")] = None
    device_clock_hz: Annotated[Maybe, Metric("device_clock", "Of the slowest device", MEMBER, "hertz")] = None
    device_power_w: Annotated[Maybe, Metric("device_power", "Of all devices", MEMBER, "watts"), ADDED_UP] = None
    device_celsius: Annotated[Maybe, Metric("device_heat", "Of the hottest device", MEMBER, "celsius")] = None
    device_memory_bytes: Annotated[Maybe, Metric("device_memory", "Of the fullest device", MEMBER, "bytes")] = None
    device_slowed: Annotated[Maybe, Metric("devices_slowed", "With clocks held down", MEMBER), ADDED_UP] = None
    device_ecc_errors: Annotated[Maybe, Metric("ecc_errors", "Of memory, uncorrectable", MEMBER), ADDED_UP] = None
    device_nvlink_errors: Annotated[Maybe, Metric("nvlink_errors", "Of all devices", MEMBER), ADDED_UP] = None
    device_xids: Annotated[Maybe, Metric("xids", "Errors logged by drivers, lately", MEMBER), ADDED_UP] = None
    wrong_results: Annotated[Maybe, Metric("wrong_results", "Found in verifications", MEMBER), ADDED_UP] = None
    retries: Annotated[float, "attempts of this rank's calls that failed and were repeated, so far"] = 0.0


def notes(kind: type[Event]) -> dict[str, tuple[Any, ...]]:
    """Collect the annotations of an event type's fields: field → descriptions and metrics."""
    hints: Mapping[str, Any] = get_type_hints(kind, include_extras=True)
    return {field: getattr(hint, "__metadata__", ()) for field, hint in hints.items()}


def declared(kind: type[Event]) -> dict[str, Metric]:
    """The metrics that are declared at the fields of a type of event: field → metric."""
    return {field: note for field, found in notes(kind).items() for note in found if isinstance(note, Metric)}


NEVER_NEGATIVE = frozenset(get_type_hints(JobTrained)) - {"loss"}


def credible(metrics: Mapping[str, float]) -> dict[str, float]:
    """Leave out what no honest member says of itself: people read these numbers in tables, which add them up."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if name.isprintable() and abs(value) <= MOST and (value >= 0 or name not in NEVER_NEGATIVE)  # NaN is not
    }


WORKER_METRICS = declared(JobTrained)  # they travel with updates, under the names of the fields
SUMS = frozenset(field for field, found in notes(JobTrained).items() if ADDED_UP in found)
