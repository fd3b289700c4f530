"""Says how a member is: the one judgement that status, page, metrics and alerts show. Plain data in, a word out."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from geotrain.outer.server.member_phase import MemberPhase


class Liveness(StrEnum):
    """How a member is, as the server above it knows."""

    AWAY = "away"  # not here yet: it never joined, or not since this server or the run began again
    UP = "up"
    PAUSED = "paused"  # alive, and holds no data, since the run is paused
    STALLED = "stalled"  # alive, but it sent nothing for too long: its data went to others
    CUT_OFF = "cut off"  # silent for a few heartbeats; its data stays with it
    LOST = "lost"  # silent for so long that its data went to others
    QUARANTINED = "quarantined"
    LEFT = "left"  # ended in good order

    @property
    def reachable(self) -> bool:
        """Whether the member gives signs of life, as far as it is expected to."""
        return self in (Liveness.UP, Liveness.PAUSED, Liveness.STALLED)

    @property
    def missing(self) -> bool:
        """Whether the member was here and is silent."""
        return self in (Liveness.CUT_OFF, Liveness.LOST)


def liveness(member: Mapping[str, Any], silent_s: float, missed_s: float, paused: bool) -> Liveness:
    """Judge a member. member: its part of the server's status. silent_s: seconds since its last sign. missed_s: so
    many seconds of silence are more than a late heartbeat. paused: whether the run is."""
    given_up = member["phase"] in (MemberPhase.SILENT.value, MemberPhase.LOST.value)
    if member["left"]:
        return Liveness.LEFT
    if member["quarantined"]:
        return Liveness.QUARANTINED
    if member["phase"] in (MemberPhase.NEW.value, MemberPhase.STOPPED.value):
        return Liveness.AWAY
    if silent_s >= missed_s:
        return Liveness.LOST if given_up else Liveness.CUT_OFF
    if not member["joined"]:
        return Liveness.AWAY
    if given_up:
        return Liveness.STALLED
    return Liveness.PAUSED if paused and not member["leases"] else Liveness.UP
