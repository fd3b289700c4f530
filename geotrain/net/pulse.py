"""Who lives: members are heard of, on this machine's clock; one that is silent for too long is taken for dead."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from geotrain.net.machine import Machine
from geotrain.outer.messages import Pardon, Refused, Silence

log = logging.getLogger(__name__)

WORKER_SILENT_S = 60.0
REGION_SILENT_S = 600.0  # a region that is cut off goes on training; its data is given away only after long
NOBODY = -1  # stands for the ranks of a member that has not joined yet


class Pulse:
    """A member is as silent as its most silent rank. Its leases go back to the pool when it is taken for dead;
    should it speak again it may go on, with new ones.
    """

    def __init__(self, machine: Machine, silent_s: float) -> None:
        self.machine, self.silent_s = machine, silent_s
        self.silent: set[str] = set()
        self._heard_s: dict[tuple[str, int], float] = {}
        self._quarantined_s: dict[str, float] = {}
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
            await self._look_after(name, member.quarantined, now_s)
            # Who has not joined since this server started is expected to; who never came at all is not.
            ranks = [(name, part) for part in list(member.joined)] or [(name, NOBODY)]
            if member.joined:
                self._heard_s.pop((name, NOBODY), None)
            last_s = min(self._heard_s.setdefault(rank, now_s) for rank in ranks)
            if member.left or not member.incarnation or now_s - last_s < self.silent_s:
                self.silent.discard(name)
            elif name not in self.silent:
                with suppress(Refused):  # a full disk: the next look tries again
                    await self.machine.say(Silence(name, member.incarnation))
                    self.silent.add(name)
                    log.warning("%s: not heard of for %.0f s; its leases go to others", name, now_s - last_s)

    async def _look_after(self, name: str, quarantined: bool, now_s: float) -> None:
        """The time of a quarantine runs on this machine's clock, and anew when the server was restarted."""
        if not quarantined:
            self._quarantined_s.pop(name, None)
        elif now_s - self._quarantined_s.setdefault(name, now_s) >= self.machine.server.limits.quarantine_s:
            with suppress(Refused):
                await self.machine.say(Pardon(name))
