"""Asks NVIDIA's driver about devices: by NVML, which nvidia-ml-py calls. A driver that hangs keeps nobody who asks
`within` a time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pynvml

from geotrain.common.device_state import DeviceState

T = TypeVar("T")
GONE = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED)
# Xids after which NVIDIA's catalogue wants the device reset or its host started again, as far as no program causes
# them: uncorrectable errors of memory, failed remapping, NVLink, off the bus, the device's own processor.
XIDS_OF_BROKEN = frozenset({48, 64, 74, 79, 95, 119, 120, 140})
SLOWED_BY = {
    pynvml.nvmlClocksEventReasonSwPowerCap: "power limit",
    pynvml.nvmlClocksEventReasonHwSlowdown: "hardware",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "heat (software)",
    pynvml.nvmlClocksEventReasonHwThermalSlowdown: "heat (hardware)",
    pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power brake",
}
NVLINK_ERRORS = (
    pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
    pynvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
    pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
    pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
)


def within(seconds: float, work: Callable[[], T]) -> T:
    """Do this in a thread of its own. Raises what it raises, or TimeoutError; then the thread stays behind."""
    done = queue.SimpleQueue[tuple[bool, Any]]()

    def run() -> None:
        try:
            done.put((True, work()))
        except Exception as error:
            done.put((False, error))

    threading.Thread(target=run, name="nvml", daemon=True).start()
    try:
        well, found = done.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if not well:
        raise found
    return found


def known(call: Callable[..., T], *arguments: Any) -> T | None:
    """What NVML answers; None where this device or driver does not know. Raises NVMLError where the device is
    lost."""
    try:
        return call(*arguments)
    except pynvml.NVMLError as error:
        if error.value in GONE:
            raise
        return None


def ecc_errors(handle: Any) -> int | None:
    """Uncorrectable errors of the device's memory, since the driver was loaded or the device reset."""
    kind = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    return known(pynvml.nvmlDeviceGetTotalEccErrors, handle, *kind)


def read_state(handle: Any, xids: Iterable[int] = ()) -> DeviceState:
    """Read a device's state. xids: seen of it so far. Raises NVMLError where it is lost."""
    busy = known(pynvml.nvmlDeviceGetUtilizationRates, handle)
    memory = known(pynvml.nvmlDeviceGetMemoryInfo, handle)
    reasons = known(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    links = [f for f in known(pynvml.nvmlDeviceGetFieldValues, handle, NVLINK_ERRORS) or () if f.nvmlReturn == 0]

    def number(value: float | None, unit: float = 1.0) -> float | None:
        return None if value is None else value * unit

    return DeviceState(
        busy=None if busy is None else busy.gpu / 100,
        clock_hz=number(known(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM), 1e6),
        power_w=number(known(pynvml.nvmlDeviceGetPowerUsage, handle), 1e-3),
        celsius=number(known(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU)),
        memory_bytes=None if memory is None else float(memory.used),
        ecc_errors=number(ecc_errors(handle)),
        nvlink_errors=float(sum(each.value.ullVal for each in links)) if links else None,
        slowed=", ".join(words for bit, words in SLOWED_BY.items() if reasons & bit),
        xids=tuple(xids),
    )


class XidEvents:
    """The errors that the driver logs of a device from now on, in order."""

    def __init__(self, handle: Any) -> None:
        self._handle, self._events = handle, known(pynvml.nvmlEventSetCreate)
        kind = pynvml.nvmlEventTypeXidCriticalError
        if self._events is not None:
            known(pynvml.nvmlDeviceRegisterEvents, handle, kind, self._events)

    def read(self) -> list[int]:
        """Those since the last call."""
        found = []
        while self._events is not None and (event := known(pynvml.nvmlEventSetWait, self._events, 0)) is not None:
            found.append(int(event.eventData))
        return found
