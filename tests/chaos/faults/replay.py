"""Replay what a server's processes have written in all incarnations, without an interruption, and hold it against
each snapshot that they wrote and each state that a recovery had. Bit for bit. Pure.

Where a server is several processes, each is a server of some of its fragments: the journal of each is replayed alone.
Then the ledger must have taken the facts that its shards' journals give, each once and in their order.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from geotrain.net.storage.recovery import Dismissed, Restarted, StillJoined, Stopped, end_incarnations, restarted
from geotrain.net.storage.snapshots import Snapshot
from geotrain.outer.messages import Fact, Facts, Lease, Refused, UpdatePart
from geotrain.outer.server.leases import LeaseTable
from geotrain.outer.server.server import Server

UNSAID = "said", "unsaid"  # of a shard's state: how far its ledger has answered is in no journal


@dataclass(frozen=True)
class Written:
    """The record that one process has written in all its incarnations.

    build: makes its state machine, without state. begin: gives that what it has when a run begins. segments: (number,
    messages) of its journal, without a gap. snapshots: by the segment that follows each; read when they are compared.
    """

    build: Callable[[], Server]
    begin: Callable[[Server], None]
    segments: Iterable[tuple[int, Iterable[Any]]]
    snapshots: Mapping[int, Callable[[], Snapshot]]


class Replay:
    """Replays the record of one process.

    now: its state, as if it had never ended. snapshots, recoveries: how many states were compared. applied: (member,
    incarnation, fragment, sequence, digest of its payloads) of each update. facts: all that it has reported. taken:
    of a ledger, by shard, the facts that it has taken. committed: of the global server, leases by their numbers.
    """

    def __init__(self, written: Written) -> None:
        self.build, self._written = written.build, written
        self._shadow: Server | None = None  # what a recovery would have: the newest snapshot, then the journal
        self.snapshots = self.recoveries = 0
        self.mismatches: list[str] = []
        self.applied: list[tuple[str, str, int, int, str]] = []
        self.facts: list[Fact] = []
        self.taken: defaultdict[int, list[Fact]] = defaultdict(list)
        self.committed: dict[int, Lease] = {}
        self._digests: dict[tuple[str, int, int], str] = {}
        begun = self.build()
        written.begin(begun)
        self._live_on(begun)
        for segment, messages in written.segments:
            if segment in written.snapshots:
                self._meet(written.snapshots[segment]())
            for message in messages:
                self._take(message)

    def _live_on(self, server: Server) -> None:
        self.now = server
        if server.ledger:
            report = server._report

            def noting(fact: Fact) -> None:
                self.facts.append(fact)
                report(fact)

            server._report = server.intake._report = noting  # type: ignore[method-assign]
        else:
            self.facts = server.as_shard.unsaid  # nobody says to this one what its ledger has
        if (leases := getattr(server, "lease_table", None)) is not None:
            self._watch(leases)

    def _watch(self, leases: LeaseTable) -> None:
        """Note which leases are committed, and which no more, as a shard has lost its disk."""
        contain, go_back = leases.contain, leases.go_back

        def contains(numbers: Collection[int], *where: int) -> int:
            before = {n: lease for n in numbers if (lease := leases.open.get(n) or leases.returned.get(n))}
            samples = contain(numbers, *where)
            left = before.keys() - leases.open.keys() - leases.returned.keys()
            self.committed |= {number: before[number] for number in sorted(left)}
            return samples

        def goes_back(versions: Mapping[int, int]) -> int:
            before = {*leases.recent}
            again = go_back(versions)
            for number in before - leases.recent.keys():
                del self.committed[number]
            return again

        leases.contain, leases.go_back = contains, goes_back  # type: ignore[method-assign]

    def _meet(self, saved: Snapshot) -> None:
        self.snapshots += 1
        self._compare(saved.tensors, saved.meta["state"], f"snapshot {saved.number}")
        self._shadow = self.build()
        self._shadow.load({name: t.clone() for name, t in saved.tensors.items()}, saved.meta["state"])
        if saved.meta.get("ended") and self._launch_after(saved) not in ("", saved.meta["launch"]):
            for server in (self.now, self._shadow):  # as `recover` does in a later launch
                server.begin_again()

    def _launch_after(self, saved: Snapshot) -> str:
        """Name the launch of the next snapshot; "" if this is the last one."""
        later = min((s for s in self._written.snapshots if s > saved.meta["segment"]), default=None)
        return "" if later is None else str(self._written.snapshots[later]().meta["launch"])

    def _take(self, message: Any) -> None:
        shadow = self._shadow
        both = [self.now, *([] if shadow is None else [shadow])]
        if isinstance(message, Restarted):
            if shadow is not None:
                self.recoveries += 1
                self._compare(*shadow.state(), f"recovery {self.recoveries}")
                self._shadow = restarted(self.build, shadow)
            self._live_on(restarted(self.build, self.now))
        elif isinstance(message, Stopped):
            for server in both:
                end_incarnations(server)
        elif isinstance(message, StillJoined):
            for server in both:
                server.membership.note_joined(message.join)
        elif not isinstance(message, Dismissed):  # that changes no state
            if shadow is not None:
                _deliver(shadow, message)
            self._note(message)

    def _compare(self, tensors: Mapping[str, torch.Tensor], meta: Any, what: str) -> None:
        ours, state = self.now.state()
        states = [json.loads(json.dumps(plain)) for plain in (state, meta)]
        differing = [*_unlike_facts(*[{name: plain["part"].pop(name) for name in UNSAID} for plain in states])]
        differing += _paths(*states)
        differing += [name for name in ours.keys() | tensors.keys() if not _equal(ours.get(name), tensors.get(name))]
        if differing:
            self.mismatches.append(f"{what}: {', '.join(sorted(differing)[:5])}")

    def _note(self, message: Any) -> None:
        before = list(self.now.as_ledger.taken)
        reply = _deliver(self.now, message)
        if isinstance(message, Facts) and reply is not None:
            if message.since > before[message.shard]:
                self.mismatches.append(f"shard {message.shard}: facts up to {message.since} were never taken")
            self.taken[message.shard] += message.facts[before[message.shard] - message.since :]
        if isinstance(message, UpdatePart):
            key = message.member, message.fragment, message.sequence
            content = b"".join(bytes(delta.payload) for delta in message.deltas)
            self._digests[key] = hashlib.sha256(self._digests.get(key, "").encode() + content).hexdigest()
            if reply:
                self.applied.append((key[0], message.incarnation, *key[1:], self._digests[key]))


class ServerReplay:
    """Replays a server: its process, or its ledger and its shards. behind: number of facts that the ledger had not
    taken."""

    def __init__(self, ledger: Written, shards: Sequence[Written] = ()) -> None:
        self.ledger, self.shards = Replay(ledger), [Replay(written) for written in shards]
        self.processes = [self.ledger, *self.shards]
        self.applied = [update for process in self.processes for update in process.applied]
        self.behind = 0
        for number, shard in enumerate(self.shards):
            taken = self.ledger.taken[number]
            self.behind += len(shard.facts) - len(taken)
            wrong = next((i for i, fact in enumerate(taken) if shard.facts[i : i + 1] != [fact]), None)
            if wrong is not None:
                known = f"fact {wrong + 1} is {taken[wrong]}"
                self.ledger.mismatches.append(f"{known}, its shard {number} says {shard.facts[wrong : wrong + 1]}")
        fragments = range(len(self.ledger.now.parameter_map.fragments))
        within: dict[int, set[int]] = {fragment: set() for fragment in fragments}
        for fact in (fact for process in self.processes for fact in process.facts):
            if fact.what in ("applied", "contained"):
                within[fact.fragment].update(fact.contains)
        self.ledger.mismatches += [
            f"lease {number} is committed, and fragment {fragment} does not contain it"
            for number in self.ledger.committed
            for fragment in fragments
            if number not in within[fragment]
        ]

    @property
    def sent_up(self) -> list[tuple[int, int]]:
        """(fragment, sequence) of each update of a region that the global server has taken, as the region knows."""
        facts = [fact for process in self.processes for fact in process.facts]
        return [(fact.fragment, fact.sequence) for fact in facts if fact.what == "up"]

    @property
    def mismatches(self) -> list[tuple[int | None, str]]:
        """Each with its shard; None: of the server's process, or its ledger's."""
        of_shards = [(i, text) for i, shard in enumerate(self.shards) for text in shard.mismatches]
        return [(None, text) for text in self.ledger.mismatches] + of_shards


def _unlike_facts(ours: Any, saved: Any) -> Iterator[str]:
    """What differs in the facts that two states of a shard have, as far as both name them."""
    if ours["said"] + len(ours["unsaid"]) != saved["said"] + len(saved["unsaid"]):
        yield "number of facts"
    elif saved["unsaid"] != ours["unsaid"][saved["said"] - ours["said"] :][: len(saved["unsaid"])]:
        yield "facts"


def _deliver(server: Server, message: Any) -> Any:
    with suppress(Refused):
        return server.handle(message).reply
    return None


def _paths(one: Any, other: Any, at: str = "") -> Iterator[str]:
    """Paths at which two pieces of plain data differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() | other.keys():
            yield from _paths(one.get(key), other.get(key), f"{at}.{key}" if at else key)
    elif one != other:
        sorted_too = (
            isinstance(one, list) and isinstance(other, list) and sorted(map(str, one)) == sorted(map(str, other))
        )
        yield f"{at} (in its order only)" if sorted_too else at


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two tensors are equal to the bit, so that −0 is not 0."""
    if one is None or other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)))
