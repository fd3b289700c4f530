"""A server's parts: the process that keeps its ledger, and shards that have its fragments; and what each side knows
of the other. A server of one process is both, with nothing between them. Plain data: no message is sent from here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from geotrain.outer.messages import Fact, Facts, MemberStanding, NotJoined, Refused, Standing
from geotrain.outer.server.member_phase import MemberPhase
from geotrain.parameters.parameter_map import ParameterMapError

JOIN_RETRY_S = 0.5
MOST_FACTS = 256  # that a shard says at once
MOST_UNSAID = 8192  # that it keeps for its ledger
UNHEARD = 1 << 53  # a count of updates of which facts are lost: more than any
OF_MEMBER = "applied", "contained", "refused"  # facts
OF_FRAGMENT = "applied", "contained", "up", "lost"
PHASES = {phase.value for phase in MemberPhase}


@dataclass(frozen=True)
class ServerPart:
    """The part of a server that a process is.

    dealt: the fragments of each shard; empty: the server is one process. shard: number of the shard that this is;
    None: it keeps the ledger, and all fragments where there is no shard.
    """

    dealt: tuple[tuple[int, ...], ...] = ()
    shard: int | None = None

    def numbers(self, fragments: int) -> tuple[int, ...]:
        """The fragments of this process."""
        if not self.dealt:
            return tuple(range(fragments))
        return () if self.shard is None else self.dealt[self.shard]


WHOLE = ServerPart()


class LedgerSide:
    """What the ledger of a server knows of its shards.

    taken: how many facts of each it knows. quiet: `Facts.quiet` of each. changes: of members, which shards are to
    confirm. seen: the last that each has.
    """

    def __init__(self, part: ServerPart) -> None:
        self.part = part
        self.taken, self.quiet = [0] * len(part.dealt), [0] * len(part.dealt)
        self.changes, self.seen = 0, [0] * len(part.dealt)
        # Members whose leases wait until shards have confirmed a change (`once_settled`): those that are gone, or,
        # with the leases that they name, begin anew.
        self.unsettled: dict[str, tuple[int, tuple[int, ...] | None]] = {}

    def fragments_of(self, shard: int, *versions: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shard's fragments; there is a version of each. Raises Refused where there is no such shard."""
        known = self.part.shard is None and 0 <= shard < len(self.taken)
        if not known or any(len(each) != len(self.part.dealt[shard]) for each in versions):
            raise Refused(f"shard {shard}: this server has {len(self.taken)}; all need the same cluster file")
        return self.part.dealt[shard]

    def check(self, said: Facts) -> tuple[int, ...]:
        """Return the fragments of the shard that has said these facts. Raises Refused where they are not its own."""
        numbers = self.fragments_of(said.shard, said.versions, said.safe)
        if any(fact.what in OF_FRAGMENT and fact.fragment not in numbers for fact in said.facts):
            raise Refused(f"shard {said.shard}: it says facts of fragments that are not its own, {numbers}")
        return numbers

    def lost(self, said: Facts) -> int:
        """Return how many facts are gone, since this ledger came back from an older state, and go on behind them."""
        # The shard has forgotten what was acknowledged (`known`): those facts cannot be had again.
        lost = max(0, said.since - self.taken[said.shard])
        self.taken[said.shard] += lost
        return lost

    def new_facts(self, said: Facts) -> Iterator[Fact]:
        """Give the facts that were not said before, each once."""
        for fact in said.facts[self.taken[said.shard] - said.since :]:
            self.taken[said.shard] += 1
            yield fact

    def note_seen(self, said: Facts) -> None:
        """Note which change of members the shard has seen, and since when it has nothing more to say."""
        self.quiet[said.shard] = said.quiet
        if said.seen > self.changes:  # this ledger came back from an older state
            self.changes = said.seen + 1
            self.unsettled = {name: (self.changes, named) for name, (_, named) in self.unsettled.items()}
        elif said.seen:
            self.seen[said.shard] = said.seen

    def once_settled(self, name: str, named: tuple[int, ...] | None) -> None:
        """Let leases of a member wait until all that shards took from it is known here: until they have confirmed
        that this incarnation of it says no more.

        named: leases for which its new incarnation answers; None: it is gone.
        """
        self.changes += self.part.shard is None and bool(self.part.dealt)
        # One that goes before its new incarnation was settled keeps the leases that this one named.
        self.unsettled[name] = self.changes, self.unsettled[name][1] if named is None and self.begins(name) else named

    def begins(self, name: str) -> bool:
        """Whether the member's new incarnation has to wait until it is known what shards took from the former one."""
        return name in self.unsettled and self.unsettled[name][1] is not None

    def settled(self) -> Iterator[tuple[str, tuple[int, ...] | None]]:
        """Give, once each, the members that wait no more, with what they named; at once where there is no shard."""
        # The slowest shard counts. Without shards there is nothing to wait for.
        known = min(self.seen, default=self.changes)
        for name, (number, named) in list(self.unsettled.items()):
            if number <= known:
                del self.unsettled[name]
                yield name, named

    def state(self) -> dict[str, Any]:
        """Return plain JSON data, from which `load` restores this."""
        return {
            "dealt": [list(numbers) for numbers in self.part.dealt], "shard": self.part.shard,
            "taken": list(self.taken), "quiet": list(self.quiet), "changes": self.changes, "seen": list(self.seen),
            "unsettled": dict(self.unsettled),
        }  # fmt: skip

    def load(self, saved: dict[str, Any]) -> None:
        """Load what `state` returned. Raises ParameterMapError where the state is of another part."""
        if (saved["dealt"], saved["shard"]) != ([list(numbers) for numbers in self.part.dealt], self.part.shard):
            raise ParameterMapError(
                f"the state is of a server of {len(saved['dealt']) or 'no'} shards, the cluster file names "
                f"{len(self.part.dealt)}, or their fragments differ; a run keeps the shards with which it began"
            )
        self.taken, self.quiet = list(saved["taken"]), list(saved["quiet"])
        self.changes, self.seen = saved["changes"], list(saved["seen"])
        for name, (number, named) in saved["unsettled"].items():
            self.unsettled[name] = number, None if named is None else tuple(named)


