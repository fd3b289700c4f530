"""Mirrors of what a member holds outlive kills of both servers: the next weights go as changes, as ever."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from geotrain.common.names import GLOBAL
from geotrain.config import codec_config
from geotrain.net.storage.disk_mirror_store import DiskMirrorStore, on_disk
from geotrain.net.storage.frozen_state import FrozenState
from geotrain.net.storage.snapshots import SnapshotStore
from geotrain.outer.downlink import FINGERPRINT_BYTES, fingerprint
from geotrain.outer.events import SentWhole
from geotrain.outer.messages import Answer, AnswerWanted, ChunkWeights, Refused
from geotrain.outer.mirror_store import MirrorStore
from geotrain.outer.server.server import Handled
from geotrain.outer.shards.shard import MIRRORS
from tests.support.net_worlds import outer
from tests.support.net_worlds import whole as in_one_part
from tests.support.outer_world import config, make, random_deltas, weights_of
from tests.support.recorded_world import JournaledWorld

INT4 = codec_config("int4")
LINKS = {"up": INT4, "down": INT4}


class Twin:
    """A world of which the global server and region eu are told everything through journals on disk."""

    def __init__(self, folder: Path, rule: str = "halos", on_disk: bool = False) -> None:
        folder.mkdir(exist_ok=True)
        store = DiskMirrorStore(folder, pytest.fail) if on_disk else MirrorStore()
        every = {} if rule == "sync" else {"updates_per_send": 1}
        journaled = {"journaled": (GLOBAL, "eu"), "mirror_store": store, "watch": self.watch}
        self.told: list[ChunkWeights] = []  # all weights that reached region eu
        self.events: list[Any] = []
        kind = partial(JournaledWorld, folder, **journaled)
        self.world = make(config(rule, **LINKS, **every), fragments=1, kind=kind)
        self.folder, self.seed, self.close, self.snapshot = folder, 0, self.world.close, self.world.snapshot

    def watch(self, name: str, message: Any, outcome: Handled | Refused | None) -> None:
        if isinstance(message, Answer) and outcome is None:
            self.told += message.weights
        self.events += outcome.events if isinstance(outcome, Handled) else ()

    def kill(self, name: str, between: Callable[[Path], None] = lambda folder: None) -> list[str]:
        faults = self.world.kill(name, between)
        for region in [name] if name in self.world.regions else self.world.regions:
            self.world.rejoin(region)
        return faults

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
    servers = (recovered.server for recovered in shaken.world.recovered.values())
    where = [on_disk(x) for server in servers for n, x in server.state()[0].items() if n.startswith(MIRRORS)]
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
        tensors, state = twin.world.server(name).state()
        old = FrozenState({key: tensor.clone() for key, tensor in tensors.items()}), {"state": state, **META}
        twin.step()
        twin.step()

        def restored(folder: Path, old: Any = old) -> None:
            shutil.rmtree(folder)
            SnapshotStore(folder / "snapshots").save(*old)
            (folder / "journal").mkdir()

        twin.told.clear()
        twin.kill(name, restored)
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


@pytest.mark.parametrize("killed", ["eu", GLOBAL])
def test_over_sockets_no_weights_go_whole_after_a_kill(make, killed):
    """On both links: from the global server to the region, and from the region's server to its worker."""
    cluster = make(outer("halos", updates_per_send=1, down=INT4, local=INT4), {"eu": {"a": in_one_part}})
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
