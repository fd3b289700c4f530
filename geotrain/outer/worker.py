"""One rank's half of the outer loop: anchors, deltas, and adopting what comes back. Pure tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from geotrain.canonical import Run
from geotrain.config import OuterConfig
from geotrain.outer.codec import NonFiniteError, make_codec, refusal
from geotrain.outer.downlink import WeightsReceiver, from_bytes
from geotrain.outer.layout import Layout, Slice, joined
from geotrain.outer.messages import FragmentDelta, FragmentWeights
from geotrain.outer.server import VALIDATION_CODEC
from geotrain.outer.staging import Pending, Staging

T = TypeVar("T")


@dataclass
class Piece:
    """A part of this rank's masters. master: 1-D fp32 view, element i at the canonical place the runs name.
    pushes: whether this rank speaks for it; otherwise it only receives (a copy that another rank owns)."""

    runs: tuple[Run, ...]
    master: Tensor
    pushes: bool


class _FragmentShard:
    """This rank's part of one fragment: pushing pieces first, so that a delta is a prefix."""

    def __init__(self, layout: Layout, fragment: int, pieces: Sequence[Piece], device: torch.device) -> None:
        ordered = sorted(pieces, key=lambda p: not p.pushes)
        self.masters = [p.master for p in ordered]
        self.sizes = [m.numel() for m in self.masters]
        self.names = [p.runs[0].parameter for p in ordered]
        self.pushes = self._slices(layout, fragment, [p for p in pieces if p.pushes])
        self.holds = joined(self.pushes + self._slices(layout, fragment, [p for p in pieces if not p.pushes]))
        self.pushed = sum(p.master.numel() for p in pieces if p.pushes)
        size = sum(self.sizes)
        # also where nothing is held: an answer comes to the device, and torch mixes no devices, not even empty ones
        self.anchor = torch.zeros(size, dtype=torch.float32, device=device)
        self.staging = torch.empty_like(self.anchor)
        self.residual: Tensor | None = None
        self.version = 0
        self.done: Any = None  # after the last work beside training that uses these buffers

    @staticmethod
    def _slices(layout: Layout, fragment: int, pieces: Sequence[Piece]) -> tuple[Slice, ...]:
        return joined(s for piece in pieces for s in layout.slices(piece.runs, fragment))

    def read(self) -> Tensor:
        """The masters now, in one vector (a reused buffer)."""
        if self.masters:
            torch.cat(self.masters, out=self.staging)
        return self.staging

    def culprit(self, values: Tensor) -> str:
        """The parameter whose part of `values` is not finite; what was sent before left such a residual otherwise."""
        for name, part in zip(self.names, values.split(self.sizes), strict=True):
            if not bool(part.isfinite().all()):
                return f"parameter {name}"
        return "what earlier deltas left to be sent"

    def write(self, values: Tensor) -> None:
        if self.masters:
            torch._foreach_copy_(self.masters, values.split(self.sizes))


class WorkerRank:
    """Anchors and error feedback of one rank's shard; memory: anchor, staging buffer and, for lossy codecs,
    residual: 8 to 12 bytes for each parameter that the rank owns.

    pieces: this rank's masters, each within one fragment.
    """

    def __init__(self, layout: Layout, config: OuterConfig, pieces: Sequence[Piece]) -> None:
        self.overlap = config.overlap
        up, down = (config.up, config.down) if config.levels == 1 else (config.local, config.local)
        self.codec = make_codec(up)
        self.downlink = WeightsReceiver(down)
        by_fragment: list[list[Piece]] = [[] for _ in layout.fragments]
        for piece in pieces:
            by_fragment[layout.fragment_of(piece.runs[0].parameter)].append(piece)
        self.staging = Staging(pieces[0].master.device if pieces else torch.device("cpu"))
        device = self.staging.device
        self.shards = [_FragmentShard(layout, i, members, device) for i, members in enumerate(by_fragment)]

    @property
    def pushes(self) -> tuple[tuple[Slice, ...], ...]:
        return tuple(s.pushes for s in self.shards)

    @property
    def holds(self) -> tuple[tuple[Slice, ...], ...]:
        return tuple(s.holds for s in self.shards)

    def make_delta(self, fragment: int, seed: int) -> Pending[FragmentDelta]:
        """anchor − masters of what this rank pushes, encoded. Until the answer comes, the anchor's place holds the
        masters as they were sent, so that progress made meanwhile can be told from what was sent.

        Raises NonFiniteError, or its result does."""
        shard = self.shards[fragment]
        self.staging.wait(shard.done)
        now = shard.read()  # a copy: training goes on
        with self.staging.beside():
            if self.codec.name != "fp32" and shard.residual is None:
                shard.residual = torch.zeros(shard.pushed, dtype=torch.float32, device=now.device)
            try:
                encoded = self.codec.encode_delta(
                    shard.anchor[: shard.pushed], now[: shard.pushed], residual=shard.residual, seed=seed
                )
            except NonFiniteError:
                raise refusal(shard.culprit(now)) from None
            shard.anchor.copy_(now)
            build = partial(self._delta, shard, fragment, shard.version)
            fetched = self.staging.fetch(fragment, encoded.payload, encoded.finite, build)
            shard.done = self.staging.mark()
        return fetched

    def when_made(self, call: Callable[[], Pending[T]]) -> Pending[T]:
        """`call`, once all deltas made so far have their results."""
        return self.staging.when_fetched(call)

    @staticmethod
    def _delta(shard: _FragmentShard, fragment: int, version: int, payload: bytes, finite: bool) -> FragmentDelta:
        if not finite:
            raise refusal(shard.culprit(shard.anchor))
        return FragmentDelta(fragment, version, payload)

    @contextmanager
    def lent(self, weights: Sequence[FragmentWeights]) -> Iterator[None]:
        """The masters hold these bf16 weights in here, and afterwards what they held before; anchors stay.

        Memory: 4 bytes more for each parameter that the rank owns."""
        plain = make_codec(VALIDATION_CODEC)
        for shard in self.shards:
            self.staging.wait(shard.done)  # a delta under way may still be coded from the buffer that `read` fills
        kept = [shard.read().clone() for shard in self.shards]
        try:
            for told in weights:
                shard = self.shards[told.fragment]
                payload = from_bytes(told.payload).to(shard.anchor.device)
                shard.write(plain.decode(payload, shard.anchor.numel()))
            yield
        finally:
            for shard, values in zip(self.shards, kept, strict=True):
                shard.write(values)

    @torch.no_grad()
    def on_weights(self, weights: FragmentWeights, start: bool = False) -> None:
        """Adopt the server's weights θ̃ in the masters, in place. start: the answer to a join, taken as it is.

        replace: θ = θ̃.  mix: θ = a·θ + (1−a)·θ̃ (Streaming DiLoCo, arXiv 2501.18512).
        rebase: θ = θ̃ + (θ − θ when sent). The anchor becomes θ̃ in every case.
        """
        shard = self.shards[weights.fragment]
        with self.staging.beside():
            bring = partial(self.staging.bring, weights.fragment)
            theirs = self.downlink.decode(weights, shard.anchor.numel(), bring)
            shard.done = self.staging.mark()
        self.staging.wait(shard.done, theirs)
        adopt = "replace" if start else self.overlap.adopt
        if adopt == "replace":
            shard.write(theirs)
        elif adopt == "mix":
            now = shard.read()
            shard.write(now.lerp_(theirs, 1 - self.overlap.mix))
        else:
            now = shard.read()
            shard.write(now.sub_(shard.anchor).add_(theirs))
        shard.anchor.copy_(theirs)
        shard.version = weights.version
