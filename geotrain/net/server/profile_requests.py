"""Keeps what `geotrain profile` asked of workers until their ranks get it."""

from __future__ import annotations

from collections.abc import Mapping

from geotrain.net.transport import rpc
from geotrain.outer.messages import Refused
from geotrain.outer.server.member import Member


class ProfileRequests:
    """Holds inner steps that ranks are to record; each gets it with the answer to its next heartbeat. A server
    that ends before then forgets them. members: of the server, by name; empty unless they are workers."""

    def __init__(self, members: Mapping[str, Member]) -> None:
        self.members = members
        self._steps: dict[tuple[str, int], int] = {}  # member, part → inner steps

    def ask(self, worker: str, steps: int) -> str:
        """Note a request for all ranks of a worker; returns the answer to the operator. Raises Refused."""
        member = self.members.get(worker)
        if member is None or not member.parts:
            raise Refused(f"{worker!r} is no worker that has joined this server")
        if not 1 <= steps <= rpc.MAX_PROFILED_STEPS:
            raise Refused(f"{steps} inner steps: a trace has 1 to {rpc.MAX_PROFILED_STEPS}")
        self._steps |= {(worker, part): steps for part in range(member.parts)}
        return f"{worker}: each of its ranks ({member.parts}) records its next {steps} inner steps"

    def take(self, worker: str, part: int) -> int:
        """Give what the rank is to record, once; 0: nothing."""
        return self._steps.pop((worker, part), 0)
