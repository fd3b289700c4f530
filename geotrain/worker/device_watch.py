"""Watches the device of a rank, in a thread of its own: what its driver reports, and whether it is broken."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import pynvml
import torch

from geotrain.common.device_state import DeviceState
from geotrain.common.nvml import XIDS_OF_BROKEN, XidEvents, read_state
from geotrain.common.running_clock import RunningClock

EVERY_S = 5.0  # between two readings
SAMPLES_EVERY = 6  # readings
SILENT_S = 20.0  # without an answer of the driver: it hangs
XIDS = 16  # so many of the last ones are kept


class DeviceWatch:
    """Watches one device. A call gives what was read last, at once, whatever the driver does.

    device: that a rank computes on. failed: called with its address and each thing that makes it unfit. unwatched:
    called with each reason why it is not watched. sampled: called with a reading now and then. address: of the device
    on the PCI bus; "": torch's answer. clock: for tests.
    """

    def __init__(
        self,
        device: torch.device,
        failed: Callable[[str, str], None],
        unwatched: Callable[[str], None],
        sampled: Callable[[DeviceState], None] = lambda state: None,
        address: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
        self._failed, self._unwatched, self._sampled = failed, unwatched, sampled
        self._clock = RunningClock(2 * EVERY_S, clock)  # this process may have been stopped
        self._state, self._read_s = DeviceState(), self._clock()
        self._reported, self._over = set[str](), threading.Event()
        self.xids = deque[int](maxlen=XIDS)
        if device.type == "cuda" and torch.version.hip is not None:
            self._state = self._blind("NVML reads NVIDIA's devices only")
        elif device.type == "cuda" and not address:
            found = torch.cuda.get_device_properties(device)
            place = found.pci_domain_id, found.pci_bus_id, found.pci_device_id  # type: ignore[attr-defined]
            self.address = "{:08X}:{:02X}:{:02X}.0".format(*place)
        self.thread = threading.Thread(target=self._run, name="device-watch", daemon=True)
        if self.address:
            self.thread.start()

    def __call__(self) -> DeviceState:
        if not self.address or self._state.unwatched or self._clock() - self._read_s <= SILENT_S:
            return self._state
        return self._blind("its driver does not answer", self._state)

    def stop(self) -> None:
        """Read no more."""
        self._over.set()

    def _run(self) -> None:
        try:
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByPciBusId(self.address)
            events = XidEvents(handle)
        except pynvml.NVMLError as error:
            self._state = self._blind(f"NVML says: {error}")
            return
        readings = 0
        while not self._over.is_set():
            try:
                found = events.read()
                self.xids += found
                self._state = read_state(handle, self.xids)
            except pynvml.NVMLError as error:
                self._report(f"NVML says: {error}")
                found = []
            self._read_s = self._clock()
            for xid in XIDS_OF_BROKEN.intersection(found):
                self._report(f"its driver logged Xid {xid}")
            if count := self._state.ecc_errors:
                self._report(f"its memory has had {count:.0f} uncorrectable errors since its last reset")
            if readings % SAMPLES_EVERY == 0:
                self._sampled(self._state)
            readings += 1
            self._over.wait(EVERY_S)

    def _blind(self, why: str, known: DeviceState | None = None) -> DeviceState:
        """The state of a device that is not watched, any more."""
        if why not in self._reported:
            self._reported.add(why)
            self._unwatched(why)
        return (known or DeviceState())._replace(unwatched=why)

    def _report(self, what: str) -> None:
        if what not in self._reported:
            self._reported.add(what)
            self._failed(self.address, what)
