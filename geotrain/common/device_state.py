"""The state of a device, as its driver reports it: what a rank says of its own, and what follows for a worker."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean
from typing import Any, NamedTuple


class DeviceState(NamedTuple):
    """One device. None: its driver does not know. busy: share of the last second or less in which it computed.
    ecc_errors: of memory, uncorrectable, since the last reset. nvlink_errors: since the driver was loaded. slowed:
    what holds its clocks down. xids: errors that the driver has logged of it since this process began. unwatched: why
    no more is known, or "".
    """

    busy: float | None = None
    clock_hz: float | None = None
    power_w: float | None = None
    celsius: float | None = None
    memory_bytes: float | None = None
    ecc_errors: float | None = None
    nvlink_errors: float | None = None
    slowed: str = ""
    xids: tuple[int, ...] = ()
    unwatched: str = ""

    def said(self, whose: str) -> str:
        """What is known, as the end of a sentence; "" if nothing is."""
        return f"; {whose}: {self}" if str(self) else ""

    def __str__(self) -> str:
        parts = [FORMS[name].format(value) for name, value in zip(FORMS, self, strict=False) if value is not None]
        parts += [f"slowed by {self.slowed}"] * bool(self.slowed) + [f"Xid {xid}" for xid in self.xids]
        return ", ".join([*parts, *[f"not watched: {self.unwatched}"] * bool(self.unwatched)])

    def numbers(self) -> dict[str, float]:
        """What is known now, as numbers."""
        known = {name: value for name, value in zip(FORMS, self, strict=False) if isinstance(value, float)}
        if self.unwatched or not known:
            return {}
        return {**known, "slowed": float(bool(self.slowed)), "xids": float(len(self.xids))}


_WORDS = (
    "{:.0%} busy, {:.3g} Hz, {:.0f} W, {:.0f} °C, {:.3g} bytes in use, {:.0f} uncorrectable memory errors, "
    "{:.0f} NVLink errors"
)
FORMS = dict(zip(DeviceState._fields, _WORDS.split(", "), strict=False))  # of the fields that are numbers
# Of the devices of a worker; of the other numbers it is the sum.
_TOGETHER: dict[str, Any] = {"busy": fmean, "clock_hz": min, "celsius": max, "memory_bytes": max}


def numbers_of_worker(states: Iterable[DeviceState]) -> dict[str, float]:
    """Combine what is known of the devices of a worker's ranks, under the names of `JobTrained`."""
    numbers = [state.numbers() for state in states]
    names = dict.fromkeys(name for each in numbers for name in each)
    return {f"device_{name}": _TOGETHER.get(name, sum)([n[name] for n in numbers if name in n]) for name in names}
