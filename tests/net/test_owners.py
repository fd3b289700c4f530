"""A state goes to its own run and process alone: what belongs to another is refused and left as it is."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from zlib import crc32

import pytest
import torch

from geotrain.common.names import GLOBAL
from geotrain.net.server.server_setup import ServerSetup
from geotrain.net.storage.frozen_state import FrozenState
from geotrain.net.storage.owner import ORIGIN, OtherOwnerError, Owner, check_origin, note_origin
from geotrain.net.storage.remote_snapshots import Copies, RemoteSnapshots, newest_snapshot
from geotrain.net.storage.snapshots import META, DamagedSnapshot, SnapshotStore, StoreError
from tests.support.net_worlds import wait_for
from tests.support.server_processes import Site

OWN = Owner("tiny", "eu", "a")


def tree(folder: Path, *but: str) -> dict[str, str]:
    """Each file below the folder, with its digest. but: without these."""
    files = {p for p in folder.rglob("*") if p.is_file() and p.name not in but}
    return {str(p.relative_to(folder)): sha256(p.read_bytes()).hexdigest() for p in sorted(files)}


def store(folder: Path, last: int, owner: Owner = OWN) -> SnapshotStore:
    found = SnapshotStore(folder, keep=last)
    for number in range(1, last + 1):
        meta = {"segment": 1, "ended": False, "checkpoint_id": f"{number:08d}-a", "owner": owner.plain()}
        found.save(FrozenState({"x": torch.full((2,), float(number))}), meta)
    return found


def copied(folder: Path, store: SnapshotStore) -> Copies:
    copies = Copies(RemoteSnapshots(f"file://{folder}"), keep=9)
    for number, checkpoint_id in store.checkpoint_ids().items():
        copies.upload(store.path(number), checkpoint_id)
    return copies


def no_writing(*_: object, **__: object) -> None:
    raise PermissionError(errno.EACCES, "this store may only be read")


@pytest.fixture
def two_runs(tmp_path: Path) -> Iterator[tuple[Site, Site]]:
    """Two runs of one name that have begun and are at rest, the second with copies of its state."""
    sites = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        far = f"file://{tmp_path}/far" if name == "two" else None
        sites.append(Site(tmp_path / name, "halos", 24, shards=1, snapshots=far))
        for each in sites[-1].processes:
            sites[-1].serve(each)
        worker = sites[-1].worker("b")
        worker.join()
        if far:
            for server in (GLOBAL, "eu"):
                setup = ServerSetup(sites[-1].run, sites[-1].cluster, server, tmp_path)
                wait_for(lambda s=setup: s.copies().own.whole())
        worker.close()
        sites[-1].kill()
    yield sites[0], sites[1]
    for site in sites:
        site.kill()


def test_a_process_takes_no_state_of_another_run_or_process(two_runs: tuple[Site, Site]) -> None:
    one, two = two_runs
    origin = (two.folder / ORIGIN).read_text()
    cases = [
        ("global.shard-0", one, "global.shard-0", (GLOBAL,), "shard 0 of 'global': its state is of another run"),
        ("eu", one, "eu", (GLOBAL, "global.shard-0", "eu.shard-0"), "eu: its state is of another run of the name"),
        ("eu", one, "eu", ("eu.shard-0",), "eu: holds the state of another run than "),  # no global server answers
        ("eu", two, GLOBAL, (), "holds the state of 'global' of run 'tiny', and this is 'eu' of 'tiny'"),
    ]
    logs = ("events.jsonl", "listening.json", "status.json", "traffic.json")
    for process, whose, folder, others, words in cases:
        place, aside = two.folder / process, two.folder / "aside"
        place.rename(aside)
        shutil.copytree(whose.folder / folder, place)
        if whose is one and process == "eu":  # a server and its shards are of one run
            shutil.rmtree(two.folder / "eu.shard-0")
            shutil.copytree(one.folder / "eu.shard-0", two.folder / "eu.shard-0")
            (two.folder / ORIGIN).write_text(origin)
        but = logs if others else ()
        before = tree(place, *but)
        if GLOBAL in others:
            (two.folder / ORIGIN).unlink()
        servers = [two.serve(each, resume=True) for each in others]
        if GLOBAL in others:  # it stands on another machine
            wait_for((two.folder / ORIGIN).exists)
            (two.folder / ORIGIN).unlink()
        servers.append(two.serve(process, resume=True))
        code, said = servers[-1].ended()
        assert code not in (0, None) and words in said, said
        after = tree(place, *but)
        if GLOBAL in others:  # it notes its restart before it is told
            after = {name: after[name] for name in before if not name.startswith("journal")}
            before = {name: digest for name, digest in before.items() if not name.startswith("journal")}
        assert after == before
        two.kill()
        shutil.rmtree(place)
        aside.rename(place)


def test_a_copied_folder_takes_no_snapshot_of_its_twin(tmp_path: Path) -> None:
    """The copy is older than what its twin has written to the store since."""
    copies = copied(tmp_path / "far", store(tmp_path / "twin", 4))
    here = store(tmp_path / "here", 2)
    before = tree(tmp_path)
    with pytest.raises(OtherOwnerError, match=r"holds 00000004-a, newer than .*here, 2: .*move the folder away"):
        newest_snapshot(here, copies.own)
    with pytest.raises(StoreError, match="holds 00000004-a, which another process wrote beside this one"):
        copies.check_place(here.path(2), "00000002-a")
    assert tree(tmp_path) == before
    for number in (3, 4):  # what the disk had, and cannot read any more, comes from the store
        shutil.copytree(tmp_path / f"twin/{number:08d}", tmp_path / f"here/{number:08d}")
        (tmp_path / f"here/{number:08d}" / META).write_text("damaged")
    snapshot, _ = newest_snapshot(here, copies.own)
    assert snapshot is not None and snapshot.number == 4


@pytest.mark.parametrize("name", ["../../escaped", "/{}/escaped", "a/b", "a\0"], ids=repr)
def test_names_in_a_store_stay_inside_its_folder(tmp_path: Path, name: str) -> None:
    """Whoever may write to a store can make a checksum, too."""
    copies = copied(tmp_path / "far", store(tmp_path / "there", 2))
    meta = tmp_path / "far/00000002-a" / META
    saved = json.loads(meta.read_bytes().partition(b"\n")[2])
    saved["files"] = {name.format(tmp_path): saved["files"].pop("x")}
    body = json.dumps(saved).encode()
    meta.write_bytes(b"%08x\n" % crc32(body) + body)
    with pytest.raises(DamagedSnapshot, match="names a file outside its folder: "):
        copies.own.fetch("00000002-a", tmp_path / "back")
    snapshot, faults = newest_snapshot(SnapshotStore(tmp_path / "here"), copies.own)
    assert snapshot is not None and snapshot.tensors["x"][0] == 1 and "00000002-a: passed over" in faults[0]
    assert not list(tmp_path.rglob("escaped*"))


def test_a_store_that_may_only_be_read_passes_over_a_damaged_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = copied(tmp_path / "far", store(tmp_path / "there", 2))
    (tmp_path / "far/00000002-a/x.safetensors").write_bytes(b"damaged")
    before = tree(tmp_path / "far")
    for name in ("pipe_file", "put_file", "rm_file", "rm", "makedirs"):
        monkeypatch.setattr(copies.own._files, name, no_writing)
    snapshot, faults = newest_snapshot(SnapshotStore(tmp_path / "here"), copies.own)
    assert snapshot is not None and snapshot.tensors["x"][0] == 1
    assert [fault for fault in faults if "cannot be written: PermissionError" in fault]
    assert tree(tmp_path / "far") == before


def with_owner(meta: Path, owner: Owner) -> None:
    saved = json.loads(meta.read_bytes().partition(b"\n")[2])
    saved["meta"]["owner"] = owner.plain()
    body = json.dumps(saved).encode()
    meta.write_bytes(b"%08x\n" % crc32(body) + body)


def test_a_newer_state_of_another_run_is_not_passed_over_for_an_older_one(tmp_path: Path) -> None:
    """On the disk, and in a store for a disk that was lost: it is damaged, but says whose it is."""
    here, theirs = store(tmp_path / "here", 2), replace(OWN, origin="b")
    copies = copied(tmp_path / "far", here)
    for folder in (here.path(2), tmp_path / "far/00000002-a"):
        with_owner(folder / META, theirs)
        (folder / "x.safetensors").write_bytes(b"damaged")
    before = tree(tmp_path)
    with pytest.raises(OtherOwnerError, match=r"here: holds the state of another run of the name 'tiny'"):
        newest_snapshot(here, None)
    with_owner(tmp_path / "far/00000002-a" / META, replace(OWN, run="large"))
    before = tree(tmp_path)
    with pytest.raises(OtherOwnerError, match=r"far/00000002-a: holds the state of 'eu' of run 'large'"):
        newest_snapshot(SnapshotStore(tmp_path / "lost"), copies.own, replace(OWN, origin=""))
    assert tree(tmp_path) == before


def test_a_copy_that_cannot_be_asked_for_is_not_taken_for_one_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = store(tmp_path / "here", 1)
    copies, before = copied(tmp_path / "far", here), tree(tmp_path)
    monkeypatch.setattr(copies.own._files, "exists", lambda path: False)  # as fsspec answers for any error
    monkeypatch.setattr(copies.own._files, "put_file", no_writing)
    assert copies.own.whole() == ["00000001-a"]
    copies.upload(here.path(1), "00000001-a")
    assert tree(tmp_path) == before


def test_a_damaged_note_of_the_origin_says_nothing(tmp_path: Path) -> None:
    note_origin(tmp_path, "a")
    check_origin(tmp_path / "eu", "a")
    with pytest.raises(OtherOwnerError, match="holds the state of another run than"):
        check_origin(tmp_path / "eu", "b")
    for damage in (b"", (tmp_path / ORIGIN).read_bytes().replace(b"a", b"b")):
        (tmp_path / ORIGIN).write_bytes(damage)
        check_origin(tmp_path / "eu", "a")


@pytest.mark.parametrize("change", [{"origin": "b"}, {"process": "us"}, {"run": "large"}], ids=str)
def test_copies_of_another_state_are_not_pushed_out(tmp_path: Path, change: dict[str, str]) -> None:
    copies = copied(tmp_path / "far", store(tmp_path / "theirs", 1, replace(OWN, **change)))
    here, before = store(tmp_path / "here", 2), tree(tmp_path / "far")
    with pytest.raises(OtherOwnerError, match=r"far: holds the state of .*Nothing was changed"):
        copies.check_place(here.path(2), "00000002-a")
    assert tree(tmp_path / "far") == before
