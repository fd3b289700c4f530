"""Says what a server waits for, from its status: for people, who must not have to guess why nothing happens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from geotrain.common.names import GLOBAL
from geotrain.outer.server.liveness import Liveness

MOST_WAITS = 32  # that are listed; of the others there is a count


@dataclass(frozen=True)
class Wait:
    """One thing that a server waits for. what: its kind. whom: a member, a shard, GLOBAL, or "" for the operator, the
    disk and the server itself. text: in words, with what ends it."""

    what: str
    whom: str
    text: str


def waits(status: Mapping[str, Any]) -> list[Wait]:
    """List what the server waits for now. status: as `GrpcService.status` gives it, of a region or the global one."""
    found = list(_of_process(status))
    if not status["finished"]:
        for kind in (_of_run, _of_members, _of_rounds, _of_answers, _of_region):
            found += kind(status)
    return found


def late_members(status: Mapping[str, Any]) -> list[str]:
    """List the members for whose deltas others wait here, of a shard's status, too."""
    found = (*_of_rounds(status), *_of_answers(status))
    return sorted({each.whom for each in found} & status["members"].keys())


class WaitTable:
    """Remembers since when a server waits for each thing."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], float] = {}

    def as_json(self, found: Sequence[Wait], now_s: float) -> list[dict[str, Any]]:
        """Return the waits as plain data, the oldest first, each with since when it lasts (Unix time)."""
        self._since = {(w.what, w.whom): self._since.get((w.what, w.whom), now_s) for w in found}
        known = [{**asdict(w), "since_s": self._since[w.what, w.whom]} for w in found]
        known.sort(key=lambda each: float(each["since_s"]))
        if more := known[MOST_WAITS:]:
            return [*known[:MOST_WAITS], {**more[0], "what": "more", "whom": "", "text": f"{len(more)} things more"}]
        return known


def _of_process(status: Mapping[str, Any]) -> Iterator[Wait]:
    if status.get("full"):
        yield Wait("room", "", f"room on its disk: {status['full']}")
    for shard in status.get("shards", ()):
        if not shard["up"]:
            yield Wait("shard", f"shard {shard['shard']}", "its process; updates and joins wait for it, see its log")
    if status.get("doing"):
        yield Wait("end", "", status["doing"])


def _of_run(status: Mapping[str, Any]) -> Iterator[Wait]:
    if status.get("phase") == "paused":
        yield Wait("resume", "", "its operator: `geotrain resume` lets the run go on")
    gone = (Liveness.LEFT, Liveness.LOST, Liveness.QUARANTINED)
    if "phase" in status and not status["over"] and all(m["state"] in gone for m in status["members"].values()):
        yield Wait("worker", "", "a worker: data is left, and nobody is there to train it")


def _of_members(status: Mapping[str, Any]) -> Iterator[Wait]:
    over, stopping = status["over"], status.get("phase") == "stopping"
    all_out = status.get("dispatched_samples", 0) >= status.get("train_samples", 1) and not status["returned_samples"]
    last = over or stopping or all_out
    for name, member in status["members"].items():
        held, state = f"{member['leases']} lease{'s' * (member['leases'] != 1)}", member["state"]
        dead = f"after {status['silent_limit_s']:g} s without a sign of it"
        if state == Liveness.AWAY and not (over and member["phase"] == "new"):
            yield Wait("join", name, "its processes to join: start them, or see their logs")
        elif state == Liveness.CUT_OFF and member["leases"]:
            yield Wait("lease", name, f"the {held} that it holds; others get them {dead}")
        elif state == Liveness.CUT_OFF and over:
            yield Wait("farewell", name, f"its goodbye; it counts as dead {dead}")
        elif state == Liveness.QUARANTINED:
            yield Wait("quarantine", name, f"the end of its quarantine, or `geotrain unban` ({member['fault']})")
        elif state in (Liveness.UP, Liveness.PAUSED) and (last or name in status.get("draining", ())):
            text = f"the {held} that it trains still" if member["leases"] else "its goodbye"
            yield Wait("last jobs" if member["leases"] else "farewell", name, text)


def _of_rounds(status: Mapping[str, Any]) -> Iterator[Wait]:
    """List those whose deltas the others of a synchronous round wait for."""
    if not status.get("in_rounds", True):
        return
    here = {name: member for name, member in status["members"].items() if not member["left"]}
    waiting = {fragment for member in here.values() for fragment in member["owed"]}
    late = [name for name, member in here.items() if not waiting <= set(member["owed"])]
    yield from (Wait("round", name, "its deltas of this round, for which all others wait") for name in late)
    if waiting and not late and "global_versions" in status:
        yield Wait("round", GLOBAL, "the weights of this round, for which the other regions' deltas are wanted")


def _of_answers(status: Mapping[str, Any]) -> Iterator[Wait]:
    """List those for whose deltas answers wait, as long as these come in time; of shards' rounds, too."""
    for name in status.get("awaited", ()):
        if status["in_rounds"]:
            yield Wait("round", name, "its deltas of this round, for which all others wait")
            continue
        left = "as long as it comes in time" if (s := status.get("due_s", 0.0)) is None else f"{s:.1f} s left"
        yield Wait("delta", name, f"its delta, for which an answer waits, {left}")


def _of_region(status: Mapping[str, Any]) -> Iterator[Wait]:
    if not status.get("connected", True):
        yield Wait("link", GLOBAL, "the link to the global server; workers train on with the data that is here")
    for worker in status.get("wanted", ()):
        yield Wait("data", worker, "data for its next job, from the global server")
    if status.get("gone"):
        yield Wait("farewell", GLOBAL, "the global server to take its goodbye")
    elif status.get("in_flight") and all(m["left"] for m in status["members"].values()):
        yield Wait("answer", GLOBAL, f"the answers to its last {status['in_flight']} updates")
