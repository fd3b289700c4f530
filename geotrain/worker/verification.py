"""Finds a rank that computes wrongly, as a sick device makes it.

Now and then all replicas of a worker compute one micro-batch, forward and backward, each twice. Ranks with the same
place in their replica hold the same weights, so that they must get the same, bit for bit; where kernels are not
deterministic, as near as a rank's own two results are to each other. Their weights must always have the same bits.
Who differs from most of its equals is named; twice, and its device counts as not fit, as after errors of its memory.

A replica's ranks pass their results on to each other. Of those that differ the first in the order of computing is
named, with its tensor, context and expert ranks; where these have several hosts, the fault's place is not known.
"""

import socket
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from geotrain.inner.engine.engine import GeoEngine
from geotrain.inner.engine.recompute import Result, computed, weight_bits
from geotrain.inner.engine.step import StepReader
from geotrain.parallelism.checks import micro_batches_between
from geotrain.worker.loop import RunMember
from geotrain.worker.rank_watch import RankWatch

VERIFICATION = "verification"  # a kind of work, for the watch
STRIKES = 2
SPREADS, KEPT = 8.0, 16  # a result may be so many spreads from the others', of the largest of the last ones
PARTS = "results", "gradients"


class Figures(NamedTuple):  # its annotations are no strings: docs could not resolve those of a named tuple
    """What a rank says. place: in its replica, the pipeline stage first. kind: of its device. weights: sum of bits.
    runs: what came of the micro-batch both times: results of its stage, and gradients."""

    replica: int
    place: tuple[int, ...]
    host: str
    kind: str
    weights: int
    runs: tuple[tuple[Result, Result], tuple[Result, Result]]


def figures_of(engine: GeoEngine, tokens: Tensor) -> Figures:
    """Compute a micro-batch twice. Every rank of a replica must call it."""
    mesh, runs = engine.mesh, (computed(engine, tokens), computed(engine, tokens))
    place = mesh.pp_rank, mesh.tp_rank, mesh.cp_rank, mesh.ep_rank
    return Figures(mesh.replica, place, "", "", weight_bits(engine), runs)


class Suspects(NamedTuple):
    """Ranks that differ from their equals. sure: whether it is known that these are wrong. what: that differs. order:
    of computing."""

    ranks: tuple[int, ...]
    sure: bool
    what: str
    order: tuple[int, int]


class Comparison:
    """Compares what ranks say, one time after another; all ranks come to the same."""

    def __init__(self) -> None:
        self._exact: dict[int, bool] = {}  # by part: whether ranks get the same bits again
        self._spreads: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))

    def suspects(self, said: Sequence[Figures]) -> list[Suspects]:
        """Find the ranks that are wrong. said: by rank."""
        kinds: defaultdict[int, list[str]] = defaultdict(list)
        for figures in said:
            kinds[figures.replica].append(figures.kind)
        equals: defaultdict[object, list[int]] = defaultdict(list)
        for rank, figures in enumerate(said):
            equals[(figures.place, *kinds[figures.replica])].append(rank)
        found: list[Suspects] = []
        for ranks in equals.values():
            found += _outvoted(ranks, {rank: [said[rank].weights] for rank in ranks}, "weights", (0, 0))
        for part, what in enumerate(PARTS):
            pairs = [(f.runs[0][part], f.runs[1][part]) for f in said]
            same = sum(first.bits == second.bits for first, second in pairs)
            exact = self._exact.setdefault(part, 2 * same >= len(said))
            self._spreads[part].append(median(_spread(pair) for pair in pairs))
            for ranks in equals.values():
                stage = said[ranks[0]].place[0]
                order = 1 + part, stage if part == 0 else -stage
                if exact:
                    found += _outvoted(ranks, {r: [each.bits for each in pairs[r]] for r in ranks}, what, order)
                else:
                    found += self._far(ranks, pairs, part, order)
        first = min((each.order for each in found), default=None)
        found = [each for each in found if each.order == first]
        hosts = {said[rank].host for each in found for rank in each.ranks}
        # What is wrong in one rank's results is so in those that it exchanges with.
        known = len(hosts) == 1 or first == (0, 0)
        return [each._replace(sure=each.sure and known) for each in found]

    def _far(
        self, ranks: Sequence[int], pairs: Sequence[tuple[Result, Result]], part: int, order: tuple[int, int]
    ) -> Iterable[Suspects]:
        """Find those whose norms are far from the others', or from each other."""
        most = SPREADS * max(self._spreads[part])
        usual = median(each.norm for rank in ranks for each in pairs[rank])
        far = tuple(
            rank
            for rank in ranks
            if _spread(pairs[rank]) > most or _spread((Result(0, usual), pairs[rank][0])) > most
        )
        if far:
            yield Suspects(far, 2 * len(far) < len(ranks) or len(ranks) == 1, PARTS[part], order)


