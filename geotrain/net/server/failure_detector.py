"""Detects members that are dead or hang, by this machine's clock: the server's state machine has none.

A member that makes no call for too long is taken for dead. One that beats, but has held its leases for far longer
than there usually is between two updates and has sent nothing, hangs, whatever it says of its speed. The server gets
a MemberSilent message for either.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Container, Mapping
from contextlib import suppress
from math import inf
from statistics import median
from typing import Any

from geotrain.monitor.events import Trouble
from geotrain.net.server.server_thread import ServerThread
from geotrain.net.transport import rpc
from geotrain.outer.messages import Lease, LiftQuarantine, MemberSilent, Refused
from geotrain.outer.server.lease_requests import LEAST_PATIENCE_S, PATIENCE
from geotrain.outer.server.liveness import liveness
from geotrain.outer.server.member import Member

log = logging.getLogger(__name__)

WORKER_SILENT_S = 60.0
REGION_SILENT_S = 600.0  # longer, because a region that is cut off trains on, and its data should stay with it
FRESH_S = 2.0  # who gave a sign of life in it may have a connection that no sample of them has found
MISSED_BEATS = 3  # a member that was silent for the time of so many heartbeats counts as cut off
OF_REGION = 2.0  # times a worker's patience: its server gives up first who hangs there, and the leases come back
FAR = 10.0  # times what is usual among the others: what is believed of a member's slowness
GAPS = 16  # times between its last updates, by which a member is judged
NOBODY = -1  # in place of a rank's part, for a member of which no rank has joined yet


class FailureDetector:
    """Watches the members of one server, which are as silent as the most silent of their ranks.

    When a member is taken for dead, its leases go back to the pool. Should it speak again, it may go on with new
    ones.

    ready: whether the server can take updates, as far as its shards go.
    """

    clock = staticmethod(time.monotonic)  # in tests, seconds pass when a test says so

    def __init__(self, server_thread: ServerThread, silent_s: float, ready: Callable[[], bool]) -> None:
        self.server_thread, self.silent_s, self.ready = server_thread, silent_s, ready
        beat_s = rpc.REGION_BEAT_S if server_thread.server.member_role == "region" else rpc.BEAT_S
        self.slack = OF_REGION if server_thread.server.member_role == "region" else 1.0
        self.missed_s = min(MISSED_BEATS * beat_s, silent_s)
        self._alive_s: dict[tuple[str, int], float] = {}
        self._quarantined_s: dict[str, float] = {}
        # Member → its incarnation, its last update, whether it holds leases, whether the run is over; since when.
        self._progress: dict[str, tuple[tuple[str, int, bool, bool], float]] = {}
        # Member → seconds that passed before each of its last updates, while it held leases.
        self._seen_s: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=GAPS))
        self._usual_s: dict[str, float] = {}  # member → the median of those
        self._sorted_s: list[float] = []  # these medians, as the last look found them
        self._task: asyncio.Task[None] | None = None
        self.gone: Callable[[], Container[str]] = set  # members whose connections are closed

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def note_alive(self, member: str, part: int) -> None:
        """Note that one rank made a call."""
        self._alive_s[member, part] = self.clock()

    def judge(self, status: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Judge all members now. status: the server's. Returns by member its part of the status, with `state`, as
        `Liveness` has it, and `silent_s`, the seconds since the last sign of life of its most silent rank."""
        now_s, paused, found, gone = self.clock(), status.get("phase") == "paused", {}, self.gone()
        for name, member in status.get("members", {}).items():
            silent_s = max(0.0, now_s - self._last_s(name, self.server_thread.server.members[name], now_s))
            cut_s = self.missed_s if name in gone and silent_s > FRESH_S else 0.0
            state = liveness(member, max(silent_s, cut_s), self.missed_s, paused)
            found[name] = {**member, "state": state.value, "silent_s": round(silent_s, 2)}
        return found

    async def _watch(self) -> None:
        woke_s = self.clock()
        while True:
            await asyncio.sleep(self.silent_s / 8)
            woke_s = await self.look(woke_s + self.silent_s / 8)

    async def look(self, due_s: float) -> float:
        """Judge all members now. due_s: when that should have been. Returns the time.

        It asks the server's thread once, however many members there are.
        """
        server, now_s = self.server_thread.server, self.clock()
        # If this process itself was stopped meanwhile (as by SIGSTOP, or with its machine), it received nothing
        # from members. That time does not count against them, nor that in which they cannot join, as a shard is away.
        late_s = now_s - due_s + (0.0 if self.ready() else self.silent_s / 8)
        if late_s > self.silent_s / 8 or not self.ready():
            self._alive_s = {rank: alive_s + late_s for rank, alive_s in self._alive_s.items()}
            self._progress = {name: (seen, since_s + late_s) for name, (seen, since_s) in self._progress.items()}
        self._sorted_s = sorted(self._usual_s.values())
        # A member may have spoken while the server's thread was busy: it is judged by what came until now.
        work = await self.server_thread.read(server.membership.work)
        for name, member in list(server.members.items()):
            # A quarantine's time is measured by this process, so it begins anew when the server is restarted.
            if not member.quarantined:
                self._quarantined_s.pop(name, None)
            elif (
                now_s - self._quarantined_s.setdefault(name, now_s) >= server.core.limits.quarantine_s
                and not member.expelled
            ):
                with suppress(Refused):
                    await self.server_thread.say(LiftQuarantine(name))
            # A member that was there before this server was restarted is expected to join again; it counts as alive
            # of for the first time now. One that never came (it has no incarnation) is not waited for.
            last_s = self._last_s(name, member, now_s)
            if member.left or not member.incarnation or now_s - last_s < self.silent_s:
                if not member.left:
                    await self._look_at_work(name, member, now_s, *work[name])
            elif not member.silent:
                with suppress(Refused):  # refused when the disk is full; the next look tries again
                    await self.server_thread.say(MemberSilent(name, member.incarnation))
                    log.warning("%s: silent for %.0f s; its leases go to others", name, now_s - last_s)
        return now_s

    async def _look_at_work(
        self, name: str, member: Member, now_s: float, said_s: float, held: Collection[Lease]
    ) -> None:
        """Take the leases of a member that beats, but sends nothing any more. Nor is it waited for at the end.

        said_s, held: as `Membership.work` gives them."""
        server, patience_s = self.server_thread.server, inf
        if server.over or said_s < inf:
            expected_s = said_s if any(lease.validate for lease in held) else 0.0
            patience_s = self.slack * max(
                LEAST_PATIENCE_S, self.usual_s(name, said_s / PATIENCE) * PATIENCE, expected_s
            )
        seen = member.incarnation, member.updates, bool(held), server.over
        before, since_s = self._progress.get(name, (None, now_s))
        if before is not None and before[0] == seen[0] and before[1] < seen[1] and before[2]:
            self._seen_s[name].append(now_s - since_s)
            self._usual_s[name] = median(self._seen_s[name])
        # While no update can be taken, leases are taken from nobody: what is trained waits with the workers. Nor are
        # they taken from one that waits for this server.
        waits = server.waited_for_by(name) or self.server_thread.refuses or not self.ready()
        if seen != before or waits:
            since_s = now_s
        self._progress[name] = seen, since_s
        if now_s - since_s > patience_s:
            with suppress(Refused):
                await self.server_thread.say(MemberSilent(name, member.incarnation))
                trouble = f"{name}: lives, but has sent nothing for {now_s - since_s:.0f} s; its leases go to others"
                log.warning("%s", trouble)
                self.server_thread.write_event(Trouble(trouble))

    def usual_s(self, name: str, said_s: float) -> float:
        """Seconds between two updates of this member while it holds leases, by this process's clock.

        Of its own times no more is believed than FAR times the others'. Before it has sent anything it counts as the
        slowest other does. said_s: what is to be expected by what members say, before anybody has; inf: nothing.
        """
        known, own_s = self._sorted_s, self._usual_s.get(name)
        if not known:
            return said_s if said_s < inf else 0.0
        own = len(known) if own_s is None else bisect_left(known, own_s)
        middle = (len(known) - (own_s is not None) - 1) // 2  # of the others, in order; -1: there are none
        others_s = known[middle + (own <= middle)] if middle >= 0 else inf
        return min(known[-1] if own_s is None else own_s, FAR * others_s)

    def _last_s(self, name: str, member: Member, now_s: float) -> float:
        """Time of the last sign of life of the member's most silent rank. One that gave none counts as alive now."""
        ranks = [(name, part) for part in list(member.joined)] or [(name, NOBODY)]
        if member.joined:
            self._alive_s.pop((name, NOBODY), None)
        return min(self._alive_s.setdefault(rank, now_s) for rank in ranks)
