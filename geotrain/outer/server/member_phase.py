"""Phases of a member, and which event leads from which to which."""

from __future__ import annotations

from enum import Enum, auto


class MemberPhase(Enum):
    """Where a member stands, as the server above it knows. The values stand in snapshots."""

    NEW = "new"  # has never joined: nobody waits for it
    PRESENT = "present"
    SILENT = "silent"  # silent for too long: counts as dead
    LEFT = "left"  # said goodbye, while the others train on
    DONE = "done"  # said goodbye, as no data was left for it
    STOPPED = "stopped"  # ended with the whole run, which has begun again since: is waited for
    LOST = "lost"  # was silent when the whole run was stopped, or has not come back after that


class MemberEvent(Enum):
    """Events that move a member to another phase."""

    JOINS = auto()  # with a new incarnation
    ALIVE = auto()  # an update came, or its present incarnation joined again
    SILENCE = auto()
    LEAVES = auto()
    ENDS = auto()  # leaves with the run, which has no more data for it
    STOPS = auto()  # all processes of the run ended in good order, this member's among them
    RESUMES = auto()  # the run had ended and begins again, perhaps with more data


_NEW, _PRESENT, _SILENT, _LEFT, _DONE, _STOPPED, _LOST = MemberPhase
# MemberPhase → the next one, for the events in the order of `MemberEvent`. A ledger that came back from a copy older
# than its shards hears from them of updates of who has never joined it: that does not make a member.
_NEXT: dict[MemberPhase, tuple[MemberPhase, ...]] = {
    _NEW: (_PRESENT, _NEW, _NEW, _LEFT, _LEFT, _NEW, _NEW),
    _PRESENT: (_PRESENT, _PRESENT, _SILENT, _LEFT, _DONE, _STOPPED, _PRESENT),
    _SILENT: (_PRESENT, _PRESENT, _SILENT, _LEFT, _LEFT, _LOST, _SILENT),
    _LEFT: (_PRESENT, _LEFT, _LEFT, _LEFT, _LEFT, _LEFT, _STOPPED),
    _DONE: (_PRESENT, _DONE, _DONE, _DONE, _DONE, _DONE, _STOPPED),
    _STOPPED: (_PRESENT, _PRESENT, _LOST, _LEFT, _DONE, _STOPPED, _STOPPED),
    _LOST: (_PRESENT, _PRESENT, _LOST, _LEFT, _LEFT, _LOST, _LOST),
}
TRANSITIONS = {
    (phase, event): after for phase, row in _NEXT.items() for event, after in zip(MemberEvent, row, strict=True)
}
