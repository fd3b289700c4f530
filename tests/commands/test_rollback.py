"""A run begun anew from an older snapshot of another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from geotrain.commands.export import export_run
from geotrain.config import ConfigError
from geotrain.launch.rollback import _not_newer, roll_back, snapshots_of
from geotrain.net.storage.snapshots import SnapshotStore, read_weights
from geotrain.parameters.dcp import read_dcp
from tests.support.command_line import say
from tests.support.net_worlds import outer
from tests.support.process_trees import until
from tests.support.server_processes import Site


def site_in(folder: Path, samples: int, shards: int = 0) -> Site:
    """A run in that folder, whose servers keep all snapshots."""
    site = Site(folder, train_samples=samples, regions={"eu": ("a",)}, shards=shards)
    raw = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**raw, "checkpoint": {**raw["checkpoint"], "keep": 100}}))
    return site


def played(site: Site, resume: bool = False, killed: bool = False) -> dict[str, Any]:
    """Train all of the run's data; halfway a snapshot is waited for, and where `killed` the servers die. Returns the
    global server's last words."""
    servers = [site.serve(which, resume) for which in site.processes]
    try:
        worker, jobs = site.worker("a", f"life-{resume}"), 0
        worker.join()
        while (jobs < 10 or not killed) and (lease := worker.lease()):
            worker.train(lease)
            jobs += 1
            if jobs == 10:
                assert until(lambda: any(each["committed_samples"] > 0 for each in snapshots_of(site.folder)))
        if not killed:
            worker.leave()
        worker.close()
        assert killed or [server.ended() for server in servers] == [(0, "")] * len(servers)
    finally:
        site.kill()
    words = site.folder / "servers/global/status.json"
    return {} if killed else dict(json.loads(words.read_text()))


def tensors(snapshot: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in snapshot.glob("*.safetensors")}


def weights(site: Site) -> dict[str, torch.Tensor]:
    return dict(read_weights(site.folder / "servers/global", site.parameter_map))


@pytest.mark.parametrize("shards", [0, 2])
def test_a_run_goes_on_from_an_older_snapshot_without_the_data_since(tmp_path: Path, shards: int) -> None:
    folder, new = tmp_path / "run", tmp_path / "new"
    folder.mkdir()
    (folder / "servers").symlink_to(folder)
    site = site_in(folder, 160, shards)
    first = played(site)
    older = next(each for each in snapshots_of(folder) if 0 < each["committed_samples"] < 160)
    known, before = older["committed_samples"], weights(site)
    export_run(folder, tmp_path / "dcp", "float32", as_dcp=True)
    architecture = site.run.architecture
    assert all(torch.equal(value, before[name]) for name, value in read_dcp(tmp_path / "dcp", architecture))
    for number, out, told in (
        (999, new, r"--to 999: .* has snapshots 1, "),
        (older["snapshot"], folder, r"--out .*run exists"),
    ):
        with pytest.raises(ConfigError, match=told):
            roll_back(folder, number, out)
    done = say("rollback", folder, "--to", str(older["snapshot"]), "--out", new)
    skipped = int(done.stdout.partition(" samples are skipped; train on: ")[0])
    assert done.stdout.endswith(f"--set folder={new} --resume --without-checkpoints\n")
    assert skipped == 160 - known if not shards else skipped >= 160 - known
    known = 160 - skipped  # without what is not in the shards' snapshots yet
    for place in list((new / "servers").iterdir()):
        copied, *older_ones = map(
            tensors, (place / "snapshots/00000001", *(folder / place.name / "snapshots").iterdir())
        )
        assert copied in older_ones
        place.rename(new / place.name)
    (new / "servers").rmdir()
    (new / "servers").symlink_to(new)
    last = played(site_in(new, 320, shards), resume=True)
    assert last["complete"] and last["committed_samples"] == known + 160
    aside = {n for first, end in last["set_aside"] for n in range(first, end + 1)}
    assert aside == {*range(known, 160)} if not shards else len(aside) == skipped and max(aside) == 159
    assert first["committed_samples"] == 160 and snapshots_of(folder)[-1]["committed_samples"] == 160  # as it was
    assert all(torch.equal(value, before[name]) for name, value in weights(site).items())


def test_a_shard_goes_back_to_the_newest_snapshot_of_which_its_ledger_knows_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [{"said": said, "unsaid": [0]} for said in (0, 3, 9)]
    monkeypatch.setattr(SnapshotStore, "numbers", lambda _: [1, 2, 3])
    monkeypatch.setattr(SnapshotStore, "metas", lambda _: [{"state": {"part": p, "fragments": []}} for p in parts])
    assert _not_newer(tmp_path, 4).number == 2


def test_a_run_that_was_killed_or_never_was_or_has_rounds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run.json"):
        snapshots_of(tmp_path)
    (folder := tmp_path / "run").mkdir()
    (folder / "servers").symlink_to(folder)
    played(site_in(folder, 160), killed=True)
    known = [each["snapshot"] for each in snapshots_of(folder)]
    with pytest.raises(ConfigError, match="did not end in good order"):
        roll_back(folder, known[0], tmp_path / "new")
    raw = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**raw, "outer": outer("sync").model_dump(by_alias=True)}))
    with pytest.raises(ConfigError, match="a synchronous run cannot skip data"):
        roll_back(folder, known[0], tmp_path / "new")
    assert not (tmp_path / "new").exists()
