"""`examples/mini.py` against the product: what its servers handle, the product's handle with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from examples import mini
from geotrain.common.names import GLOBAL
from geotrain.config import codec_config
from geotrain.outer.messages import (
    ChunkDelta,
    Lease,
    LeaseRequest,
    Leave,
    Release,
    UpdatePart,
)
from geotrain.parameters.parameter_map import Parameter, ParameterMap
from geotrain.staging.interface import to_bytes
from tests.support.outer_configs import outer_config
from tests.support.outer_world import FakeWorker, World, whole

PATH = Path(mini.__file__)
REGIONS = {"eu": ("eu-0", "eu-1"), "us": ("us-0", "us-1")}
WHERE = {worker: region for region, workers in REGIONS.items() for worker in workers}
SAMPLES = 96 * 40


class Run(mini.Run):
    """Its run, shorter, over links that are hardly slow."""

    batch, slow = 8, (0.005, 1e8)


class Product:
    """The product's servers, whose messages wait until the journal says that their counterparts were handled."""

    def __init__(self, start: list[torch.Tensor]) -> None:
        shapes = [matrix.shape for matrix in mini.Model().matrices]
        layers = [Parameter(f"layer.{i}", tuple(shape), i, "normal") for i, shape in enumerate(shapes)]
        self.map = ParameterMap(layers, 1)
        int4 = codec_config("int4")
        # The gain of a momentum over few updates is lessened (`momentum_gain`): 1 becomes the 0.5 of mini.py.
        config = outer_config(up=int4, down=int4, updates_per_send=2, merge_alpha=0.5, gain=1.0)
        fakes = {r: [FakeWorker(name, self.map, whole(self.map)) for name in names] for r, names in REGIONS.items()}
        self.world = World(config, fakes, start, self.map, SAMPLES, Run.batch, momentum_decay=0.9)
        self.world.top.lease_table.local_steps = Run.local_steps
        self.jobs = dict.fromkeys(WHERE, 0)

    def handle(self, name: str, sender: str, message: Any) -> None:
        match message:
            case mini.Update(fragment, sequence, delta, contains) if name != GLOBAL:
                deltas, job = (ChunkDelta(fragment, 0, to_bytes(delta.view(torch.uint8))),), self.jobs[sender]
                update = sender, "life-1", fragment, sequence, 0, deltas, job, 1, contains
                self.world.tell(name, UpdatePart(*update))
            case mini.Update(fragment, sequence, payload, contains):
                sent = self.world.up[sender][0]
                assert isinstance(sent, UpdatePart)
                assert (sent.fragment, sent.sequence, sent.contains) == (fragment, sequence, contains)
                assert [(d.chunk, bytes(d.payload)) for d in sent.deltas] == [(fragment, payload)]
                self.world.deliver(sender)
            case mini.Answer(fragment, sequence, weights):
                answer = self.world.top.answer(name, "life-1", 0, fragment, sequence)
                assert answer is not None and [bytes(w.payload) for w in answer.weights] == [weights]
                self.world.tell(name, answer)
            case ("lease", worker) if name != GLOBAL:
                self.jobs[worker] += 1
                self.world.tell(name, LeaseRequest(worker, self.jobs[worker]))
            case ("lease", worker):
                sent = self.world.up[sender][0]
                assert isinstance(sent, LeaseRequest) and sent.worker == worker
                self.world.deliver(sender)  # and its reply back to the region
            case ("release", leases) if leases:
                sent = self.world.up[sender][0]
                assert isinstance(sent, Release) and sent.leases == leases
                self.world.deliver(sender)
            case ("leave",):
                self.world.tell(name, Leave(sender))
            case mini.Lease(number, worker, start, samples):
                told = self.world.down[worker]
                assert isinstance(told, Lease) and (told.lease, told.start, told.samples) == (number, start, samples)

    def weights(self, name: str, fragment: int) -> torch.Tensor:
        server = self.world.top if name == GLOBAL else self.world.regions[name]
        return server.weights(fragment)


def test_it_learns_and_its_servers_are_the_products() -> None:
    """Though a worker dies. Threads decide who comes when: in that order the product has the same bits after each
    message."""
    run = Run(REGIONS, SAMPLES, dies_at_step=30)
    before = run.loss()
    run.train()
    assert run.loss() < 0.75 * before
    product = Product(run.start)
    again = Run(REGIONS, SAMPLES)  # its servers, not its threads
    merges = 0
    for name, sender, message, sends in list(run.journal):
        server = again.servers[name]
        assert str(server.handle(sender, message)) == str(sends)
        if message == ("join",) or getattr(message, "sequence", 1) == 0:
            continue  # the product's have joined
        product.handle(name, sender, message)
        for fragment in {getattr(message, "fragment", 0)}:
            mine = server.x[fragment] if name == GLOBAL else server.fragments[fragment].x
            assert torch.equal(mine.view(torch.int32), product.weights(name, fragment).view(torch.int32))
        merges += isinstance(message, mini.Answer)
    assert merges > 40 and product.world.top.lease_table.committed_samples == run.ledger.committed == SAMPLES


def test_it_is_read_in_a_sitting() -> None:
    assert len(PATH.read_text().splitlines()) <= 500
