"""One rank's weights in the outer loop: its anchors, making deltas, adopting answers. Tensors only; when all this
happens is in `exchange`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from geotrain.config import OuterConfig
from geotrain.layout import Layout, StridedSlice, joined
from geotrain.outer.codec import NonFiniteError, make_codec, refusal
from geotrain.outer.downlink import VALIDATION_CODEC, WeightsReceiver, from_bytes, on_host
from geotrain.outer.exchange import Pending, Ready
from geotrain.outer.messages import FragmentDelta, FragmentWeights

T = TypeVar("T")


class Staging(Protocol):
    """How a rank's payloads get from its device to host memory and back while it trains.

    `SynchronousStaging` does everything at once. `geotrain.staging.CudaStaging` works beside training, on a
    CUDA stream and a thread of its own. It is handed in because nothing in `outer` may run asynchronously by itself.
    """

    @property
    def device(self) -> torch.device: ...
    def beside(self) -> AbstractContextManager[None]:
        """A context whose computations run beside training, on the values that training's tensors have on entry."""

    def mark(self) -> Any:
        """A mark behind all work that was given to this staging so far."""

    def wait(self, mark: Any, *made: Tensor) -> None:
        """Let training's computations from now on begin only behind the mark (None: no mark yet). On a GPU the device
        waits, not the host. made: tensors made in `beside` that training will use."""

    def fetch(self, key: int, payload: Tensor, finite: Any, build: Callable[[bytes, bool], T]) -> Pending[T]:
        """The result of build(payload, finite), called once both are in host memory. key: names the host buffer,
        which the next fetch with this key uses again."""

    def bring(self, key: int, payload: bytes, check: Callable[[Tensor], None]) -> Tensor:
        """The payload on the device (uint8, 1-D), after `check` has accepted it in host memory. key: as in
        `fetch`."""

    def when_fetched(self, call: Callable[[], Pending[T]]) -> Pending[T]:
        """The result of `call`, called once everything given to `fetch` so far is in host memory."""


