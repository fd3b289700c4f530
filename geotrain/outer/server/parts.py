"""A server's parts: the process that keeps its ledger, and shards that have its fragments; and what they say to each
other. A server of one process is both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any

from geotrain.outer.events import Event, FactsLost
from geotrain.outer.messages import Fact, Facts, MemberStanding, NotJoined, Refused, Standing, WentBack
from geotrain.outer.rules import Counts, Rule
from geotrain.outer.server.member import Member
from geotrain.outer.server.member_phase import MemberPhase
from geotrain.parameters.parameter_map import ParameterMapError

JOIN_RETRY_S = 0.5
MOST_FACTS = 256  # that a shard says at once
MOST_UNSAID = 8192  # that it keeps for its ledger
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


class ServerParts(ABC):
    """What a process knows of the other parts of its server. The base of `Membership`.

    part: that it is. fragments: of the model.
    """

    name: str
    incarnation: str
    origin: str
    data: str
    rule: Rule
    members: dict[str, Member]
    _events: list[Event]

    def __init__(self, part: ServerPart, fragments: int) -> None:
        self.part, self.all = part, range(fragments)
        self.ledger = part.shard is None  # whether this process keeps it
        self.numbers = part.numbers(fragments)  # of its own fragments
        # Of the fragments whose first weights are known; the ledger has a copy of the versions of its shards'.
        self.fragments: dict[int, Counts] = {}
        self.unsaid: list[Fact] = []  # of a shard: what its ledger may not know yet
        self.said = 0  # how many facts before these it has said
        self.standing: Standing | None = None  # of a shard: what its ledger has said last
        self.stands: dict[str, MemberStanding] = {}  # of its members, by name
        self.open = self.ledger  # of a shard: whether its ledger has said so in this incarnation
        self.taken = [0] * len(part.dealt)  # of the ledger: how many facts of each shard it knows
        self.quiet = [0] * len(part.dealt)  # `Facts.quiet` of each
        # Of the ledger: changes of members that shards are to confirm; the last that each has; and members whose
        # leases wait for that (`_once_settled`): those that are gone, or, with the leases that they name, begin anew.
        self.changes, self.seen = 0, [0] * len(part.dealt)
        self.unsettled: dict[str, tuple[int, tuple[int, ...] | None]] = {}
        self.begun = 0  # how often the run has begun again
        self.rounds: dict[str, int] = {}  # member → its last whole round before that

    @property
    def versions(self) -> list[int]:
        """Versions by fragment, of those of other processes as far as they are known; empty before this server has
        all its weights."""
        if any(number not in self.fragments for number in self.numbers):
            return []
        return [self.fragments[number].version if number in self.fragments else 0 for number in self.all]

    @property
    def own_versions(self) -> tuple[int, ...]:
        """Versions of this process's fragments."""
        return tuple(self.fragments[n].version if n in self.fragments else 0 for n in self.numbers)

    def stand(self) -> Standing:
        """Say how the run stands, for shards."""
        members = tuple(
            MemberStanding(
                name, m.incarnation, m.phase.value,
                m.fault or "an update of it was refused" if m.quarantined or m.banned == m.incarnation != "" else "",
                self.ends(name), self.rounds.get(name, 0), m.quarantined,
            )
            for name, m in self.members.items()
        )  # fmt: skip
        about = self.incarnation, self.origin, self.data
        return Standing(*about, members, self.begun, **self._stands(), number=self.changes)

    def _stands(self) -> dict[str, Any]:
        """Return what this kind of server's shards must know beside its members."""
        return {}

    def ends(self, name: str) -> bool:
        """Whether this worker ends, as there was no data for its last job. On a global server its leases say so."""
        return False

    def _on_standing(self, standing: Standing) -> None:
        """Take what the ledger says, in the place of what it said before."""
        if self.ledger:
            raise Refused("this server keeps its ledger itself")
        if any(each.phase not in PHASES for each in standing.members) or standing.every < 0:
            raise Refused(f"{self.name}: its ledger says what is no standing of a run: {standing.members!r:.200}")
        before, self.standing, self.open = self.standing, standing, True
        self.origin, self.data = standing.origin, standing.data
        self.stands = {each.name: each for each in standing.members}
        for each in standing.members:
            if (member := self.members.get(each.name)) is None:
                continue
            member.phase, member.quarantined = MemberPhase(each.phase), each.quarantined
            if each.barred:
                member.banned, member.fault = each.incarnation, each.barred
            self._note_share(each.name)
            if each.incarnation != member.incarnation and member.joined:
                self._forget(each.name, sent=False)
            if standing.begun > self.begun:
                self._begin_rounds(each.name, each.round)
        self.begun = standing.begun
        if before is None or before.validated != standing.validated:
            self.copy_weights(None)

    def _check_known(self, name: str, incarnation: str) -> None:
        """Raise Refused where a shard's ledger has not said that this incarnation of the member has joined."""
        if self.ledger:
            return
        stands = self.stands.get(name) if self.open else None
        if stands is None or stands.incarnation != incarnation:
            raise NotJoined(f"{name}: this shard does not know yet that it joined", JOIN_RETRY_S)
        if stands.barred:
            raise Refused(f"{name}: this incarnation of it may say no more ({stands.barred}); start it anew")
        if stands.phase in (MemberPhase.SILENT.value, MemberPhase.LOST.value):
            raise NotJoined(f"{name}: it was not heard of for too long: join first", JOIN_RETRY_S)

    def facts(self, safe: tuple[int, ...]) -> Facts:
        """Return what a shard has to say. safe: `Facts.safe`."""
        assert self.part.shard is not None
        said = tuple(self.unsaid[:MOST_FACTS])
        seen = self.standing.number if self.standing is not None and len(said) == len(self.unsaid) else 0
        return Facts(self.part.shard, self.said, said, self.own_versions, safe, self.quiet_since(), seen)

    def quiet_since(self) -> int:
        """Return `Facts.quiet`."""
        return 0

    def heard_facts(self, count: int) -> None:
        """Note that the ledger knows so many of this shard's facts."""
        del self.unsaid[: max(0, count - self.said)]
        self.said = max(self.said, count)

    def _report(self, fact: Fact) -> None:
        """Note a fact in the ledger, or to be said to it."""
        if self.ledger:
            self._on_fact(fact)
        else:
            self.unsaid.append(fact)

    @abstractmethod
    def _on_fact(self, fact: Fact) -> None:
        """Note a fact, of this process or of a shard, in the ledger."""

    def _check_shard(self, shard: int, *versions: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shard's fragments; there is a version of each. Raises Refused where there is no such shard."""
        known = self.ledger and 0 <= shard < len(self.taken)
        if not known or any(len(each) != len(self.part.dealt[shard]) for each in versions):
            raise Refused(f"shard {shard}: this server has {len(self.taken)}; all need the same cluster file")
        return self.part.dealt[shard]

    def _on_facts(self, said: Facts) -> int:
        """Note what a shard has done, each fact once. Returns how many of its facts are known."""
        numbers = self._check_shard(said.shard, said.versions, said.safe)
        if any(fact.what in OF_FRAGMENT and fact.fragment not in numbers for fact in said.facts):
            raise Refused(f"shard {said.shard}: it says facts of fragments that are not its own, {numbers}")
        if (lost := said.since - self.taken[said.shard]) > 0:  # this ledger came back from an older state
            self._events.append(FactsLost(said.shard, lost))
            self.taken[said.shard] = said.since
        for number, version in zip(numbers, said.versions, strict=True):
            self.fragments.setdefault(number, Counts()).version = version
        for fact in said.facts[self.taken[said.shard] - said.since :]:
            self.taken[said.shard] += 1
            if fact.what in OF_MEMBER and fact.member not in self.members:
                continue  # the run has it no more
            if fact.what == "applied":
                self._heard(fact.member)
            self._on_fact(fact)
        self.quiet[said.shard] = said.quiet
        if said.seen > self.changes:  # this ledger came back from an older state
            self.changes = said.seen + 1
            self.unsettled = {name: (self.changes, named) for name, (_, named) in self.unsettled.items()}
        elif said.seen:
            self.seen[said.shard] = said.seen
            self._settle()
        return self.taken[said.shard]

    def _once_settled(self, name: str, named: tuple[int, ...] | None = None) -> None:
        """Let leases of a member go, as it is gone or begins anew, once all that shards took from it is known here:
        when they have confirmed that this incarnation of it says no more. At once where there is no shard.

        named: leases for which its new incarnation answers; None: it is gone.
        """
        self.changes += self.ledger and bool(self.part.dealt)
        self.unsettled[name] = self.changes, self.unsettled[name][1] if named is None and self.begins(name) else named
        self._settle()

    def begins(self, name: str) -> bool:
        """Whether the member's new incarnation has to wait until it is known what shards took from the former one."""
        return name in self.unsettled and self.unsettled[name][1] is not None

    def _settle(self) -> None:
        known = min(self.seen, default=self.changes)
        for name, (number, named) in list(self.unsettled.items()):
            if number <= known:
                del self.unsettled[name]
                if name in self.members:
                    self._let_go(name, named)

    def _on_went_back(self, back: WentBack) -> None:
        """Go on with a shard whose disk was lost, and came back from a copy."""
        numbers = self._check_shard(back.shard, back.versions)
        self.taken[back.shard] = back.facts
        for number, version in zip(numbers, back.versions, strict=True):
            self.fragments.setdefault(number, Counts()).version = version
            for member in self.members.values():
                own = member.fragments[number]
                own.came = min(own.came, back.job) if self.rule.in_rounds else own.came

    def _part_state(self) -> dict[str, Any]:
        """Save what is between a ledger and its shards."""
        return {
            "part": {
                "dealt": [list(numbers) for numbers in self.part.dealt], "shard": self.part.shard, "said": self.said,
                "unsaid": [asdict(fact) for fact in self.unsaid], "taken": list(self.taken),
                "quiet": list(self.quiet), "begun": self.begun, "rounds": dict(self.rounds),
                "standing": self.standing and asdict(self.standing), "changes": self.changes, "seen": list(self.seen),
                "unsettled": dict(self.unsettled),
            }
        }  # fmt: skip

    def _load_part(self, meta: dict[str, Any]) -> None:
        """Load what `_part_state` returned. Raises ParameterMapError where the state is of another part."""
        saved = meta["part"]
        if (saved["dealt"], saved["shard"]) != ([list(numbers) for numbers in self.part.dealt], self.part.shard):
            raise ParameterMapError(
                f"the state is of a server of {len(saved['dealt']) or 'no'} shards, the cluster file names "
                f"{len(self.part.dealt)}, or their fragments differ; a run keeps the shards with which it began"
            )
        self.said, self.unsaid = saved["said"], [_fact(each) for each in saved["unsaid"]]
        self.taken, self.quiet = list(saved["taken"]), list(saved["quiet"])
        self.begun, self.rounds = saved["begun"], dict(saved["rounds"])
        self.changes, self.seen = saved["changes"], list(saved["seen"])
        for name, (number, named) in saved["unsettled"].items():
            self.unsettled[name] = number, None if named is None else tuple(named)
        if (told := saved["standing"]) is not None:
            members = tuple(MemberStanding(**each) for each in told["members"])
            self.standing = Standing(**{**told, "members": members})
            self.stands = {each.name: each for each in members}

    # -- of the server

    @abstractmethod
    def copy_weights(self, of: tuple[int, list[int]] | None) -> None:
        """Copy the newest global weights, or drop the copy (`Server.copy_weights`)."""

    @abstractmethod
    def _let_go(self, name: str, named: tuple[int, ...] | None) -> None:
        """Let leases of a member go (`_once_settled`)."""

    @abstractmethod
    def _heard(self, name: str) -> None:
        """Note a sign of life of a member."""

    @abstractmethod
    def _note_share(self, name: str) -> None:
        """Note whether the member takes part now."""

    @abstractmethod
    def _begin_rounds(self, name: str, whole: int) -> None:
        """Note the member's last whole round, as the run begins again."""

    @abstractmethod
    def _forget(self, name: str, joins: bool = True, sent: bool = True) -> None:
        """Forget a member's joins, or what it was sent (`Membership._forget`)."""


def _fact(saved: dict[str, Any]) -> Fact:
    return Fact(**{**saved, "contains": tuple(saved["contains"])})
