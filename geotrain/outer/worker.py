"""One rank's weights in the outer loop: its anchors, making deltas, adopting answers. Tensors only; when all this
happens is in `exchange`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from geotrain.config import OuterConfig
from geotrain.outer.codec import NonFiniteError, make_codec, refusal
from geotrain.outer.downlink import VALIDATION_CODEC, WeightsReceiver
from geotrain.outer.messages import ChunkDelta, ChunkWeights
from geotrain.parameters.chunks import Cut, cut
from geotrain.parameters.parameter_map import ParameterMap, StridedSlice, joined, numel
from geotrain.staging.interface import Made, Pending, Staging, SynchronousStaging, from_bytes

T = TypeVar("T")


@dataclass
class OwnedSlices:
    """A chunk of this rank's master weights.

    runs: the canonical places of its elements, in order. master: 1-D fp32 view of them.
    pushes: whether this rank sends their delta. If not, another rank does, which holds a copy; this one only
    receives.
    """

    runs: tuple[StridedSlice, ...]
    master: Tensor
    pushes: bool


class _Shard:
    """This rank's part of one chunk: the masters, and vectors as long as they are together.

    What it pushes comes first, so that what a delta needs is a prefix of each vector. own: what lies in the chunk.
    """

    def __init__(self, own: Sequence[tuple[OwnedSlices, Cut]], staging: Staging) -> None:
        ordered = sorted(own, key=lambda each: not each[0].pushes)
        # A part of a master is a view of it, so what is written to it is the master's.
        self.masters = [owned.master[c.begin : c.end] for owned, c in ordered]
        self.sizes = [m.numel() for m in self.masters]
        self.names = [c.parameter for _, c in ordered]
        self.pushes = joined(s for owned, c in own if owned.pushes for s in c.slices)
        self.holds = joined((*self.pushes, *(s for owned, c in own if not owned.pushes for s in c.slices)))
        self.pushed = numel(self.pushes)
        self.staging = staging
        # On the staging's device even where this rank holds nothing: answers come to that device, and torch refuses
        # to combine tensors of two devices, empty ones included.
        self.anchor = torch.zeros(sum(self.sizes), dtype=torch.float32, device=staging.device)
        self.scratch = torch.empty_like(self.anchor)  # kept, so that a delta needs no fresh memory beside training
        self.residual: Tensor | None = None  # of what is pushed; made at the first delta of a lossy codec
        self.version = 0  # of the anchor
        self.done: Any = None  # event behind the last work beside training that uses these buffers

    def read(self) -> Tensor:
        """Copy the masters into one vector, the scratch buffer, which the next call overwrites."""
        self.staging.read(self.masters, self.scratch)
        return self.scratch

    def write(self, values: Tensor) -> None:
        """Copy one vector into the masters, in place: the optimizer keeps its references to them."""
        self.staging.change(self.masters, torch._foreach_copy_, values)

    def refusal(self, values: Tensor) -> NonFiniteError:
        """Build the error that names the parameter whose part of `values` is not finite; if none is, it is the
        residual."""
        for name, part in zip(self.names, values.split(self.sizes), strict=True):
            if not bool(part.isfinite().all()):
                return refusal(f"parameter {name}")
        return refusal("what earlier deltas left to be sent")


class WorkerRank:
    """Anchors and residuals of what one rank holds of the model, chunk by chunk.

    Memory on the staging's device: 8 bytes for each parameter that the rank owns (anchor and scratch buffer), 4 more
    with a lossy codec (residual), 4 more where changes come down (mirror). chunks: this rank's masters, each within
    one fragment. staging: None: do everything at once, on the masters' device.
    """

    def __init__(
        self,
        parameter_map: ParameterMap,
        config: OuterConfig,
        chunks: Sequence[OwnedSlices],
        staging: Staging | None = None,
    ) -> None:
        self.overlap = config.overlap
        up, down = config.worker_codecs
        self.codec = make_codec(up)
        self.downlink = WeightsReceiver(down)
        by_chunk: list[list[tuple[OwnedSlices, Cut]]] = [[] for _ in parameter_map.chunks]
        for owned in chunks:
            for each in cut(parameter_map, owned.runs):
                by_chunk[each.chunk].append((owned, each))
        device = chunks[0].master.device if chunks else torch.device("cpu")
        self.staging: Staging = SynchronousStaging(device) if staging is None else staging
        self.shards = [_Shard(own, self.staging) for own in by_chunk]
        self._parameters = [[p.name for p in fragment.parameters] for fragment in parameter_map.fragments]

    @property
    def pushes(self) -> tuple[tuple[StridedSlice, ...], ...]:
        return tuple(s.pushes for s in self.shards)

    @property
    def holds(self) -> tuple[tuple[StridedSlice, ...], ...]:
        return tuple(s.holds for s in self.shards)

    def parameters(self, fragments: tuple[int, ...]) -> frozenset[str]:
        """Names of all parameters in these fragments, whoever holds them."""
        return frozenset(name for fragment in fragments for name in self._parameters[fragment])

    def make_delta(self, chunk: int, seed: int) -> Pending[ChunkDelta]:
        """Encode anchor − masters for what this rank pushes. seed: of the codec's rounding.

        From now until the answer comes, `anchor` holds the masters as they were sent: the progress made meanwhile,
        which `adopt = "rebase"` keeps, is the masters' difference from it. Raises NonFiniteError: at once on a CPU,
        from the result on a GPU.
        """
        shard = self.shards[chunk]
        self.staging.wait(shard.done)  # the last delta may still be read from the scratch buffer, which is filled now
        now = shard.read()  # a copy: training goes on
        version = shard.version  # now: `on_weights` may change it before `build` runs on another thread

        def make() -> Made:
            if self.codec.error_feedback and shard.residual is None:
                shard.residual = torch.zeros_like(now[: shard.pushed])
            try:
                encoded = self.codec.encode(
                    now[: shard.pushed], anchor=shard.anchor[: shard.pushed], residual=shard.residual, seed=seed
                )
            except NonFiniteError:
                raise shard.refusal(now) from None
            shard.anchor.copy_(now)
            return encoded.payload, encoded.finite

        def build(payload: bytes, finite: bool) -> ChunkDelta:
            if not finite:
                raise shard.refusal(shard.anchor)  # the masters as they were sent
            return ChunkDelta(chunk, version, payload)

        fetched, shard.done = self.staging.fetch(chunk, make, build)
        return fetched

    def mirrors(self) -> tuple[int, ...]:
        """Return the fingerprints of what this rank was last sent, for a join."""
        return self.downlink.fingerprints_of(len(self.shards))

    def when_made(self, call: Callable[[], Pending[T]]) -> Pending[T]:
        """Return the result of `call`, called once all deltas made so far have their results."""
        return self.staging.when_fetched(call)

    @contextmanager
    def swapped_in(self, weights: Sequence[ChunkWeights]) -> Iterator[None]:
        """Context in which the masters hold these bf16 weights, to evaluate them. Afterwards they are as before,
        bit for bit; anchors are not touched. Memory: 4 bytes more for each parameter that the rank owns."""
        plain = make_codec(VALIDATION_CODEC)
        for shard in self.shards:
            self.staging.wait(shard.done)  # a delta may still be read from the scratch buffer that `read` fills
        kept = [shard.read().clone() for shard in self.shards]
        try:
            for chunk_weights in weights:
                shard = self.shards[chunk_weights.chunk]
                payload = from_bytes(chunk_weights.payload).to(shard.anchor.device)
                shard.write(plain.decode(payload, shard.anchor.numel()))
            yield
        finally:
            for shard, values in zip(self.shards, kept, strict=True):
                shard.write(values)

    @torch.no_grad()
    def on_weights(self, weights: ChunkWeights, start: bool = False) -> None:
        """Adopt the server's weights θ̃ in the masters θ, in place. start: they answer a join and are taken as they
        are.

        replace: θ = θ̃.  mix: θ = a·θ + (1−a)·θ̃ (Streaming DiLoCo, arXiv 2501.18512).
        rebase: θ = θ̃ + (θ − θ when sent). The anchor becomes θ̃ in every case.
        """
        shard = self.shards[weights.chunk]
        with self.staging.beside():
            bring = partial(self.staging.bring, weights.chunk)
            theirs = self.downlink.decode(weights, shard.anchor.numel(), bring)
            shard.done = self.staging.mark()
        self.staging.wait(shard.done, theirs)
        adopt = "replace" if start else self.overlap.adopt
        if adopt == "replace":
            shard.write(theirs)
        elif adopt == "mix":
            share = 1 - self.overlap.mix
            self.staging.change(shard.masters, lambda masters, new: torch._foreach_lerp_(masters, new, share), theirs)
        else:
            self.staging.change(shard.masters, rebase, theirs, shard.anchor)
        shard.anchor.copy_(theirs)  # a copy: `theirs` may be the downlink's mirror
        shard.version = weights.version


def rebase(masters: list[Tensor], theirs: list[Tensor], anchors: list[Tensor]) -> None:
    """Put the progress that was made since the anchors upon the new weights, in place."""
    torch._foreach_sub_(masters, anchors)
    torch._foreach_add_(masters, theirs)