def _spread(pair: tuple[Result, Result]) -> float:
    """How far apart two norms are, as a share; infinite if one is no number."""
    first, second = (each.norm for each in pair)
    share = abs(first - second) / max(abs(first), abs(second), 1e-30)
    return share if share < float("inf") else float("inf")


def _outvoted(
    ranks: Sequence[int], values: dict[int, list[int]], what: str, order: tuple[int, int]
) -> Iterable[Suspects]:
    """Find the ranks that have another value than most; all, where no value is the commonest."""
    (usual, votes), *others = Counter(v for rank in ranks for v in values[rank]).most_common(2)
    if others:
        sure = others[0][1] < votes or len(ranks) == 1
        wrong = tuple(rank for rank in ranks if not sure or set(values[rank]) != {usual} or len(ranks) == 1)
        yield Suspects(wrong, sure, what, order)


class Verifier:
    """This rank's part. All ranks call it before each step, with the step's batch.

    share: of the micro-batches that a replica computes, for this.
    """

    def __init__(self, engine: GeoEngine, member: RunMember, watch: RankWatch, share: float) -> None:
        self.engine, self.member, self.watch = engine, member, watch
        self._between = micro_batches_between(share, engine.mesh.pp_size)
        self._trained, self._comparison = 0, Comparison()
        self._strikes, self._reported = Counter[int](), set[Suspects]()
        self._found = watch.found
        self._found["wrong_results"] = 0.0
        cuda = engine.device.type == "cuda"
        threads = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
        self._kind = torch.cuda.get_device_name(engine.device) if cuda else threads

    def __call__(self, batch: StepReader) -> None:
        """Compare, if it is time."""
        self._trained += self.engine.gradient_accumulation_steps()
        if self._trained >= self._between:
            self._trained = 0
            with self.watch.doing(VERIFICATION):
                self.compare(batch)

    def compare(self, batch: StepReader) -> None:
        """Compute the batch's first micro-batch, and compare with the other ranks."""
        mine = figures_of(self.engine, batch.micro_batch(0))._replace(host=socket.gethostname(), kind=self._kind)
        said: list[Figures] = [mine] * dist.get_world_size()
        dist.all_gather_object(said, mine, group=self.engine.mesh.control_group)
        suspects = self._comparison.suspects(said)
        for each in suspects:
            self._found["wrong_results"] += 1
            self._report(each, said)
        if any(each.what == "weights" for each in suspects):  # of a bit that flipped once nothing is left
            self.engine.settle()
            self.engine.refresh()

    def _report(self, suspects: Suspects, said: Sequence[Figures]) -> None:
        rank, what = self.engine.rank, f"its {suspects.what} are not those of its equals"
        if suspects.what in PARTS:
            part, (first, *_) = PARTS.index(suspects.what), suspects.ranks
            usual = median(each.runs[0][part].norm for each in said if each.place == said[first].place)
            what += f" (L2 norm {said[first].runs[0][part].norm:.9g}, median {usual:.9g})"
        if suspects.sure:
            self._strikes.update(suspects.ranks)
        if self.engine.is_metrics_rank and suspects not in self._reported:
            who = ", ".join(f"rank {rank} on {said[rank].host}" for rank in suspects.ranks)
            then = (
                "once more, and its device counts as not fit" if suspects.sure else "which rank is wrong is not known"
            )
            self.member.trouble(f"{who}: {what}; {then}")
        self._reported.add(suspects)
        if suspects.sure and rank in suspects.ranks and self._strikes[rank] == STRIKES:
            self.member.device_failed(rank, str(self.engine.device), f"{what}, {STRIKES} times")
