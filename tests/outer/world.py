"""Region servers and a global server joined by hand: tests decide when a message is delivered."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from geotrain.canonical import Parameter
from geotrain.config import CodecConfig, OuterConfig
from geotrain.outer.codec import make_codec
from geotrain.outer.downlink import from_bytes, to_bytes
from geotrain.outer.global_server import GlobalServer
from geotrain.outer.layout import Layout, Slice, gather, numel, scatter
from geotrain.outer.messages import (
    GLOBAL,
    FragmentDelta,
    Join,
    Lease,
    LeaseRequest,
    Leave,
    Release,
    Send,
    UpdatePart,
)
from geotrain.outer.region_server import RegionServer
from geotrain.outer.server import Identity

PLAIN = CodecConfig(name="fp32")


def layout(layers_per_fragment: int | None = None) -> Layout:
    """Two layers of a toy model: 4 parameters, 64 elements."""
    return Layout(
        [
            Parameter("embed", (6, 4), None, "normal"),
            Parameter("layer.0", (4, 4), 0, "normal"),
            Parameter("layer.1", (4, 4), 1, "normal"),
            Parameter("norm", (8,), None, "ones"),
        ],
        layers_per_fragment,
    )


class FakeWorker:
    """A worker of several parts, each with its slices of each fragment; here a plain function makes deltas."""

    def __init__(self, name: str, layout: Layout, slicings: list[list[tuple[Slice, ...]]]) -> None:
        self.name, self.layout, self.slicings = name, layout, slicings
        self.sequence = 0
        self.job = 0

    def joins(self, identity: Identity, incarnation: str = "life-1") -> list[Join]:
        i = identity
        return [
            Join(i.run, i.config_digest, i.layout_digest, i.model, self.name, incarnation, part, len(self.slicings),
                 tuple(pushes), tuple(pushes))
            for part, pushes in enumerate(self.slicings)
        ]  # fmt: skip

    def parts(self, deltas: dict[int, Tensor], leases: tuple[int, ...] = (), incarnation: str = "life-1",
              version: int = 0, codec: CodecConfig = PLAIN) -> list[UpdatePart]:  # fmt: skip
        self.sequence += 1
        self.job += 1
        coder = make_codec(codec)
        return [
            UpdatePart(
                self.name, incarnation, self.sequence, part,
                tuple(
                    FragmentDelta(f, version, to_bytes(coder.encode(gather(d, pushes[f]).contiguous()).payload))
                    for f, d in deltas.items()
                ),
                job=self.job, leases=leases,
            )
            for part, pushes in enumerate(self.slicings)
        ]  # fmt: skip


class World:
    def __init__(self, config: OuterConfig, regions: dict[str, list[FakeWorker]], start: list[Tensor], layout: Layout,
                 train_samples: int = 1 << 20, samples_per_step: int = 1) -> None:  # fmt: skip
        self.layout, self.config = layout, config
        self.identity = Identity("test", "config", layout.digest, "toy")
        names = {r: tuple(w.name for w in workers) for r, workers in regions.items()}
        self.top = GlobalServer(self.identity, layout, config, names, train_samples, samples_per_step)
        self.top.set_weights([v.clone() for v in start])
        self.workers = {w.name: (r, w) for r, workers in regions.items() for w in workers}
        self.regions: dict[str, RegionServer] = {}
        self.up: dict[str, deque[Send]] = {}
        self.leases: dict[str, Lease] = {}
        for r, workers in regions.items():
            region = RegionServer(r, self.identity, layout, config, names[r])
            region.incarnation = "life-1"
            self.regions[r], self.up[r] = region, deque()
            self.top.on_join(region.join_message())
            fragments = tuple(range(len(layout.fragments)))
            answer = self.top.answer(r, region.incarnation, 0, 0, fragments)
            assert answer is not None
            region.on_global_weights(answer)
            for worker in workers:
                for join in worker.joins(self.identity):
                    region.on_join(join)

    def push(self, worker: str, deltas: dict[int, Tensor], leases: tuple[int, ...] = ()) -> dict[int, Tensor] | None:
        """A whole update of one worker; the weights it is answered with, if any yet."""
        r, w = self.workers[worker]
        region = self.regions[r]
        for part in w.parts(deltas, leases):
            region.on_part(part)
        self._collect(r)
        return self.weights(worker, w.sequence, tuple(deltas))

    def weights(self, worker: str, sequence: int, fragments: tuple[int, ...]) -> dict[int, Tensor] | None:
        r, w = self.workers[worker]
        result = {f: torch.full((self.layout.fragments[f].numel,), torch.nan) for f in fragments}
        for part, slices in enumerate(w.slicings):
            answer = self.regions[r].answer(worker, "life-1", part, sequence, fragments)
            if answer is None:
                return None
            for item in answer.weights:
                f = item.fragment
                values = make_codec(self.config.local).decode(from_bytes(item.payload), numel(slices[f]))
                scatter(values, slices[f], result[f])
        return result

    def deliver_up(self, region: str) -> UpdatePart | None:
        """The region's next update reaches the global server."""
        while self.up[region]:
            message = self.up[region].popleft().message
            if isinstance(message, UpdatePart):
                self.top.on_part(message)
                return message
            if isinstance(message, Leave):
                self.top.on_leave(message.member)
            elif isinstance(message, Release):
                self.top.on_release(message)
        return None

    def deliver_down(self, region: str, update: UpdatePart) -> bool:
        """The answer to that update reaches the region, if there is one."""
        r = self.regions[region]
        fragments = tuple(d.fragment for d in update.deltas)
        answer = self.top.answer(region, r.incarnation, 0, update.sequence, fragments)
        if answer is None:
            return False
        r.on_global_weights(answer)
        self._collect(region)
        return True

    def lease(self, worker: str) -> Lease | None:
        """The worker's next lease, the request travelling to the global server and back."""
        r, w = self.workers[worker]
        granted = self.top.on_lease_request(LeaseRequest(worker, w.job + 1))
        assert granted is not None, "the run is paused"
        self.regions[r].on_lease(granted)
        return granted if isinstance(granted, Lease) else None

    def _collect(self, region: str) -> None:
        self.up[region].extend(s for s in self.regions[region].outgoing() if s.to == GLOBAL)


def whole(layout: Layout) -> list[list[tuple[Slice, ...]]]:
    return [[layout.whole(f.index) for f in layout.fragments]]


def halves(layout: Layout) -> list[list[tuple[Slice, ...]]]:
    """Two parts: the front and the back of each fragment."""
    split = [f.numel // 3 for f in layout.fragments]
    return [
        [(Slice(0, s),) for s in split],
        [(Slice(s, f.numel - s),) for s, f in zip(split, layout.fragments, strict=True)],
    ]


def columns(layout: Layout) -> list[list[tuple[Slice, ...]]]:
    """Two parts: even and odd pairs of columns, as row-parallel matrices are cut."""
    return [[(Slice(2 * part, 2, 4, f.numel // 4),) for f in layout.fragments] for part in range(2)]