class ShardSide:
    """What a shard knows of its ledger, and what its ledger may not know of it yet.

    unsaid: facts that the ledger may not know. said: how many before these it knows. standing: what it has said last;
    stands: of the shard's members, by name. open: whether it has said so in this incarnation of the shard.
    """

    def __init__(self, part: ServerPart) -> None:
        self.part = part
        self.unsaid: list[Fact] = []
        self.said = 0
        self.standing: Standing | None = None
        self.stands: dict[str, MemberStanding] = {}
        self.open = part.shard is None

    def take(self, standing: Standing) -> Standing | None:
        """Take what the ledger says, in the place of what it said before, which is returned. Raises Refused."""
        if self.part.shard is None:
            raise Refused("this server keeps its ledger itself")
        if any(each.phase not in PHASES for each in standing.members) or standing.every < 0:
            raise Refused(f"its ledger says what is no standing of a run: {standing.members!r:.200}")
        before, self.standing, self.open = self.standing, standing, True
        self.stands = {each.name: each for each in standing.members}
        return before

    def check_known(self, name: str, incarnation: str) -> None:
        """Raise Refused where the ledger has not said that this incarnation of the member has joined."""
        if self.part.shard is None:
            return
        stands = self.stands.get(name) if self.open else None
        if stands is None or stands.incarnation != incarnation:
            raise NotJoined(f"{name}: this shard does not know yet that it joined", JOIN_RETRY_S)
        if stands.barred:
            raise Refused(f"{name}: this incarnation of it may say no more ({stands.barred}); start it anew")
        if stands.phase in (MemberPhase.SILENT.value, MemberPhase.LOST.value):
            raise NotJoined(f"{name}: it was silent for too long: join first", JOIN_RETRY_S)

    def facts(self, versions: tuple[int, ...], safe: tuple[int, ...], quiet: int) -> Facts:
        """Return what the shard has to say. versions: of its fragments. safe, quiet: `Facts.safe`, `Facts.quiet`."""
        assert self.part.shard is not None
        said = tuple(self.unsaid[:MOST_FACTS])
        # A change is confirmed only with the last of the facts, all of which came before it.
        seen = self.standing.number if self.standing is not None and len(said) == len(self.unsaid) else 0
        return Facts(self.part.shard, self.said, said, versions, safe, quiet, seen)

    @property
    def count(self) -> int:
        """How many facts there were."""
        return self.said + len(self.unsaid)

    def known(self, count: int) -> None:
        """Note that the ledger knows so many of this shard's facts."""
        # A reply that came late may know fewer than one before it.
        del self.unsaid[: max(0, count - self.said)]
        self.said = max(self.said, count)

    def state(self) -> dict[str, Any]:
        """Return plain JSON data, from which `load` restores this."""
        standing = self.standing and asdict(self.standing)
        return {"said": self.said, "unsaid": [asdict(fact) for fact in self.unsaid], "standing": standing}

    def load(self, saved: dict[str, Any]) -> None:
        """Load what `state` returned."""
        self.said = saved["said"]
        self.unsaid = [Fact(**{**each, "contains": tuple(each["contains"])}) for each in saved["unsaid"]]
        if (standing := saved["standing"]) is not None:
            members = tuple(MemberStanding(**each) for each in standing["members"])
            self.standing = Standing(**{**standing, "members": members})
            self.stands = {each.name: each for each in members}
