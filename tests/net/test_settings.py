"""What a journal holds is handled again as it was handled then, whatever the run and cluster files say by now."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from geotrain.common.names import GLOBAL
from geotrain.config import ClusterConfig, OuterConfig, RunConfig, parse, rule_config
from geotrain.net.server.server_process import any_server, begin_server
from geotrain.net.storage.recovery import begin_snapshot, finish_snapshot, recover
from geotrain.outer.identity import identity_of
from geotrain.outer.messages import Answer, ChunkWeights
from geotrain.outer.rules import Counts, RegionRule, Vectors, region_rule
from geotrain.parameters.parameter_map import parameter_map_of
from geotrain.staging.interface import to_bytes
from tests.support.net_worlds import TINY, outer
from tests.support.outer_world import FakeWorker, whole

# Names of the members, and samples in the run: as it began, with one more, with one less, with more data.
SETTINGS = (("a", "b"), 64), (("a", "b", "c"), 64), (("a", "c"), 64), (("a", "c"), 6400), (("a", "b"), 32)


class Folder:
    """A server's folder, and the members that speak to whoever serves it."""

    def __init__(self, folder: Path, rule: str, server: str) -> None:
        self.folder, self.block, self.server = folder, outer(rule), server
        self.fakes: dict[str, FakeWorker] = {}

    def recovered(self, members: tuple[str, ...], samples: int) -> Any:
        run = {"name": "tiny", "model": {"config": TINY}, "outer": self.block.model_dump(by_alias=True, mode="json")}
        run["data"] = {"train": "none", "sequence_length": 8, "train_samples": samples}
        run["deepspeed"] = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 2}
        workers = {name: [f"{name}-0"] for name in members} if self.server == GLOBAL else {self.server: members}
        regions = [{"name": n, "workers": [{"name": w} for w in ws]} for n, ws in workers.items()]
        cluster = {"name": "here", "global_server": {"host": "127.0.0.1", "port": 1}, "regions": regions}
        self.run = parse(RunConfig, run, "run")
        build = partial(any_server, self.run, parse(ClusterConfig, cluster, "cluster"), self.server, 1)
        return recover(build, partial(begin_server, run=self.run), self.folder, 2)

    def say(self, found: Any, *messages: Any) -> Any:
        found.journal.append(*messages)
        found.journal.flush()
        return [found.server.handle(message).reply for message in messages][-1]

    def trains(self, found: Any, members: tuple[str, ...], life: str) -> None:
        """All members join, and send an update."""
        lay, identity = parameter_map_of(self.run), identity_of(self.run, parameter_map_of(self.run))
        if not found.server.fragments:
            for fragment, chunks in enumerate(lay.chunks_of):
                ones = ((c.index, to_bytes(torch.ones(c.numel).view(torch.uint8))) for c in chunks)
                self.say(found, Answer(fragment, 0, tuple(ChunkWeights(i, 0, payload) for i, payload in ones)))
        for name in members:
            worker = self.fakes.setdefault(name, FakeWorker(name, lay, whole(lay)))
            welcome = self.say(found, *worker.joins(identity, life))
            worker.sequences = [sequence - 1 for sequence in welcome.sequences]
            worker.job = welcome.job - 1
        for name in members:
            worker, noise = self.fakes[name], torch.Generator().manual_seed(sum(map(ord, life + name)))
            deltas = {f.index: torch.randn(f.numel, generator=noise) for f in lay.fragments}
            assert self.say(found, *worker.parts(deltas, incarnation=life)) is True


def weights(found: Any) -> torch.Tensor:
    return torch.cat([found.server.weights(f.index) for f in found.server.parameter_map.fragments])


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize(
    ("rule", "server"),
    [*((rule, GLOBAL) for rule in ("halos", "region_momentum", "sync")), ("halos", "eu"), ("region_momentum", "eu")],
)
def test_other_members_or_samples_change_no_bit_of_what_was_trained(tmp_path, rule, server, saves):
    place = Folder(tmp_path, rule, server)
    before = None
    for number, (members, samples) in enumerate(SETTINGS):
        found = place.recovered(members, samples)
        if before is None:
            finish_snapshot(
                found.store, found.journal, *begin_snapshot(found.server, found.store, found.journal, False)
            )
        else:
            assert torch.equal(weights(found).view(torch.int32), before)
        assert tuple(found.server.members) == members
        place.trains(found, members, f"life-{number}")
        if saves:
            finish_snapshot(
                found.store, found.journal, *begin_snapshot(found.server, found.store, found.journal, False)
            )
        before = weights(found).clone().view(torch.int32)
        found.journal.close()


def test_a_shard_needs_nothing_but_its_commands():
    """Its process may have been started with other files than those by which its coordinator decided."""

    def moved(decides: RegionRule, computes: RegionRule) -> torch.Tensor:
        counts, v, g = Counts(), Vectors(torch.ones(8)), torch.Generator().manual_seed(0)
        decides.start(counts)
        computes.begin(v)
        for _ in range(3):
            computes.apply(v, "a", torch.randn(8, generator=g), decides.on_delta(counts, "a", 1, 2)[0])
        decides.on_send(counts)
        computes.progress(v, {}, lambda values, anchor, moves_anchor: anchor.copy_(values))
        computes.merge(v, torch.randn(8, generator=g), decides.on_global_weights(counts)[0])
        return v.x

    block = OuterConfig(rule=rule_config("region_momentum"))
    short, long = region_rule(block, ("a",), 4.0), region_rule(block, ("a", "b", "c"), 1e4)
    assert torch.equal(moved(short, short), moved(short, long))
    assert not torch.equal(moved(short, short), moved(long, long))
