"""What the servers promise, as a small plain model, written from docs/algorithms.md and docs/reliability.md: weights
and versions by the papers' equations, and an account of every sample. It knows nothing of how the servers do it.

It is told what happened (an update was acknowledged, an answer merged, a lease granted) and says what must be.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from geotrain.common.names import GLOBAL
from geotrain.config import CodecConfig, HalosConfig, MomentumConfig, OuterConfig, RegionMomentumConfig, SyncConfig
from geotrain.outer.codec import make_codec
from geotrain.outer.messages import ChunkWeights, Lease, UpdatePart
from geotrain.staging.interface import from_bytes


@dataclass
class Vector:
    """One chunk on one server. All vectors are fp64: the model rounds nothing."""

    x: Tensor
    version: int = 0
    arrivals: int = 0
    momentum: Tensor | float = 0.0
    accumulated: Tensor | float = 0.0
    base: Tensor | None = None  # of a region: x as it was after the last merge
    sent: Tensor | None = None  # of a region: x at its last send
    waiting: dict[str, tuple[Tensor, int]] = field(default_factory=dict)  # synchronous: sender → delta, weight


def delayed_nesterov(v: Vector, delta: Tensor, settings: MomentumConfig) -> None:
    """acc += Δ; every N-th arrival: m = β·m + acc/N, x −= lr·(β·m + Δ/N), acc = 0; else x −= lr·Δ/N."""
    n, beta = settings.buffer, settings.beta
    lr = settings.lr_per_update * n
    v.arrivals += 1
    v.accumulated = v.accumulated + delta
    if v.arrivals % n == 0:
        v.momentum = beta * v.momentum + v.accumulated / n
        v.x = v.x - lr * (beta * v.momentum + delta / n)
        v.accumulated = 0.0
    else:
        v.x = v.x - lr * delta / n


def mean(waiting: dict[str, tuple[Tensor, int]]) -> Tensor:
    total = sum(weight for _, weight in waiting.values())
    return torch.stack([delta * (weight / total) for delta, weight in waiting.values()]).sum(0)


class Specification:
    """regions: region → workers. start: the first weights, by chunk. samples: of the run. decay: k of the region's
    momentum."""

    def __init__(
        self,
        config: OuterConfig,
        regions: dict[str, tuple[str, ...]],
        start: list[Tensor],
        samples: int,
        decay: float,
    ) -> None:
        self.config, self.rule, self.regions, self.decay = config, config.rule, regions, decay
        self.top = [Vector(x.double()) for x in start]
        self.history = {(f, 0): v.x for f, v in enumerate(self.top)}  # chunk, version → global weights
        self.region: dict[str, dict[int, Vector]] = {
            region: {} for region in regions
        }  # by chunk, once it has weights
        self.residual: dict[tuple[str, int], Tensor | float] = {}
        self.sent: dict[tuple[str, int], Tensor] = {}  # region, chunk → what it sent last, decoded
        self.mirror: dict[tuple[str, int], Tensor] = {}  # what a region was last sent of a chunk
        self.ledger = Ledger(samples, len(start))
        self.sharing: dict[str, int] = {}  # server → how many of its members take part

    # -- weights

    def weights_of(self, server: str, fragments: Sequence[int]) -> Any:
        """Copy all that there is of some fragments on one server, for `go_back`."""
        vectors = self.top if server == GLOBAL else self.region[server]
        coded = [{f: table[server, f] for f in fragments if (server, f) in table} for table in self._coded()]
        known = {f: vectors[f] for f in fragments if server == GLOBAL or f in vectors}
        return copy.deepcopy((known, coded))

    def go_back(self, server: str, then: Any) -> None:
        """A server has lost what it did with some fragments since `then`."""
        vectors, coded = copy.deepcopy(then)
        for f, v in vectors.items():
            (self.top if server == GLOBAL else self.region[server])[f] = v
        for table, of in zip(self._coded(), coded, strict=True):
            table.update({(server, f): value for f, value in of.items()})

    def _coded(self) -> tuple[dict[tuple[str, int], Any], ...]:
        return self.residual, self.sent, self.mirror

    def region_begins(self, region: str, told: Sequence[ChunkWeights]) -> None:
        """It adopts a fragment's global weights: the first time, since it starts over, or as the last ones. Should
        there be data after all, it goes on with the momentum that it had."""
        for weights in told:
            x = self.received(region, weights)
            self.region[region][weights.chunk] = replace(
                self.region[region].get(weights.chunk, Vector(x)), x=x, base=x
            )

    def region_forgets(self, region: str, chunks: Iterable[int]) -> None:
        """It starts over, or has lost its disk. Versions never fall."""
        for chunk in chunks:
            if v := self.region[region].get(chunk):
                self.region[region][chunk] = Vector(v.x, v.version)
            for table in (self.residual, self.mirror):
                table.pop((region, chunk), None)

    def worker_update(self, region: str, worker: str, deltas: dict[int, Tensor]) -> None:
        """A region server has acknowledged a worker's update as applied."""
        for chunk, told in deltas.items():
            v, delta = self.region[region][chunk], told.double()
            v.version += 1
            match self.rule:
                case HalosConfig():
                    delayed_nesterov(v, delta, self.rule.region)
                case RegionMomentumConfig():
                    v.momentum = self.decay * v.momentum + (1 - self.decay) * delta
                    whole_from = 7 if getattr(self.rule, "answers", "") == "wait" else 20
                    gain = self.rule.gain / max(1.0, whole_from * (1 - self.decay))
                    v.x = v.x - (delta + gain * v.momentum) / self.sharing[region]
                case SyncConfig():
                    assert worker not in v.waiting, "two deltas of one worker in a round"
                    v.waiting[worker] = (delta, 1)

    def region_sends(self, region: str, update: UpdatePart) -> None:
        """What it sends is its progress since the last merge, coded with what earlier coding kept back."""
        for sent in update.deltas:
            v = self.region[region][sent.chunk]
            if isinstance(self.rule, SyncConfig):
                assert sorted(v.waiting) == sorted(self.regions[region]), "a round without some worker"
                progress, v.waiting = mean(v.waiting), {}
            else:
                assert v.base is not None
                progress, v.sent = v.base - v.x, v.x
            key = region, sent.chunk
            meant = progress + self.residual.get(key, 0.0)
            decoded = decode(self.config.up, sent.payload, len(v.x))
            self.sent[key] = decoded
            close(decoded, meant, COARSE[self.config.up.name] * float(meant.abs().max()))
            self.residual[key] = meant - decoded

    def global_update(self, region: str, update: UpdatePart) -> None:
        """The global server has acknowledged a region's update as applied."""
        for sent in update.deltas:
            v, delta = self.top[sent.chunk], self.sent[region, sent.chunk]
            assert torch.equal(delta, decode(self.config.up, sent.payload, len(v.x))), "not what was sent"
            match self.rule:
                case HalosConfig():
                    v.version += 1
                    delayed_nesterov(v, delta, self.rule.global_)
                case RegionMomentumConfig():
                    v.version += 1
                    v.x = v.x - delta / self.sharing[GLOBAL]
                case SyncConfig():
                    assert region not in v.waiting, "two deltas of one region in a round"
                    v.waiting[region] = (delta, update.weight)
                    if len(v.waiting) == len(self.regions):
                        step, v.waiting = mean(v.waiting), {}
                        v.momentum = self.rule.momentum * v.momentum + step
                        v.x = v.x - self.rule.lr * (step + self.rule.momentum * v.momentum)
                        v.version += 1
            self.history[sent.chunk, v.version] = v.x

    def received(self, region: str, weights: ChunkWeights) -> Tensor:
        """What a region makes of the global weights that it is sent; they are those of the version that they name."""
        assert (weights.chunk, weights.version) in self.history, "weights of a version that never was"
        truth, key = self.history[weights.chunk, weights.version], (region, weights.chunk)
        codec = self.config.down
        if not weights.increment and codec.name not in ("fp32", "bf16"):
            got = from_bytes(weights.payload).view(torch.float32).double()
            close(got, truth, 0.0)
        elif weights.increment:
            change = truth - self.mirror[key]
            got = self.mirror[key] + decode(codec, weights.payload, len(truth))
            close(got, truth, COARSE[codec.name] * float(change.abs().max()))
        else:
            got = decode(codec, weights.payload, len(truth))
            close(got, truth, COARSE[codec.name] * float(truth.abs().max()))
        self.mirror[key] = got
        return got

    def region_merges(self, region: str, weights: ChunkWeights) -> None:
        """The answer to a region's update: with the ledger, what came meanwhile stays part of the next one."""
        v, x_global = self.region[region][weights.chunk], self.received(region, weights)
        if isinstance(self.rule, SyncConfig):
            v.x = x_global
            return
        alpha = 1.0 if getattr(self.rule, "answers", "") == "wait" else self.rule.merge_alpha
        if getattr(self.rule, "ledger", True):
            assert v.sent is not None
            pending = v.sent - v.x
            v.base = (1 - alpha) * v.sent + alpha * x_global
            v.x = v.base - pending
        else:
            v.x = v.base = (1 - alpha) * v.x + alpha * x_global


