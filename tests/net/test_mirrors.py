"""Mirrors of what a member holds outlive kills of both servers: the next weights go as changes, as ever."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from geotrain.common.names import GLOBAL
from geotrain.config import codec_config
from geotrain.net.storage.disk_mirror_store import DiskMirrorStore, on_disk
from geotrain.net.storage.frozen_state import FrozenState
from geotrain.net.storage.recovery import begin_snapshot, finish_snapshot, recover
from geotrain.net.storage.snapshots import SnapshotStore
from geotrain.outer.downlink import FINGERPRINT_BYTES, fingerprint
from geotrain.outer.events import SentWhole
from geotrain.outer.messages import Answer, AnswerWanted, ChunkWeights
from geotrain.outer.mirror_store import MirrorStore
from geotrain.outer.shards.shard import MIRRORS
from tests.support.net_worlds import Cluster, clusters, outer
from tests.support.net_worlds import whole as in_one_part
from tests.support.outer_world import config, make, random_deltas, weights_of

INT4 = codec_config("int4")
LINKS = {"up": INT4, "down": INT4}


class Twin:
    """A world of which the global server and region eu are told everything through journals on disk. `kill` drops
    one of them without a word, and recovers it from its folder."""

    def __init__(self, folder: Path, rule: str = "halos", on_disk: bool = False) -> None:
        folder.mkdir(exist_ok=True)
        self.mirror_store = DiskMirrorStore(folder, pytest.fail) if on_disk else MirrorStore()
        every = {} if rule == "sync" else {"updates_per_send": 1}
        self.world = make(config(rule, **LINKS, **every), fragments=1)
        self.folder, self.lives, self.seed = folder, 1, 0
        self.told: list[ChunkWeights] = []  # all weights that reached region eu
        self.recovered: dict[str, Any] = {}
        self.events: list[Any] = []
        for name in (GLOBAL, "eu"):
            self._recover(name)
        for region in self.world.regions.values():
            self._connect(region)
        self.events.clear()

    @property
    def servers(self) -> dict[str, Any]:
        return {name: recovered.server for name, recovered in self.recovered.items()}

    def _build(self, name: str) -> Any:
        world, old = self.world, self.world.top if name == GLOBAL else self.world.regions[name]
        if name == GLOBAL:
            names = {r: tuple(region.members) for r, region in world.regions.items()}
            new = type(old)(world.identity, world.parameter_map, world.config, names, 1 << 20, 1)
        else:
            new = type(old)(name, world.identity, world.parameter_map, world.config, old.rule, tuple(old.members))
        return new

    def _begin(self, name: str, server: Any) -> None:
        if name == GLOBAL:
            server.set_weights([x.clone() for x in weights_of(self.world.top)])

    def _recover(self, name: str) -> list[str]:
        self.recovered[name] = recovered = recover(
            lambda: self._build(name),
            lambda server: self._begin(name, server),
            self.folder / name,
            2,
            None,
            self.mirror_store,
        )
        server, journal, real = recovered.server, recovered.journal, type(recovered.server).handle

        def journaled(message: Any) -> Any:
            journal.append(message)
            journal.flush()
            if isinstance(message, Answer):
                self.told += message.weights
            handled = real(server, message)
            self.events += handled.events
            return handled

        server.handle = journaled
        server.incarnation = f"life-{self.lives}"
        if name == GLOBAL:
            self.world.top = server
        else:
            self.world.regions[name] = server
        return recovered.faults

    def _connect(self, region: Any) -> None:
        """As the region's client does it."""
        region.handle(self.world.top.handle(region.join_message()).reply)
        if not region.fragments:
            assert self.world.answer(region.name, 0, tuple(range(len(region.parameter_map.fragments))))
        self.world.up[region.name].clear()
        self.world.up[region.name].extend(send.message for send in region.resend())
        for worker in (w for r, w in self.world.workers.values() if r == region.name):
            for join in worker.joins(self.world.identity):
                worker.sequence = self.world.tell(region.name, join).sequence - 1

    def kill(self, name: str) -> list[str]:
        self.recovered[name].journal.close()
        self.lives += 1
        faults = self._recover(name)
        for region in self.world.regions.values():
            if name in (GLOBAL, region.name):
                self._connect(region)
        return faults

    def snapshot(self, name: str) -> None:
        r = self.recovered[name]
        finish_snapshot(r.store, r.journal, *begin_snapshot(r.server, r.store, r.journal, ended=False))

    def push(self) -> None:
        self.seed += 1
        for worker in ("a", "b"):
            self.world.push(worker, random_deltas(self.world, 10 * self.seed + ord(worker)))

    def step(self, between: Callable[[], None] = lambda: None) -> None:
        """Each worker sends an update; its region exchanges with the global server. between: what happens when the
        global server has taken the updates and no answer has left."""
        self.push()
        regions = self.world.regions
        for name in regions:
            while self.world.up[name]:
                self.world.deliver(name)
        between()
        for name in regions:
            self.world.settle(name)
        for name in regions:  # a synchronous round is answered once both have sent
            self.world.settle(name)

    def close(self) -> None:
        for recovered in self.recovered.values():
            recovered.journal.close()


