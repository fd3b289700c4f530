"""A server's record of each member: its phase, its updates, its strikes.

The functions below the class check a join or an update before the server changes anything. Each raises Refused, with
a reason from which the operator of the other end learns what to do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Any

from geotrain.config import CodecConfig, LimitsConfig
from geotrain.outer.codec import Codec
from geotrain.outer.downlink import sends_changes
from geotrain.outer.messages import Identity, Join, Refused, UpdatePart
from geotrain.outer.metrics import SUMS
from geotrain.outer.server.member_phase import TRANSITIONS, MemberEvent, MemberPhase
from geotrain.parameters import coverage
from geotrain.parameters.parameter_map import Chunk, ParameterMap, ParameterMapError, numel

MOST_METRICS = 64  # of an update
MOST_NAME = 64  # characters of a metric's name
MOST_LEASES = 4096  # that an update completes; what is more goes with the next
MOST_JOBS = 1 << 40  # of a worker in a run
MOST_WEIGHT = 1 << 20  # worker updates in one of a region
MOST_PARTS = 1 << 14  # ranks of a worker; a region has one
MOST_SLICES = 1 << 20  # of all ranks of a member, some 150 MB; those of 70 B parameters on 1,024 have some 20,000
MOST_INCARNATION = 256  # characters of an incarnation's name
MOST_INCARNATIONS = 65536  # of a member in a run: all of them are remembered, in every snapshot
# Fields that a snapshot keeps (of a fragment's exchange `KEPT`). The others hold what members say again to a
# restarted server.
SAVED = (
    *("incarnation", "former", "restarts", "quarantined", "expelled", "banned"),
    *("job", "updates", "refused", "strikes", "fault", "step_s", "metrics"),
)
KEPT = "sequence", "came", "owed"


@dataclass
class MemberFragment:
    """A member's exchange of one fragment with the server above: one update at a time, one answer at a time.

    answer: sequence of the update (0: of the join) whose answer is wanted, or frozen; None: none is. version: of the
    answer, once it is frozen; None before.
    """

    sequence: int = 0  # of the last update applied
    came: int = 0  # job of its last delta (of regions: 0)
    # Whether its delta was taken and the rule has not released the answer yet (synchronous rules wait for all).
    # Unlike `answer` this outlives the server: a member that asks again after a restart must still wait.
    owed: bool = False
    staleness: int = 0  # of its last update, in versions
    norm: float = 0.0  # 2-norm of its last delta
    need_s: float = 0.0  # of its last update
    arriving: dict[int, UpdatePart] = field(default_factory=dict)  # part → the next update, without payloads
    # Sequence and why that update of several parts was refused for good. A part of it that is said again, as the
    # reply was lost, is refused again: the others, which were taken, never come again.
    refused: tuple[int, Refused] | None = None
    answer: int | None = None
    version: int | None = None
    adopted: int = 0  # the last update whose answer is kept no longer, as all parts have adopted it

    def let_go(self, adopted: int, first: int) -> bool:
        """Keep the frozen answer no longer if it is to the update `first` or a later one, and all parts have adopted
        that of update `adopted`. Returns whether it was so."""
        if self.version is None or self.answer is None or not first <= self.answer <= adopted:
            return False
        self.adopted, self.answer, self.version = self.answer, None, None
        return True


@dataclass
class Member:
    """A worker or a region server, as the server above it knows it."""

    incarnation: str = ""  # names its present incarnation; empty before it has joined for the first time
    former: list[str] = field(default_factory=list)  # digests of its former incarnations: they may not come back
    restarts: int = 0  # how often a new incarnation came without the old one having ended
    phase: MemberPhase = MemberPhase.NEW  # changed by `transition` alone
    # A quarantine is no phase: it bars the name whatever its process does meanwhile. It may fall silent, leave or be
    # started anew, and only time or the operator ends the quarantine.
    quarantined: bool = False
    expelled: bool = False  # by the operator: then time does not end the quarantine
    banned: str = ""  # the incarnation that was quarantined last: it may not come back either
    parts: int = 0  # its ranks
    joined: dict[int, Join] = field(default_factory=dict)  # part → its join, in this incarnation of member and server
    slices: dict[int, int] = field(default_factory=dict)  # part → how many its join names
    fragments: defaultdict[int, MemberFragment] = field(default_factory=lambda: defaultdict(MemberFragment))
    job: int = 0  # of the last update applied
    # Fragment and part → outline that `Server.admit` checked.
    admitted: dict[tuple[int, int], tuple[Any, ...]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    step_s: float = 0.0  # of a worker: seconds of an inner step, by its last lease request; 0: not known
    updates: int = 0
    refused: int = 0  # updates refused for good, since the run began
    strikes: list[int] = field(default_factory=list)  # the refused ones of its last updates, numbered as in `strike`
    fault: str = ""  # why the last of them was refused

    def transition(self, event: MemberEvent) -> None:
        """Move to the phase that follows this event."""
        self.phase = TRANSITIONS[self.phase, event]

    @property
    def left(self) -> bool:
        """Whether it said goodbye."""
        return self.phase in (MemberPhase.LEFT, MemberPhase.DONE)

    @property
    def silent(self) -> bool:
        """Whether it was silent for too long."""
        return self.phase in (MemberPhase.SILENT, MemberPhase.LOST)

    @property
    def takes_part(self) -> bool:
        """Whether it has a share in what the server averages. Who was only cut off has one until it counts as dead,
        as what it trains meanwhile comes later; who ends with the run keeps it, for the last deltas of the others."""
        return not self.quarantined and self.phase in (MemberPhase.PRESENT, MemberPhase.STOPPED, MemberPhase.DONE)

    @property
    def complete(self) -> bool:
        """Whether every rank of this incarnation has joined this incarnation of the server.

        No phase either: a server that restarts forgets all joins, though the members are at work.
        """
        return 0 < self.parts == len(self.joined)

    @property
    def away(self) -> bool:
        """Whether nobody should wait for it: it left, counts as dead, or is quarantined."""
        return self.left or self.silent or self.quarantined

    @property
    def at_work(self) -> bool:
        """Whether its deltas may be waited for."""
        return bool(self.incarnation) and not self.away and self.banned != self.incarnation

    @property
    def owed(self) -> list[int]:
        """Fragments whose delta was taken and whose answer the rule has not released yet."""
        return [number for number, own in sorted(self.fragments.items()) if own.owed]

    def last_round(self, fragments: int) -> int:
        """Return the last job of which a delta of every one of so many fragments came."""
        return min(self.fragments[fragment].came for fragment in range(fragments))

    def begin_incarnation(self, incarnation: str) -> None:
        """Begin a new incarnation, which has joined. The old one is remembered, so that a process that was only cut
        off, and not dead, cannot come back beside its successor."""
        if self.incarnation:
            self.former.append(incarnation_digest(self.incarnation))
            self.restarts += self.phase in (MemberPhase.PRESENT, MemberPhase.SILENT)
        self.incarnation = incarnation
        self.transition(MemberEvent.JOINS)

    def strike(self, fault: str, window: int) -> int:
        """Count a refused update. Returns how many of its last `window` updates were refused."""
        self.refused, self.fault = self.refused + 1, fault
        # Counts every update it has tried. A sequence number would not do: a refused one is used again.
        tried = self.updates + self.refused
        self.strikes = [number for number in self.strikes if number > tried - window] + [tried]
        return len(self.strikes)

    def state(self) -> dict[str, Any]:
        """Return plain JSON data, from which `load` restores what outlives the server."""
        fragments = [[number, attributes(own, KEPT)] for number, own in sorted(self.fragments.items())]
        return {**attributes(self, SAVED), "phase": self.phase.value, "fragments": fragments}

    def load(self, state: dict[str, Any]) -> None:
        """Load what `state` returned."""
        set_attributes(self, SAVED, state)
        self.phase = MemberPhase(state["phase"])
        for number, saved in state["fragments"]:
            set_attributes(self.fragments[number], KEPT, saved)

    def status(self) -> dict[str, Any]:
        """Return plain data for people and tests."""
        shown = ("left", "restarts", "updates", "job", "refused", "quarantined", "fault", "owed", "takes_part")
        known = {"joined": self.complete, "phase": self.phase.value}
        # What the member says of itself stands first: it cannot overwrite what this server knows of it.
        return {**self.metrics, **known, **{name: getattr(self, name) for name in shown}}


def attributes(owner: object, names: Sequence[str]) -> dict[str, Any]:
    """Copy attributes for a state, from which `set_attributes` restores them."""
    return {name: copy(getattr(owner, name)) for name in names}


def set_attributes(owner: object, names: Sequence[str], state: Mapping[str, Any]) -> None:
    """Restore attributes from a state, with which they share no list."""
    for name in names:
        setattr(owner, name, copy(state[name]))


def check_identity(join: Join, ours: Identity, data: str, origin: str) -> None:
    """Raise Refused unless the member trains the same run, model and data as this server.

    data: sha256 of the run's training data; "" while it is not known. Either end may not know it yet. origin: of the
    run, since another may have its name.
    """
    if join.origin not in ("", origin):
        raise Refused(
            f"{join.member}: its state is of another run of the name {ours.run!r}: give it its own run's folder, "
            "or move that away to begin with the weights of this one"
        )
    for what, their, our in (
        ("run", join.run, ours.run),
        ("config digest", join.config_digest, ours.config_digest),
        ("parameter map digest", join.parameter_map_digest, ours.parameter_map_digest),
    ):
        if their != our:
            raise Refused(
                f"{what} differs: {join.member} has {their} ({join.model}), "
                f"this server has {our} ({ours.model}); start both from the same run file"
            )
    if join.data and data and join.data != data:
        raise Refused(
            f"data differs: {join.member} trains on data of sha256 {join.data[:16]}…, this run on "
            f"{data[:16]}…; copy one and the same prepared data set to every region"
        )


def check_quarantine(name: str, member: Member, incarnation: str, limits: LimitsConfig) -> None:
    """Raise Refused while the member is quarantined, and afterwards for the very incarnation that was: it has to be
    started anew."""
    if member.expelled:
        raise Refused(f"{name}: the operator expelled it; started anew it may join once `geotrain unban` lets it")
    if member.quarantined:
        raise Refused(
            f"{name} is quarantined after {len(member.strikes)} refused updates; the last one: {member.fault}. "
            f"Started anew it may join {limits.quarantine_s:g} s later, or once the operator unbans it"
        )
    if incarnation and incarnation == member.banned:
        raise Refused(f"{name}: this incarnation of it may say no more ({member.fault}); start it anew")


def incarnation_digest(incarnation: str) -> str:
    """Shorten an incarnation's name, which may be of any length, to the 64 bits that are remembered of it."""
    return blake2b(incarnation.encode(), digest_size=8).hexdigest()