COARSE = {"fp32": 1e-6, "bf16": 2.0**-7, "int8": 0.01, "int4": 0.15}  # most that coding changes, of the largest


def decode(codec: CodecConfig, payload: bytes, numel: int) -> Tensor:
    return make_codec(codec).decode(from_bytes(payload), numel).double()


def close(one: Tensor, other: Tensor, more: float = 0.0) -> None:
    """Equal up to fp32's rounding, and `more`."""
    largest = float((one.double() - other.double()).abs().max())
    assert largest <= 1e-4 * (1.0 + float(other.abs().max())) + more, f"{largest} apart"


class Ledger:
    """Each sample is in one place: never handed out or back in the pool (free), with a lease, or trained for good."""

    def __init__(self, samples: int, fragments: int) -> None:
        self.fragments = fragments
        # lease → fragments of the global weights that contain its training → the version that does
        self.contained: dict[int, dict[int, int]] = {}
        self.void: set[int] = set()  # leases whose samples were committed and are handed out again
        self.place: list[int | str] = ["free"] * samples
        self.leases: dict[int, Lease] = {}  # every lease that was ever granted
        self.done: set[int] = set()  # those that an update brought
        self.failed: set[int] = set()  # samples whose training gave nothing of use once

    def granted(self, lease: Lease) -> None:
        if lease.lease in self.leases:
            assert self.leases[lease.lease] == lease, "one number, two leases"
            return
        self.leases[lease.lease] = lease
        for sample in range(lease.start, lease.start + lease.samples):
            assert self.place[sample] == "free", f"sample {sample} is handed out twice"
            self.place[sample] = lease.lease

    def given_back(self, number: int) -> None:
        lease = self.leases[number]
        for sample in range(lease.start, lease.start + lease.samples):
            if self.place[sample] == number:
                self.place[sample] = "free"

    def report_nonfinite_delta(self, number: int, most: float, stays: bool | None = None) -> None:
        """Its training was of no use: what has failed before is set aside, as far as that is `most` samples. stays:
        in rounds, whether its worker keeps it, as it may where nothing else is left."""
        lease = self.leases[number]
        mine = {s for s in range(lease.start, lease.start + lease.samples) if self.place[s] == number}
        if stays is None:
            self.given_back(number)
        twice = mine & self.failed
        self.failed |= mine
        assert stays is not False or not mine or twice == mine, "it failed once"
        if twice and not stays and self.place.count("aside") + len(twice) <= most:
            self.failed -= twice
            for sample in twice:
                self.place[sample] = "aside"

    def trained(self, number: int, fragment: int, version: int = 0, late: bool = False) -> None:
        """It is part of the global weights of this fragment now. Once it is of all, no other training of its samples
        is, or will be. late: said by a shard, it may have come back meanwhile, and counts unless others have it."""
        lease = self.leases[number]
        if number in self.done or number in self.void:
            return
        self.contained.setdefault(number, {})[fragment] = version
        if len(self.contained[number]) < self.fragments:
            return
        samples = range(lease.start, lease.start + lease.samples)
        if late and any(self.place[sample] not in (number, "free") for sample in samples):
            return
        self.done.add(number)
        for sample in samples:
            here = self.place[sample] == number or late
            assert here, f"sample {sample} is trained twice: it is {self.place[sample]}"
            self.place[sample] = "trained"

    def go_back(self, versions: Mapping[int, int], in_rounds: bool) -> None:
        """These fragments of the global weights are of these versions again: what only newer ones contained is
        trained no more. In rounds its worker has it again."""
        for number, within in list(self.contained.items()):
            left = {f: version for f, version in within.items() if version <= versions.get(f, version)}
            self.contained[number] = left
            if number in self.done and left != within:
                self.done.remove(number)
                lease = self.leases[number]
                for sample in range(lease.start, lease.start + lease.samples):
                    self.place[sample] = number if in_rounds else "free"
                if not in_rounds:
                    self.void.add(number)

    def lives(self, named: tuple[int, ...], gone: tuple[int, ...]) -> None:
        """Who counted as dead lives: of the leases that it names it has those again that nobody else has got; it is
        told which are gone."""
        for number in named:
            if number in self.leases and number not in self.done | self.void:
                lease = self.leases[number]
                mine = range(lease.start, lease.start + lease.samples)
                others = any(self.place[sample] not in (number, "free") for sample in mine)
                assert others == (number in gone), f"lease {number}: {'others have' if others else 'nobody has'} it"
                for sample in () if others else mine:
                    self.place[sample] = number

    @property
    def committed(self) -> int:
        return self.place.count("trained")

    @property
    def open(self) -> set[int]:
        return {place for place in self.place if isinstance(place, int)}