class SynchronousStaging:
    """Does everything at once, in the caller's thread: for training on a CPU, and for the simulator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def beside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def mark(self) -> None:
        return None

    def wait(self, mark: Any, *made: Tensor) -> None:
        pass

    def fetch(self, key: int, payload: Tensor, finite: Any, build: Callable[[bytes, bool], T]) -> Pending[T]:
        return Ready(build(payload.cpu().numpy().tobytes(), bool(finite)))

    def bring(self, key: int, payload: bytes, check: Callable[[Tensor], None]) -> Tensor:
        return on_host(payload, check).to(self.device)

    def when_fetched(self, call: Callable[[], Pending[T]]) -> Pending[T]:
        return call()


@dataclass
class OwnedSlices:
    """A piece of this rank's master weights.

    runs: the canonical places of its elements, in order. master: 1-D fp32 view of them.
    pushes: whether this rank sends their delta. If not, another rank does, which holds a copy; this one only
    receives.
    """

    runs: tuple[StridedSlice, ...]
    master: Tensor
    pushes: bool


class _FragmentShard:
    """This rank's part of one fragment: the masters, and vectors as long as they are together.

    Pieces that it pushes come first, so that what a delta needs is a prefix of each vector.
    """

    def __init__(self, layout: Layout, fragment: int, pieces: Sequence[OwnedSlices], device: torch.device) -> None:
        def slices(pushes: bool) -> tuple[StridedSlice, ...]:
            return joined(s for p in pieces if p.pushes == pushes for s in layout.slices(p.runs, fragment))

        ordered = sorted(pieces, key=lambda p: not p.pushes)
        self.masters = [p.master for p in ordered]
        self.sizes = [m.numel() for m in self.masters]
        self.names = [p.runs[0].parameter for p in ordered]
        self.pushes = slices(True)
        self.holds = joined(self.pushes + slices(False))
        self.pushed = sum(p.master.numel() for p in pieces if p.pushes)
        # On the staging's device even where this rank holds nothing: answers come to that device, and torch refuses
        # to combine tensors of two devices, empty ones included.
        self.anchor = torch.zeros(sum(self.sizes), dtype=torch.float32, device=device)
        self.scratch = torch.empty_like(self.anchor)  # kept, so that a delta needs no fresh memory beside training
        self.residual: Tensor | None = None  # of what is pushed; made at the first delta of a lossy codec
        self.version = 0  # of the anchor
        self.done: Any = None  # mark behind the last work beside training that uses these buffers

    def read(self) -> Tensor:
        """A copy of the masters in one vector. It is the scratch buffer, which the next call overwrites."""
        if self.masters:
            torch.cat(self.masters, out=self.scratch)
        return self.scratch

    def write(self, values: Tensor) -> None:
        """Copy one vector into the masters, in place: the optimizer keeps its references to them."""
        if self.masters:
            torch._foreach_copy_(self.masters, values.split(self.sizes))

    def refusal(self, values: Tensor) -> NonFiniteError:
        """An error that names the parameter whose part of `values` is not finite; if none is, it is the residual."""
        for name, part in zip(self.names, values.split(self.sizes), strict=True):
            if not bool(part.isfinite().all()):
                return refusal(f"parameter {name}")
        return refusal("what earlier deltas left to be sent")


class WorkerRank:
    """Anchors and residuals of what one rank holds of the model.

    Memory: 8 bytes for each parameter that the rank owns (anchor and scratch buffer), 12 with a lossy codec
    (residual). pieces: this rank's masters, each within one fragment. staging: None: do everything at once, on the
    masters' device.
    """

    def __init__(
        self, layout: Layout, config: OuterConfig, pieces: Sequence[OwnedSlices], staging: Staging | None = None
    ) -> None:
        self.overlap = config.overlap
        up, down = config.worker_codecs
        self.codec = make_codec(up)
        self.downlink = WeightsReceiver(down)
        by_fragment: list[list[OwnedSlices]] = [[] for _ in layout.fragments]
        for piece in pieces:
            by_fragment[layout.fragment_of(piece.runs[0].parameter)].append(piece)
        device = pieces[0].master.device if pieces else torch.device("cpu")
        self.staging: Staging = SynchronousStaging(device) if staging is None else staging
        device = self.staging.device
        self._parameters = [[p.name for p in fragment.parameters] for fragment in layout.fragments]
        self.shards = [_FragmentShard(layout, i, members, device) for i, members in enumerate(by_fragment)]

    @property
    def pushes(self) -> tuple[tuple[StridedSlice, ...], ...]:
        return tuple(s.pushes for s in self.shards)

    @property
    def holds(self) -> tuple[tuple[StridedSlice, ...], ...]:
        return tuple(s.holds for s in self.shards)

    def parameters(self, fragments: tuple[int, ...]) -> frozenset[str]:
        """Names of all parameters in these fragments, whoever holds them."""
        return frozenset(name for fragment in fragments for name in self._parameters[fragment])

    def make_delta(self, fragment: int, seed: int) -> Pending[FragmentDelta]:
        """Encode anchor − masters for what this rank pushes. seed: of the codec's rounding.

        From now until the answer comes, `anchor` holds the masters as they were sent: the progress made meanwhile,
        which `adopt = "rebase"` keeps, is the masters' difference from it. Raises NonFiniteError: at once on a CPU,
        from the result on a GPU.
        """
        shard = self.shards[fragment]
        self.staging.wait(shard.done)  # the last delta may still be read from the scratch buffer, which is filled now
        now = shard.read()  # a copy: training goes on
        with self.staging.beside():
            if self.codec.error_feedback and shard.residual is None:
                shard.residual = torch.zeros(shard.pushed, dtype=torch.float32, device=now.device)
            try:
                encoded = self.codec.encode(
                    now[: shard.pushed], anchor=shard.anchor[: shard.pushed], residual=shard.residual, seed=seed
                )
            except NonFiniteError:
                raise shard.refusal(now) from None
            shard.anchor.copy_(now)
            version = shard.version  # now: `on_weights` may change it before `build` runs on another thread

            def build(payload: bytes, finite: bool) -> FragmentDelta:
                if not finite:
                    raise shard.refusal(shard.anchor)  # the masters as they were sent
                return FragmentDelta(fragment, version, payload)

            fetched = self.staging.fetch(fragment, encoded.payload, encoded.finite, build)
            shard.done = self.staging.mark()
        return fetched

    def mirrors(self) -> tuple[int, ...]:
        """Marks of what this rank was last sent, for a join."""
        return self.downlink.marks_of(len(self.shards))

    def when_made(self, call: Callable[[], Pending[T]]) -> Pending[T]:
        """The result of `call`, called once all deltas made so far have their results."""
        return self.staging.when_fetched(call)

    @contextmanager
    def lent(self, weights: Sequence[FragmentWeights]) -> Iterator[None]:
        """A context in which the masters hold these bf16 weights, to evaluate them. Afterwards they are as before,
        bit for bit; anchors are not touched. Memory: 4 bytes more for each parameter that the rank owns."""
        plain = make_codec(VALIDATION_CODEC)
        for shard in self.shards:
            self.staging.wait(shard.done)  # a delta may still be read from the scratch buffer that `read` fills
        kept = [shard.read().clone() for shard in self.shards]
        try:
            for fragment_weights in weights:
                shard = self.shards[fragment_weights.fragment]
                payload = from_bytes(fragment_weights.payload).to(shard.anchor.device)
                shard.write(plain.decode(payload, shard.anchor.numel()))
            yield
        finally:
            for shard, values in zip(self.shards, kept, strict=True):
                shard.write(values)

    @torch.no_grad()
    def on_weights(self, weights: FragmentWeights, start: bool = False) -> None:
        """Adopt the server's weights θ̃ in the masters θ, in place. start: they answer a join and are taken as they
        are.

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
            shard.write(shard.read().lerp_(theirs, 1 - self.overlap.mix))
        else:
            shard.write(shard.read().sub_(shard.anchor).add_(theirs))
        shard.anchor.copy_(theirs)  # a copy: `theirs` may be the downlink's mirror
        shard.version = weights.version
