"""Copies of snapshots at a URL: a local folder, and S3 over HTTP on loopback."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import s3fs
import torch

from geotrain.common.names import GLOBAL
from geotrain.config import CheckpointConfig, ConfigError
from geotrain.monitor.events import SnapshotUploaded, Trouble
from geotrain.net.storage import remote_snapshots as remote_module
from geotrain.net.storage.frozen_state import FrozenState
from geotrain.net.storage.recovery import recover
from geotrain.net.storage.remote_snapshots import Copies, RemoteSnapshots, Uploader, newest_snapshot
from geotrain.net.storage.snapshots import META, SnapshotStore, StoreError
from geotrain.outer.events import Event
from tests.support.breaking_link import BreakingLink
from tests.support.net_worlds import BUSY_S, Loop, same
from tests.support.object_storage import make_bucket, s3_server
from tests.support.outer_world import config, halves, make, random_deltas
from tests.support.recorded_world import JournaledWorld


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        yield environment


@pytest.fixture(params=["file", "s3"])
def url(request, tmp_path, monkeypatch) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/far"
        return
    environment = request.getfixturevalue("s3")
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    yield make_bucket(f"bucket-{abs(hash(tmp_path))}", environment) + "/run/eu"
    s3fs.S3FileSystem.clear_instance_cache()


def tensors(seed: int) -> dict[str, torch.Tensor]:
    return {f"fragment.{i}.x": torch.randn(1000 + i, generator=torch.Generator().manual_seed(seed)) for i in range(3)}


def saved(folder: Path, count: int) -> SnapshotStore:
    store = SnapshotStore(folder, keep=count)
    for number in range(1, count + 1):
        meta = {"segment": number, "ended": False, "checkpoint_id": f"{number:08d}-a"}
        store.save(FrozenState(tensors(number)), meta)
    return store


def test_a_copy_comes_back_where_the_disk_is_lost(tmp_path, url):
    """The newest is fetched whole, older ones are dropped; without its manifest a snapshot is not there."""
    store, mirror = saved(tmp_path / "here", 4), RemoteSnapshots(url)
    assert mirror.checkpoint_ids() == {}
    for number, checkpoint_id in store.checkpoint_ids().items():
        size = Copies(mirror, keep=2).upload(store.path(number), checkpoint_id)
    assert mirror.checkpoint_ids() == {"00000003-a": True, "00000004-a": True} and size > 4 * 3000
    elsewhere = SnapshotStore(tmp_path / "elsewhere")
    snapshot, faults = newest_snapshot(elsewhere, mirror)
    assert snapshot is not None and snapshot.number == 4 and same(snapshot.tensors, tensors(4))
    assert f"it came from {url}" in faults[0]
    assert elsewhere.numbers() == [4] and newest_snapshot(elsewhere, mirror)[1] == []  # now it is here

    mirror._files.rm_file(mirror._path("00000004-a", META))
    assert mirror.whole() == ["00000003-a"]
    mirror._files.pipe_file(mirror._path("00000003-a", "fragment.1.x.safetensors"), b"not what it was")
    nothing, faults = newest_snapshot(SnapshotStore(tmp_path / "third"), mirror)
    assert nothing is None and "00000003-a: passed over: fragment.1.x.safetensors has 15 bytes" in faults[0]
    assert not list((tmp_path / "third").iterdir())
    # what was found damaged is whole no more
    assert mirror.checkpoint_ids() == {"00000003-a": False, "00000004-a": False}
    Copies(mirror, keep=2).upload(store.path(4), "00000004-a")
    assert mirror.checkpoint_ids() == {"00000004-a": True}


def test_what_follows_a_damaged_copy_is_newer_than_all_that_is_there(tmp_path, url):
    """Else it would be the first to go, and the damaged one be tried first."""
    store, mirror = saved(tmp_path / "here", 3), RemoteSnapshots(url)
    for number, checkpoint_id in store.checkpoint_ids().items():
        mirror.upload(store.path(number), checkpoint_id)
    for checkpoint_id in ("00000002-a", "00000003-a"):
        mirror._files.pipe_file(mirror._path(checkpoint_id, "fragment.1.x.safetensors"), b"not what it was")
    elsewhere = SnapshotStore(tmp_path / "elsewhere")
    snapshot, faults = newest_snapshot(elsewhere, mirror)
    assert snapshot is not None and same(snapshot.tensors, tensors(1)) and "00000003-a: passed over" in faults[0]
    elsewhere.save(
        FrozenState(tensors(5)), {"segment": 2, "ended": False, "checkpoint_id": elsewhere.new_checkpoint_id()}
    )
    number, checkpoint_id = max(elsewhere.checkpoint_ids().items())
    Copies(mirror, keep=1).upload(elsewhere.path(number), checkpoint_id)
    assert checkpoint_id > "00000003-a" and mirror.checkpoint_ids() == {checkpoint_id: True}


class Cut(BreakingLink):
    """A link that breaks once, and then stays so until it is mended."""

    mended = False

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.broken and not self.mended:
            writer.transport.abort()
        else:
            await super()._connected(reader, writer)


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_copy_that_breaks_goes_on_where_it_broke(tmp_path, s3, loop, monkeypatch, way):
    """The link breaks in the middle; all that goes over it is the snapshot once, and a tenth of it at most."""
    monkeypatch.setattr(remote_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(remote_module, "PART_BYTES", 1 << 16)
    monkeypatch.setattr(s3fs.core.S3FileSystem, "retries", 1)
    whole_bytes = 24 * 4 * 60_000
    link = Cut(int(s3["AWS_ENDPOINT_URL"].rpartition(":")[2]), way, whole_bytes // 2, times=1)
    port = loop.do(link.start())
    for key, value in {**s3, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_MAX_ATTEMPTS": "1"}.items():
        monkeypatch.setenv(key, value)
    bucket = make_bucket(f"cut-{way}", s3)
    s3fs.S3FileSystem.clear_instance_cache()
    store, mirror = SnapshotStore(tmp_path / "here"), RemoteSnapshots(f"{bucket}/run")
    state = {f"chunk.{i}.x": torch.randn(60_000) for i in range(24)}
    store.save(FrozenState(state), {"checkpoint_id": "00000001-a"})
    folder = tmp_path / "back/00000001"

    def copy() -> None:
        mirror.upload(store.path(1), "00000001-a") if way == "up" else mirror.fetch("00000001-a", folder)

    if way == "down":
        mirror.upload(store.path(1), "00000001-a")
    with pytest.raises(StoreError, match="cannot be"):
        copy()
    assert link.broken == 1
    link.mended = True
    assert mirror.whole() == ([] if way == "up" else ["00000001-a"])
    copy()
    assert whole_bytes < link.moved[way] < 1.1 * whole_bytes
    if way == "up":
        mirror.fetch("00000001-a", folder)
        assert not mirror._files.exists(mirror._path("00000001-a", remote_module.BEGUN))
    assert same(SnapshotStore(tmp_path / "back").load(1).tensors, state)
    s3fs.S3FileSystem.clear_instance_cache()


def test_what_broke_is_not_taken_for_another_content_or_for_damage(tmp_path, url, monkeypatch):
    """Files of the same sizes that an upload of other content has left, and what this machine's disk has lost."""
    mirror, stores = RemoteSnapshots(url), [SnapshotStore(tmp_path / str(seed)) for seed in (1, 2)]
    for seed, store in enumerate(stores):
        store.save(FrozenState(tensors(seed)), {"checkpoint_id": "00000001-a"})
    put, sent = mirror._files.put_file, list[str]()

    def breaks(path: str, to: str) -> None:
        sent.append(Path(path).name)
        if len(sent) == 3:
            raise ConnectionError("cut")
        put(path, to)

    monkeypatch.setattr(mirror._files, "put_file", breaks)
    with pytest.raises(StoreError, match="cut"):
        mirror.upload(stores[0].path(1), "00000001-a")
    mirror.upload(stores[1].path(1), "00000001-a")
    assert len(sent) == 3 + 4  # all of it again
    folder = tmp_path / "back/00000001"
    get, asked = mirror._files.cat_file, list[str]()

    def cut_once(path: str, **part: Any) -> Any:
        asked.append(path)
        if len(asked) == 3:
            raise ConnectionError("cut")
        return get(path, **part)

    monkeypatch.setattr(remote_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(mirror._files, "cat_file", cut_once)
    mirror.fetch("00000001-a", folder)  # it tries again by itself
    assert len(asked) == 1 + 3 + 1
    damaged = folder / "fragment.0.x.safetensors"
    damaged.write_bytes(bytes(damaged.stat().st_size))
    mirror.fetch("00000001-a", folder)
    assert same(SnapshotStore(tmp_path / "back").load(1).tensors, tensors(1)) and len(asked) == 1 + 3 + 1 + 1 + 4


def test_another_content_under_a_number_replaces_it_and_the_same_is_not_sent_again(tmp_path, url, monkeypatch):
    mirror = RemoteSnapshots(url)
    for seed in (1, 2):
        store = SnapshotStore(tmp_path / str(seed))
        store.save(FrozenState(tensors(seed)), {"segment": 1, "ended": False})
        mirror.upload(store.path(1), "00000001-a")
    mirror.fetch("00000001-a", tmp_path / "back/00000001")
    assert same(SnapshotStore(tmp_path / "back").load(1).tensors, tensors(2))
    monkeypatch.setattr(mirror._files, "put_file", lambda *_: pytest.fail("sent again"))
    mirror.upload(store.path(1), "00000001-a")


def test_a_server_goes_on_from_the_copy_of_its_snapshot(tmp_path, url):
    """Its folder is gone, journal and all: the state is that of the snapshot, and new journals follow it."""
    kind, mirror = partial(JournaledWorld, tmp_path, journaled=(GLOBAL,)), RemoteSnapshots(url)
    world = make(config(), cut_a=halves, kind=kind)
    store, want = world.recovered[GLOBAL].store, list[dict[str, torch.Tensor]]()
    for i in range(2):
        for turn in range(8):
            world.push("a", random_deltas(world, 10 * i + turn))
        while sent := world.deliver_up("eu"):
            world.deliver_down("eu", sent)
        world.snapshot(GLOBAL)
        number = store.numbers()[-1]
        mirror.upload(store.path(number), store.checkpoint_ids()[number])
        want.append({name: t.clone() for name, t in world.top.state()[0].items()})
    world.close()
    shutil.rmtree(tmp_path / GLOBAL)
    numbers = []  # of the next leases: those of a life that is lost as well are given to no other
    for folder in (tmp_path / "other", tmp_path / GLOBAL, tmp_path / GLOBAL):  # at last from its own disk
        again = recover(partial(world.build, GLOBAL), world.begin, folder, keep=2, mirror=mirror)
        again.journal.close()
        numbers.append(again.server.state()[1]["leases"]["next_lease"])
        assert same(again.server.state()[0], want[1])
    assert min(numbers) > 1 << 20 and numbers[0] != numbers[1] == numbers[2]
    assert not same(want[0], want[1])


def test_an_unreachable_store_is_told_and_does_not_stop_who_has_a_snapshot(tmp_path, monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{probe.getsockname()[1]}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", nobody)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(s3fs.core.S3FileSystem, "retries", 1)
    mirror = RemoteSnapshots("s3://bucket/run")
    with pytest.raises(StoreError, match=r"checkpoint\.snapshots = s3://bucket/run: cannot be read: .*onnect"):
        newest_snapshot(SnapshotStore(tmp_path / "empty"), mirror)
    snapshot, faults = newest_snapshot(saved(tmp_path / "here", 1), mirror)
    assert snapshot is not None and "cannot be read" in faults[0]
    s3fs.S3FileSystem.clear_instance_cache()


class Flaky:
    """Stands for a store that is away at first."""

    def __init__(self, copies: Copies, failures: int) -> None:
        self.copies, self.failures, self.url, self.uploads = copies, failures, copies.url, list[str]()

    def check_place(self, folder: Path, checkpoint_id: str) -> None: ...

    def upload(self, folder: Path, checkpoint_id: str) -> int:
        if self.failures:
            self.failures -= 1
            raise StoreError(f"{self.url}: away")
        self.uploads.append(checkpoint_id)
        return self.copies.upload(folder, checkpoint_id)


def test_uploads_are_tried_again_and_told(tmp_path, monkeypatch):
    monkeypatch.setattr(remote_module, "FIRST_PAUSE_S", 0.01)
    store, far = (
        SnapshotStore(tmp_path / "here", keep=1),
        Flaky(Copies(RemoteSnapshots(f"file://{tmp_path}/far"), keep=1), failures=3),
    )
    told: list[Event] = []

    async def work() -> None:
        uploader = Uploader(store, far, told.append)  # type: ignore[arg-type]
        task = asyncio.create_task(uploader.run())
        for number in (1, 2):
            store.save(FrozenState(tensors(number)), {"checkpoint_id": f"{number:08d}-a"})
            uploader.wake()
            await asyncio.sleep(0)
            await uploader.finish(BUSY_S)
            assert uploader.status() == {"url": far.url, "uploaded": number, "trouble": None}
        far.failures = 1000
        store.save(FrozenState(tensors(3)), {"checkpoint_id": "00000003-a"})
        uploader.wake()
        while not uploader.status()["trouble"]:
            await asyncio.sleep(0.01)
        with pytest.raises(StoreError, match=r"not copied there within 0\.2 s \(.*away\); it is in"):
            await uploader.finish(0.2)
        task.cancel()

    asyncio.run(asyncio.wait_for(work(), 2 * BUSY_S))
    assert far.uploads == ["00000001-a", "00000002-a"] and far.copies.own.whole() == ["00000002-a"]
    assert [type(event) for event in told] == [Trouble, SnapshotUploaded, SnapshotUploaded, Trouble]


def test_a_snapshot_that_is_being_copied_stays(tmp_path):
    store = SnapshotStore(tmp_path, keep=1)
    store.save(FrozenState(tensors(1)), {})
    with store.kept(1) as folder:
        store.save(FrozenState(tensors(2)), {})
        assert folder.exists()
    store.save(FrozenState(tensors(3)), {})
    assert store.numbers() == [3]


def test_a_url_of_no_known_kind():
    with pytest.raises(ConfigError, match=r"checkpoint\.snapshots = 's4://bucket/x': cannot be used: .*s4"):
        RemoteSnapshots("s4://bucket/x")


def test_a_path_is_no_url():
    with pytest.raises(ValueError, match="is no URL; write s3://bucket/path or file:///path"):
        CheckpointConfig(snapshots="/mnt/snapshots")


def test_every_fault_of_a_file_system_is_one(tmp_path, monkeypatch):
    mirror = RemoteSnapshots(f"file://{tmp_path}")

    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("something of its own")

    monkeypatch.setattr(mirror._files, "put_file", broken)
    with pytest.raises(StoreError, match="the snapshot cannot be copied there: KeyError: 'something of its own'"):
        mirror.upload(saved(tmp_path / "here", 1).path(1), "00000001-a")