@pytest.mark.parametrize("mirrors", ["memory", "disk"])
@pytest.mark.parametrize("rule", ["halos", "sync"])
def test_kills_change_no_bit_of_what_is_sent(tmp_path, rule, mirrors):
    """Kills of both servers between any two messages that matter, with snapshots before and after."""
    calm, shaken = Twin(tmp_path / "calm", rule), Twin(tmp_path / "shaken", rule, on_disk=mirrors == "disk")
    first = len(calm.told)
    for turn in range(8):
        calm.step()
        if turn == 1:
            shaken.snapshot(GLOBAL)  # nobody has an answer outstanding
        if turn in (2, 5):
            shaken.kill(GLOBAL)
        if turn == 3:
            shaken.kill("eu")

        def between(turn: int = turn) -> None:
            if turn in (3, 6):  # answers are frozen and have not left
                shaken.snapshot(GLOBAL)
            if turn in (1, 4, 6, 7):
                shaken.kill(GLOBAL)
            if turn in (2, 5, 6):
                shaken.snapshot("eu")
                shaken.kill("eu")

        shaken.step(between)
        assert shaken.told == calm.told, turn
    assert len(calm.told) > first and all(weights.increment for weights in calm.told[first:])
    assert all(map(torch.equal, weights_of(shaken.world.top), weights_of(calm.world.top)))
    assert not [event for event in shaken.events if isinstance(event, SentWhole)]
    where = [on_disk(x) for s in shaken.servers.values() for n, x in s.state()[0].items() if n.startswith(MIRRORS)]
    assert where and all(each == (mirrors == "disk") for each in where)
    assert sorted(path.name for path in shaken.folder.iterdir()) == ["eu", "global"]  # nothing has a name
    calm.close()
    shaken.close()


@pytest.mark.parametrize("damage", ["flipped", "missing"])
@pytest.mark.parametrize("pattern", ["held.eu.1", "answer.eu.*.1"])
def test_a_damaged_mirror_is_named_and_the_next_weights_go_whole(tmp_path, pattern, damage):
    twin = Twin(tmp_path)
    twin.step()
    twin.step(lambda: twin.snapshot(GLOBAL))
    [file] = sorted((tmp_path / GLOBAL / "snapshots").glob(f"*/{pattern}.safetensors"))
    if damage == "missing":
        file.unlink()
    else:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    faults = twin.kill(GLOBAL)
    assert len(faults) == 1 and file.name in faults[0] and "go whole" in faults[0]
    assert [event for event in twin.events if isinstance(event, SentWhole)] == [SentWhole("eu")]
    twin.told.clear()
    twin.step()
    assert twin.told and not any(w.increment for w in twin.told)
    sent = twin.world.top.state()[0]
    assert all(torch.equal(sent[f"held.{r}.{i}"], x) for r, region in twin.world.regions.items()
               for i, x in received(region).items())  # fmt: skip
    twin.told.clear()
    twin.step()
    assert all(w.increment for w in twin.told)
    twin.close()


META = {"segment": 1, "ended": False, "checkpoint_id": "", "launch": ""}


def received(region: Any) -> dict[int, Any]:
    """The region's own mirrors, by chunk."""
    return {
        int(name.removeprefix("mirror.")): x for name, x in region.state()[0].items() if name.startswith("mirror.")
    }