def check_incarnation(join: Join, member: Member) -> None:
    """Raise Refused for a former incarnation of the member, for a new one when no more can be remembered, and for one
    that a state knew that is lost: others may have its data, and what it sent is needed no more."""
    name, incarnation = join.member, join.incarnation
    if not 0 < len(incarnation) <= MOST_INCARNATION or not incarnation.isprintable():
        raise Refused(f"{name}: its incarnation's name is no text of 1 to {MOST_INCARNATION} characters")
    if incarnation_digest(incarnation) in member.former:
        raise Refused(f"{name}: another process has joined under this name since; this one must end")
    here = incarnation == member.incarnation
    # Only a rank that joins once more names updates (0: none was applied): its incarnation must be known then.
    known = {f: own.sequence for f, own in member.fragments.items() if here}
    if any(applied > known.get(f, 0 if here else -1) for f, applied in enumerate(join.applied)):
        raise Refused(f"{name}: this server's state was lost, or is older than what it acknowledged: start anew")
    if incarnation != member.incarnation and len(member.former) >= MOST_INCARNATIONS:
        raise Refused(f"{name}: more than {MOST_INCARNATIONS:,} incarnations; find out why, resume in a new folder")


def check_parts(join: Join, parts: int, role: str, slices: Mapping[int, int]) -> None:
    """Raise Refused unless this rank is one of so many, and their joins, which are kept, are of an honest size.

    parts: of its member. role: what that is. slices: part → how many its join names, with this one's.
    """
    most = MOST_PARTS if role == "worker" else 1
    if join.parts != parts or not 0 <= join.part < parts <= most:
        wrong = f"part {join.part} of {join.parts} does not fit its {parts} parts"
        raise Refused(f"{join.member}: {wrong}; a {role} has at most {most}")
    if (named := sum(slices.values())) > MOST_SLICES:
        raise Refused(f"{join.member}: its ranks name {named:,} slices; at most {MOST_SLICES:,}")


