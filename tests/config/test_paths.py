"""Paths in run and cluster files: relative to the file that names them, wherever the command is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from geotrain.commands.export import export_run
from geotrain.config import (
    ClusterConfig,
    ConfigError,
    RunConfig,
    json_schema,
    load_cluster,
    load_run,
    relocated,
)
from geotrain.config.agreement import config_digest
from geotrain.config.block import with_paths
from geotrain.launch.site_processes import LaunchRequest, path_there, remote_site
from geotrain.net.server.first_weights import initial_weights
from geotrain.net.server.newest_weights import Newest
from geotrain.parameters.parameter_map import parameter_map_of
from tests.support.small_runs import MODEL, prepare_text, write_files

# What is text in a run or cluster file and no path: the test below asks of a new key which it is.
# The last two are paths of files that are read into their places.
NO_PATHS = {
    "name", "ends_at", "data.sha256", "checkpoint.snapshots", "monitor.host", "monitor.otlp", "monitor.wandb.project",
    "monitor.wandb.entity", "monitor.wandb.group", "$schema", "model.config", "deepspeed",
}  # fmt: skip


def files(folder: Path, keys: dict[str, Any] | None = None) -> tuple[Path, Path]:
    """<folder>/here/run.json and cluster.json, whose paths are all relative."""
    (folder / "here").mkdir(parents=True, exist_ok=True)
    run, cluster = write_files(folder / "here", "run", 64, {"eu": [1], "us": [1]}, {"rule": {"name": "halos"}})
    raw = json.loads(run.read_text())
    (folder / "here/model.json").write_text(json.dumps(raw["model"]["config"]))
    (folder / "block.json").write_text(json.dumps(raw["deepspeed"]))
    raw |= {"folder": "../out", "model": {"config": "model.json", "init_from": "start"}, "deepspeed": "../block.json"}
    raw["data"] |= {
        "train": [{"prefix": "../data/train"}, {"prefix": "../data/more"}],
        "validation": "../data/held",
        "tokenizer": "../data/tokenizer",
    }
    raw |= {
        "checkpoint": {"folder": "saved"},
        "monitor": {"token_file": "token", "tensorboard": "boards"},
        **(keys or {}),
    }
    run.write_text(json.dumps(raw))
    cluster.write_text(json.dumps({**json.loads(cluster.read_text()), "security": {"folder": "certs"}}))
    return run, cluster


def paths_of(config: RunConfig | ClusterConfig) -> list[str]:
    """All paths, in the order of `paths`."""
    found: list[str] = []
    raw = config.model_dump(by_alias=True, mode="json")
    with_paths(raw, config.paths, lambda path: found.append(path) or path)
    return found


@pytest.mark.parametrize("far", [True, False], ids=["from afar", "beside it"])
def test_paths_are_relative_to_the_file_that_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, far: bool
) -> None:
    run_file, cluster_file = files(tmp_path)
    if not far:
        monkeypatch.chdir(run_file.parent)
        run_file, cluster_file = Path(run_file.name), Path(cluster_file.name)
    run, cluster = load_run(run_file), load_cluster(cluster_file)
    here = tmp_path / "here"
    assert paths_of(run) == [
        str(tmp_path / "out"),
        str(here / "start"),
        *(str(tmp_path / "data" / name) for name in ("train", "more", "held", "tokenizer")),
        *(str(here / name) for name in ("saved", "token", "boards")),
    ]
    assert paths_of(cluster) == [str(here / "certs")]
    assert run.model.config == MODEL and run.deepspeed["train_batch_size"] == 4


def test_paths_of_the_command_line_and_the_default_folder_follow_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_file, _ = files(tmp_path)
    (tmp_path / "other.json").write_text(json.dumps({**MODEL, "num_hidden_layers": 3}))
    monkeypatch.chdir(tmp_path)
    run = load_run(
        run_file.relative_to(tmp_path), ("data.train=mine/train", "model.config=other.json", "folder=null")
    )
    assert run.data.train[0].prefix == str(tmp_path / "mine/train") and run.architecture.layers == 3
    assert run.data.validation == str(tmp_path / "data/held")  # that stands in the file
    assert run.run_folder.absolute() == tmp_path / "runs/small"
    assert run.checkpoint_folder == tmp_path / "here/saved"


def test_every_text_of_a_run_file_is_a_path_or_known_not_to_be_one() -> None:
    """A new key that names a file and is not in `paths` would be relative to the working directory."""
    schema = json_schema(RunConfig)

    def texts(block: Any, place: str) -> set[str]:
        found = set()
        for name, field in block["properties"].items():
            for kind in (field, *field.get("anyOf", ())):
                if "$ref" in kind:
                    found |= texts(schema["$defs"][kind["$ref"].rpartition("/")[2]], f"{place}{name}.")
                elif kind.get("type") == "string" and "enum" not in kind:
                    found.add(place + name)
                elif kind.get("type") == "array" and "$ref" in kind.get("items", ()):
                    found |= texts(schema["$defs"][kind["items"]["$ref"].rpartition("/")[2]], f"{place}{name}.*.")
        return found

    del schema["properties"]["outer"]  # numbers and names
    assert texts(schema, "") == set(RunConfig.paths) | NO_PATHS


def test_where_things_lie_is_not_in_the_digest(tmp_path: Path) -> None:
    run = load_run(files(tmp_path)[0])
    moved = relocated(run, lambda path: "/elsewhere" + path)
    assert paths_of(moved) == ["/elsewhere" + path for path in paths_of(run)]
    assert config_digest(moved) == config_digest(run)
    other = load_run(files(tmp_path)[0], ("seed=5",))
    assert config_digest(other) != config_digest(run)


def test_a_far_region_gets_paths_as_they_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the working directory they move with the region's `folder`; others are the same."""
    run_file, cluster_file = files(tmp_path, {"folder": "/scratch/out"})
    raw = json.loads(cluster_file.read_text())
    raw["regions"][0] |= {"ssh": "eu.example.org", "folder": "/srv/geotrain"}
    raw["regions"][1] |= {"ssh": "us.example.org"}
    cluster_file.write_text(json.dumps(raw))
    monkeypatch.chdir(tmp_path)
    asked = LaunchRequest(load_run(run_file), load_cluster(cluster_file), ("eu",), False)
    there = LaunchRequest.from_line(remote_site(asked, "eu", "eu.example.org").first_input)
    assert [each.prefix for each in there.run.data.train] == ["/srv/geotrain/data/train", "/srv/geotrain/data/more"]
    assert there.run.checkpoint_folder == Path("/srv/geotrain/here/saved")
    assert there.run.run_folder == Path("/scratch/out")
    assert there.cluster.security is not None and there.cluster.security.folder == "/srv/geotrain/here/certs"
    assert config_digest(there.run) == config_digest(asked.run)
    same = LaunchRequest.from_line(remote_site(asked, "us", "us.example.org").first_input)
    assert (same.run, same.cluster) == (asked.run, asked.cluster)
    assert path_there(f"{tmp_path}-2/data", "/srv/geotrain") == f"{tmp_path}-2/data"  # is not below it
    raw["regions"][0]["folder"] = "geotrain"
    cluster_file.write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r'regions\.0\.folder = "geotrain": must be an absolute path'):
        load_cluster(cluster_file)


def test_an_export_finds_the_tokenizer_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the resolved run file, in the run's folder, which is somewhere else than the tokenizer."""
    run_file, cluster_file = files(tmp_path)
    prepare_text(tmp_path)
    raw = json.loads(run_file.read_text())
    raw["model"].pop("init_from")
    run_file.write_text(json.dumps(raw))
    monkeypatch.chdir(tmp_path)
    run = load_run(Path("here/run.json"))
    LaunchRequest(run, load_cluster(cluster_file), (), False).write_files(run.run_folder)
    layout = parameter_map_of(run)
    tensors = {n: t for f, v in zip(layout.fragments, initial_weights(run, layout).values(), strict=True)
               for n, t in layout.split(f.index, v)}  # fmt: skip
    newest = Newest(iter(tensors.items()), version=1, samples=8, changed_s=0.0)
    monkeypatch.setattr("geotrain.commands.export.newest_weights", lambda *given: newest)
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    export_run(Path("../out"), Path("exported"))
    assert (tmp_path / "else/exported/tokenizer.json").exists()
