"""Who lives: members are heard of, on this machine's clock; one that is silent for too long is taken for dead."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from geotrain.net.machine import Machine
from geotrain.outer.messages import Refused, Silence

log = logging.getLogger(__name__)

WORKER_SILENT_S = 60.0
REGION_SILENT_S = 600.0  # a region that is cut off goes on training; its data is given away only after long


class Pulse:
    """A member is as silent as its most silent rank. Its leases go back to the pool when it is taken for dead;
    should it speak again it may go on, with new ones.
    """

    def __init__(self, machine: Machine, silent_s: float) -> None:
        self.machine, self.silent_s = machine, silent_s
        self.silent: set[str] = set()
        self._heard_s: dict[tuple[str, int], float] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def heard(self, member: str, part: int) -> None:
        self._heard_s[member, part] = time.monotonic()

    def silent_for(self, member: str, now_s: float) -> float:
        """Seconds since its most silent rank was heard of, on this machine's monotonic clock; 0 before the first."""
        heard = [at_s for (name, _), at_s in list(self._heard_s.items()) if name == member]
        return max(0.0, now_s - min(heard)) if heard else 0.0

    async def _watch(self) -> None:
        period_s = self.silent_s / 8
        woke_s = time.monotonic()
        while True:
            await asyncio.sleep(period_s)
            late_s, woke_s = time.monotonic() - woke_s - period_s, time.monotonic()
            if late_s > period_s:  # this process was stopped itself: it could not hear
                self._heard_s = {rank: heard_s + late_s for rank, heard_s in self._heard_s.items()}
            await self._look(woke_s)

    async def _look(self, now_s: float) -> None:
        for name, member in list(self.machine.server.members.items()):
            ranks = [(name, part) for part in list(member.joined)]
            last_s = min((self._heard_s.setdefault(rank, now_s) for rank in ranks), default=now_s)
            if member.left or now_s - last_s < self.silent_s:
                self.silent.discard(name)
            elif name not in self.silent:
                with suppress(Refused):  # a full disk: the next look tries again
                    await self.machine.say(Silence(name, member.incarnation))
                    self.silent.add(name)
                    log.warning("%s: not heard of for %.0f s; its leases go to others", name, now_s - last_s)