def check_slices(join: Join, parameter_map: ParameterMap, down: CodecConfig, chunks: Sequence[Chunk]) -> None:
    """Raise Refused unless this part's slices lie within the fragments and suit the codec of the way down. chunks:
    those of this server."""
    wanted = len(parameter_map.chunks)
    if len(join.pushes) != wanted or len(join.holds) != wanted:
        raise Refused(f"{join.member}: slices for {len(join.pushes)} chunks, the run has {wanted}")
    try:
        for i in (chunk.index for chunk in chunks):
            parameter_map.check_slices(i, join.pushes[i])
            parameter_map.check_slices(i, join.holds[i])
    except ParameterMapError as error:
        raise Refused(f"{join.member}, part {join.part}: {error}") from None
    whole = all(join.holds[chunk.index] == parameter_map.whole(chunk.index) for chunk in chunks)
    if sends_changes(down) and not (join.parts == 1 and whole):
        # Ranks that hold copies of one parameter have it at different places of their vectors, thus in different
        # blocks with different scales: with a lossy codec their copies would drift apart.
        raise Refused(f"{join.member}: codec {down.name!r} downwards needs a member that holds everything")


def check_coverage(name: str, joined: dict[int, Join], parameter_map: ParameterMap, chunks: Sequence[Chunk]) -> None:
    """Raise Refused unless all parts' slices together are these chunks, each element exactly once."""
    try:
        for chunk in (chunk.index for chunk in chunks):
            coverage.check_coverage(parameter_map, chunk, [s for join in joined.values() for s in join.pushes[chunk]])
    except ParameterMapError as error:
        raise Refused(f"{name}: its ranks do not cover the model: {error}") from None