def test_an_older_state_of_either_end_is_noticed(tmp_path):
    """A disk that was lost and came back from a copy: the two mirrors differ, so the weights go whole, once."""
    for name in (GLOBAL, "eu"):
        twin = Twin(tmp_path / name)
        twin.step()
        tensors, state = twin.servers[name].state()
        old = FrozenState({key: tensor.clone() for key, tensor in tensors.items()}), {"state": state}
        twin.step()
        twin.step()
        twin.recovered[name].journal.close()
        folder = tmp_path / name / name
        folder.rename(tmp_path / name / "lost")
        SnapshotStore(folder / "snapshots").save(old[0], {**old[1], **META})
        (folder / "journal").mkdir()
        twin.told.clear()
        twin.kill(name)
        assert SentWhole("eu") in twin.events
        twin.step()
        region, sent = twin.world.regions["eu"], twin.world.top.state()[0]
        assert not twin.told[0].increment
        assert all(torch.equal(x, sent[f"held.eu.{i}"]) for i, x in received(region).items())
        twin.close()


def test_an_answer_is_frozen_once_however_often_it_is_wanted(tmp_path):
    twin = Twin(tmp_path)
    twin.push()
    while twin.world.up["eu"]:
        message = twin.world.deliver("eu")
    fragments = twin.world.parameter_map.fragments_of([delta.chunk for delta in message.deltas])
    top, asked = twin.world.top, ("eu", "life-1", 0, message.sequence, fragments)
    assert not top.lacks_answer(*asked)
    before = top.answer(*asked)
    fingerprints = top.shards.fingerprints_of("eu")
    top.handle(AnswerWanted("eu", "life-1", message.sequence, fragments))
    assert top.answer(*asked) == before and top.shards.fingerprints_of("eu") == fingerprints
    twin.close()


def test_a_mark_tells_histories_apart():
    weights = ChunkWeights(0, 7, bytes(range(256)) * 40, increment=True)
    changed = bytearray(weights.payload)
    changed[77] ^= 1
    others = [
        fingerprint(weights, 2),
        fingerprint(dataclasses.replace(weights, version=8), 1),
        fingerprint(dataclasses.replace(weights, payload=bytes(changed)), 1),
    ]
    assert len({fingerprint(weights, 1), *others}) == 4 and fingerprint(weights, 1) == fingerprint(weights, 1)
    large = bytes(10 * FINGERPRINT_BYTES)
    assert fingerprint(ChunkWeights(0, 1, large), 0) != fingerprint(ChunkWeights(0, 1, b"\1" * len(large)), 0)
    assert 0 < fingerprint(ChunkWeights(0, 1 << 40, b""), 0) < 1 << 63


@pytest.fixture
def make_cluster(tmp_path) -> Iterator[Callable[..., Cluster]]:
    with clusters(tmp_path) as maker:
        yield maker


@pytest.mark.parametrize("killed", ["eu", GLOBAL])
def test_over_sockets_no_weights_go_whole_after_a_kill(make_cluster, killed):
    """On both links: from the global server to the region, and from the region's server to its worker."""
    cluster = make_cluster(outer("halos", updates_per_send=1, down=INT4, local=INT4), {"eu": {"a": in_one_part}})
    worker = cluster.worker("a")
    fragments = len(cluster.parameter_map.fragments)
    worker.clients[0].mirrors = lambda: worker.receivers[0].fingerprints_of(fragments)
    told: list[tuple[int, bool]] = []
    receivers = [worker.receivers[0]]

    def listen() -> None:
        receivers[1:] = [cluster.regions["eu"].server.shards.all[0].downlink]
        for number, receiver in enumerate(receivers):
            real = type(receiver).decode

            def decode(weights: ChunkWeights, *more: Any, number: int = number, r: Any = receiver, real=real) -> Any:
                told.append((number, weights.increment))
                return real(r, weights, *more)

            receiver.decode = decode

    worker.join()
    worker.train(worker.lease())
    (cluster.restart_top if killed == GLOBAL else lambda: cluster.restart("eu"))()
    listen()
    for _ in range(2):
        worker.train(worker.lease())
    assert {number for number, _ in told} == {0, 1} and all(increment for _, increment in told), told
    worker.close()