def check_part(
    part: UpdatePart, member: Member, parameter_map: ParameterMap, up: Codec, version: int, most_weight: int
) -> None:
    """Raise Refused unless this part of an update fits the member's slices and the fragment's version on the server.

    Checks everything but the payloads' contents, so that it can be called before they have been received.
    most_weight: that an update of this member may have.
    """
    if part.part not in member.joined:
        raise Refused(f"{part.member}: part {part.part} has not joined")
    chunks, wanted_chunks = [delta.chunk for delta in part.deltas], parameter_map.chunk_numbers[part.fragment]
    if chunks != list(wanted_chunks):
        raise Refused(f"{part.member}: an update of chunks {chunks}; fragment {part.fragment} has {wanted_chunks}")
    if part.weight < 1:
        raise Refused(f"{part.member}: an update with weight {part.weight} is none")
    if part.weight > most_weight:
        raise Refused(f"{part.member}: an update of weight {part.weight}; it may stand for {most_weight} at most")
    if not 0 <= part.job <= MOST_JOBS:
        raise Refused(f"{part.member}: no worker comes to job {part.job}")
    if len(part.contains) > MOST_LEASES:
        raise Refused(f"{part.member}: an update that contains {len(part.contains)} leases; at most {MOST_LEASES}")
    if len(part.adopted) not in (0, every := len(parameter_map.fragments)):
        raise Refused(f"{part.member}: it has adopted answers of {len(part.adopted)} fragments; the run has {every}")
    if len(part.metrics) > MOST_METRICS or any(len(name) > MOST_NAME for name in part.metrics):
        most = f"{MOST_METRICS}, with names of {MOST_NAME} characters"
        raise Refused(f"{part.member}: an update with {len(part.metrics)} metrics; at most {most}")
    for delta in part.deltas:
        where = f"{part.member}, part {part.part}: {parameter_map.called(delta.chunk)}"
        wanted = up.encoded_bytes(numel(member.joined[part.part].pushes[delta.chunk]))
        if len(delta.payload) != wanted:
            raise Refused(f"{where} has {len(delta.payload)} bytes, its slices need {wanted} with codec {up.name!r}")
        if not 0 <= delta.anchor_version <= version:
            wrong = f"starts from version {delta.anchor_version}, which this server never gave"
            raise Refused(f"{where} {wrong}; it is at version {version}")
    if len({delta.anchor_version for delta in part.deltas}) > 1:
        raise Refused(f"{part.member}, part {part.part}: chunks of one fragment start from different versions")


def check_round(part: UpdatePart, own: MemberFragment) -> None:
    """Raise Refused unless a synchronous worker takes its rounds in order: a delta of each fragment in every job, and
    the next only after the answer to the last, which comes when all workers have sent theirs."""
    if not own.sequence or part.job <= own.came:
        return
    where = f"{part.member}: fragment {part.fragment} of round {part.job}"
    if part.job > own.came + 1:
        raise Refused(f"{where} came, but round {own.came + 1} is next")
    if own.owed:
        raise Refused(f"{where} came, but round {own.came} has not ended")


def outline(part: UpdatePart) -> tuple[Any, ...]:
    """Return all that `check_part` and `check_round` look at. Two parts of one rank with equal outlines pass the
    checks both or neither."""
    deltas = tuple((delta.chunk, delta.anchor_version, len(delta.payload)) for delta in part.deltas)
    said = part.contains, tuple(part.metrics), len(part.adopted)
    return part.incarnation, part.sequence, part.job, part.weight, said, deltas


def mean_metrics(workers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine workers' metrics to their region's, for people: sums of what adds up, means of the rest."""
    values: dict[str, list[float]] = {}
    for metrics in workers:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    values.pop("staleness", None)  # it counts the region's versions, which say nothing to the global server
    means = {name: sum(v) if name in SUMS else sum(v) / len(v) for name, v in values.items()}
    return dict(islice(means.items(), MOST_METRICS))  # its workers may each have sent others
