"""Obstacles of a launch are reported before it begins: by `geotrain launch`, and all at once by `dry-run`."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from transformers import AutoTokenizer

from geotrain.checkpoint.folders import FORMAT, sealed
from geotrain.commands import dry_run
from geotrain.commands.prepare import prepare_files
from geotrain.config import ClusterConfig, ConfigError, RunConfig, architecture_from_hf, load_cluster, load_run
from geotrain.data.tokenizer import train_bpe
from geotrain.launch import preflight
from geotrain.launch.run_rules import misfits
from geotrain.launch.terminal import new_console
from geotrain.net.server.first_weights import initial_weights
from geotrain.net.storage.frozen_state import FrozenState
from geotrain.net.storage.snapshots import SNAPSHOTS, SnapshotStore
from geotrain.net.transport.authority import make_certificates
from geotrain.parameters.dcp import names_of
from geotrain.parameters.hf_checkpoint import read_start
from geotrain.parameters.hf_export import write_checkpoint
from geotrain.parameters.initial import initial_tensor
from geotrain.parameters.parameter_map import canonical_parameters, parameter_map_of
from tests.support import small_runs
from tests.support.command_line import say
from tests.support.families import PREDICTING
from tests.support.programs import stand_in

MODEL = {**small_runs.MODEL, "max_position_embeddings": 64}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, and data that was prepared of them."""
    folder = tmp_path_factory.mktemp("texts")
    lines = [json.dumps({"text": f"text number {i}, of some length, so that there is something"}) for i in range(200)]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    prepare_files([str(folder / "texts.jsonl")], folder / "data", None, None, True, 0.2, processes=1)
    return folder


@pytest.fixture
def place(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data, a run file and a cluster file, with which nothing is wrong. The working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    shutil.copytree(texts, tmp_path, dirs_exist_ok=True)
    run = {
        "name": "mine",
        "model": {"config": MODEL},
        "data": {
            "train": "data/train", "validation": "data/validation", "tokenizer": "data/tokenizer",
            "sequence_length": 32, "train_samples": 80, "validation_samples": 8,
        },
        "outer": {"local_steps": 1, "rule": {"name": "region_momentum", "updates_per_send": 1}},
        "deepspeed": {
            "train_batch_size": 8, "train_micro_batch_size_per_gpu": 8,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
        },
        "monitor": {"validate_every_samples": 32},
    }  # fmt: skip
    worker = {"name": "here-0", "hosts": [{"host": "localhost", "slots": 1}]}
    cluster = {"name": "laptop", "regions": [{"name": "here", "workers": [worker]}]}
    Path("run.json").write_text(json.dumps(run))
    Path("cluster.json").write_text(json.dumps(cluster))
    return tmp_path


def change(file: str, **paths: Any) -> None:
    """Set keys of a JSON file: `outer__local_steps=4`."""
    raw = json.loads(Path(file).read_text())
    for path, value in paths.items():
        *parents, last = path.split("__")
        block = raw
        for part in parents:
            block = block[int(part)] if isinstance(block, list) else block.setdefault(part, {})
        block[int(last) if isinstance(block, list) else last] = value
    Path(file).write_text(json.dumps(raw))


def files() -> tuple[RunConfig, ClusterConfig]:
    return load_run("run.json"), load_cluster("cluster.json")


def refused() -> list[str]:
    run, cluster = files()
    here = preflight.sites_here(cluster)
    found = *misfits(run, cluster), *preflight.obstacles(run, cluster, here)
    return [str(each) for each in (*found, *preflight.port_obstacles(run, cluster, here))]


def said(*words: str) -> tuple[int, str]:
    """Exit code of a command in the working directory, and all that it says."""
    done = say(*words, cwd=Path.cwd())
    return done.returncode, done.text


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


def test_nothing_is_wrong(place: Path) -> None:
    assert refused() == []
    assert preflight.cautions(*files()) == []
    assert dry_run.report(*files(), new_console())


@pytest.mark.parametrize(
    ("run", "told"),
    [
        ({"data__train": "data/none"}, "data/none.json: cannot be read"),
        ({"data__sha256": "0" * 64}, "data/train: is other data than data.sha256 = '0000"),
        ({"data__tokenizer": "data/none"}, "/data/none': no such folder"),
        ({"model__config__vocab_size": 256}, "data/train: prepared with a tokenizer of"),
        ({"model__init_from": "none"}, "/none/config.json: cannot be read"),
        ({"outer__fragments": {"layers_per_fragment": 3}}, "layers_per_fragment = 3, but the model has 2 layers"),
        ({"data__validation_samples": 4}, "validation_samples = 4 is not a multiple of 8, which worker 'here-0'"),
        ({"data__validation_samples": 80_000, "monitor__validate_every_samples": 320_000},
         "data/validation: 80000 validation samples are wanted, but there are "),
        ({"monitor__token_file": "none"}, "/none': cannot be read"),
        ({"monitor__metrics_port": 65535}, "'launcher' (monitor.metrics_port + 1): there is no port 65536"),
        ({"outer__local_steps": 16}, "the first jobs of 1 workers take 16 inner steps, the run has 10 "),
        ({"cluster__regions__0__workers__0__hosts": [{"host": f"n{i}", "slots": 1} for i in range(2)],
          "deepspeed__train_batch_size": 16, "data__validation_samples": 16, "monitor__validate_every_samples": 64},
         "127.0.0.1:0, where hosts of worker"),
        ({"cluster__devices": {"tiny": {"memory_gb": 0.002, "tflops": 1.0}},
          "cluster__regions__0__workers__0__hosts__0__device": "tiny"}, "devices.tiny.memory_gb = 0.002; take"),
    ],
)  # fmt: skip
def test_what_launch_refuses_the_dry_run_finds(place: Path, run: dict[str, Any], told: str) -> None:
    for key, value in run.items():
        of_cluster = key.startswith("cluster__")
        change("cluster.json" if of_cluster else "run.json", **{key.removeprefix("cluster__"): value})
    assert any(told in line for line in refused())
    for command in ("dry-run", "launch"):
        code, text = said(command, "run.json", "cluster.json")
        assert code == 2 and " ".join(told.split()) in text, f"{command}: {text}"
    assert not Path("runs/mine/servers").exists()


def test_a_worker_of_several_emulated_hosts_reaches_its_server(place: Path) -> None:
    """They are this machine, and its server has an address of their network."""
    hosts = [{"host": f"host-{region}", "slots": 1, "region": region} for region in ("here", "there")]
    change("run.json", deepspeed__train_batch_size=16, data__validation_samples=16)
    change("run.json", monitor__validate_every_samples=64)
    change("cluster.json", regions__0__workers__0__hosts=hosts, emulate_links=True)
    raw = json.loads(Path("cluster.json").read_text())
    there = {"name": "there", "hosts": hosts[1:]}
    links = [{"regions": [a, b], "gbps": 1.0, "rtt_ms": 1.0} for a, b in (("here", "there"), ("here", "global"))]
    Path("cluster.json").write_text(json.dumps({**raw, "regions": [*raw["regions"], there], "links": links}))
    assert refused() == []


def test_a_host_that_this_machine_is_not_is_one_line(place: Path) -> None:
    """However many shards are to listen there."""
    there = {"host": "192.0.2.1", "port": 7000}
    shards = [{**there, "port": 7001 + i} for i in range(8)]
    change("cluster.json", global_server=there, global_shards=shards, regions__0__shards=[{}] * 8)
    change("run.json", outer__fragments={"pieces": 8})
    (line,) = refused()
    assert line.startswith("the server of 'global': cannot listen on 192.0.2.1:7000: ")


def test_the_dry_run_tells_everything_at_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change("run.json", data__train="data/none", data__tokenizer="none", model__init_from="weights")
    code, text = said("dry-run", "run.json", "cluster.json")
    assert code == 2
    assert "parameters in 1 fragment(s)" in text  # the figures come first
    for told in (
        "data/none.json: cannot be read",
        f"data.tokenizer = '{place}/none'",
        f"model.init_from: {place}/weights/config.json",
    ):
        assert told in text


def test_a_run_may_leave_out_what_predicts_further_tokens(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {**PREDICTING, "vocab_size": MODEL["vocab_size"]}
    parameters = canonical_parameters(architecture_from_hf(config))
    write_checkpoint(((p.name, initial_tensor(p, 1)) for p in parameters), config, place / "w", dtype="float32")
    change("run.json", model__config={**config, "num_nextn_predict_layers": 0}, model__init_from="w")
    assert refused() == [] and "its layers that predict further tokens are left out" in caplog.text
    begun = dict(read_start(files()[0]))
    assert all(torch.equal(begun.pop(p.name), initial_tensor(p, 1)) for p in parameters if p.layer not in (2, 3))
    assert not begun
    change("run.json", model__config={**config, "mtp_loss_factor": 0.1})
    assert refused() == []
    change("run.json", model__config={**config, "num_nextn_predict_layers": 1})
    assert "num_nextn_predict_layers = 2, in the run's model 1" in refused()[0]
    # transformers saves the config as it was, and no such layer
    kept = [p for p in parameters if p.layer not in (2, 3)]
    write_checkpoint(
        ((p.name, initial_tensor(p, 1)) for p in kept), {**config, "num_nextn_predict_layers": 0}, place / "t"
    )
    (place / "t/config.json").write_text((place / "w/config.json").read_text())
    change("run.json", model__init_from="t")
    assert "num_nextn_predict_layers = 0, in the run's model 1" in refused()[0]


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("theirs", "meant", "told"),
    [
        ({}, [], None),
        ({"initializer_range": 0.1, "max_position_embeddings": 4096, "eos_token_id": 3}, [], None),
        ({"num_hidden_layers": 1}, [], "num_hidden_layers = 1, in the run's model 2; use that checkpoint's config"),
        ({"vocab_size": 96}, [], "vocab_size = 96, in the run's model 264"),
        ({"rope_theta": 1e6}, [], "rope_theta = 1000000.0, in the run's model 10000.0"),
        ({"rms_norm_eps": 1e-5}, [], "rms_norm_eps = 1e-05, in the run's model 1e-06"),
        ({"rope_scaling": YARN}, [], "rope_scaling = {'rope_type': 'yarn', 'factor': 2.0, 'orig"),
        ({"rope_theta": 1e6, "rope_scaling": YARN}, ["rope_theta", "rope_scaling"], None),
        ({"rope_theta": 1e6, "vocab_size": 96}, ["rope_theta"], "is another model: vocab_size = 96, in the run's"),
        ({"rope_theta": 1e6}, ["rope_theta", "vocab_size"], "init_changes: vocab_size: is the same in model.init"),
        ({"num_hidden_layers": 1}, ["num_hidden_layers"], "it has model.norm.weight [32], the run's model model."),
    ],
)  # fmt: skip
def test_initial_weights_of_another_model(
    place: Path, theirs: dict[str, Any], meant: list[str], told: str | None
) -> None:
    """As preflight finds it, and as the server that would take them does."""
    config = {**MODEL, **theirs}
    parameters = canonical_parameters(architecture_from_hf(config))
    write_checkpoint(((p.name, initial_tensor(p, 1)) for p in parameters), config, place / "w")
    change("run.json", model__init_from="w", model__init_changes=meant)
    found, (run, _) = refused(), files()
    if told is None:
        assert found == []
        flat = torch.cat([*initial_weights(run, parameter_map_of(run)).values()])
        assert torch.equal(flat.sort()[0], torch.cat([v.flatten().float() for _, v in read_start(run)]).sort()[0])
        return
    assert len(found) == 1 and told in found[0]
    with pytest.raises(ConfigError, match=re.escape(told)):
        initial_weights(run, parameter_map_of(run))


@pytest.mark.parametrize(
    ("theirs", "tied", "told"),
    [
        ({"vocab_size": 96}, True, ["rows 96 to 263 of the vocabulary begin as a new model's"]),
        ({"vocab_size": 96}, False, ["rows 96 to 263 of the vocabulary begin as a new model's"]),
        ({"vocab_size": 300}, True, ["rows 264 to 299 of the vocabulary are left out"]),
        ({"tie_word_embeddings": True}, False, ["lm_head.weight begins as a copy of the embedding"]),
        ({"vocab_size": 96, "tie_word_embeddings": True}, False, ["rows 96 to 263", "begins as a copy"]),
        ({"vocab_size": 300, "tie_word_embeddings": False}, True, ["lm_head.weight is left out"]),
    ],
)
def test_a_vocabulary_and_a_head_may_change(
    place: Path, theirs: dict[str, Any], tied: bool, told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    ours = {**MODEL, "tie_word_embeddings": tied}
    config = {**ours, **theirs}
    given = {p.name: initial_tensor(p, 1) for p in canonical_parameters(architecture_from_hf(config))}
    write_checkpoint(given.items(), config, place / "w", dtype="float32")
    change("run.json", model__config=ours, model__init_from="w")
    assert "or name in model.init_changes what is to change" in refused()[0]
    change("run.json", model__init_changes=list(theirs))
    assert refused() == [] and all(each in caplog.text for each in told)
    run, begun = files()[0], dict(read_start(files()[0]))
    for parameter in parameter_map_of(run).parameters:
        name = parameter.name
        old, new = given.get(name, given["model.embed_tokens.weight"]), initial_tensor(parameter, run.seed)
        assert torch.equal(begun.pop(name), torch.cat([old[: len(new)], new[len(old) :]])), name
    assert not begun


@pytest.mark.parametrize("titan", [False, True])
def test_first_weights_that_are_not_finite(place: Path, titan: bool) -> None:
    """A single one is found before anything starts (`model.weights`: by the server, test_first_weights)."""
    given = {p.name: initial_tensor(p, 1) for p in canonical_parameters(architecture_from_hf(MODEL))}
    write_checkpoint(given.items(), MODEL, place / "w", dtype="float32")
    name = "model.layers.1.mlp.up_proj.weight"
    given[name][0, 0] = float("nan")
    save_file(given, place / "w/model.safetensors", {"format": "pt"})
    if titan:
        state = {theirs: given[ours] for ours, theirs in names_of(architecture_from_hf(MODEL)).items()}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(place / "w"), no_dist=True)
    change("run.json", model__init_from="w")
    assert [line for line in refused() if f"{name} holds infinities or NaN" in line]


def test_a_tokenizer_that_did_not_make_the_data(place: Path) -> None:
    """It is known by what makes ids: not by its folder, and not by how exports pad."""
    shutil.copytree("data/tokenizer", "moved")
    moved = json.loads(Path("moved/tokenizer.json").read_text())
    Path("moved/tokenizer.json").write_text(json.dumps({**moved, "truncation": None, "decoder": None}))
    change("run.json", data__tokenizer="moved")
    assert refused() == []
    train_bpe(["other text"], 264).save(place / "other")
    change("run.json", data__tokenizer="other")
    (told,) = refused()
    assert re.search(
        r"^data.tokenizer = '\S+other': is of another tokenizer \(sha256 \w{16}…\) than \S+data/train", told
    )
    train_bpe([f"{i}" for i in range(999)], 400).save(place / "large")
    change("run.json", data__tokenizer="large")
    (told,) = refused()
    assert "large': has " in told and "ids, but the model's vocab_size is 264; raise it" in told


def test_data_of_two_tokenizers(place: Path) -> None:
    train_bpe(["other text"], 264).save(place / "own")
    prepare_files(["texts.jsonl"], Path("data2"), place / "own", None, False, 0.2, processes=1)
    sets = [{"prefix": "data/train"}, {"prefix": "data2/train"}]
    change("run.json", data__train=sets, data__tokenizer=None)
    (told,) = refused()
    assert "data2/train: is of another tokenizer" in told
    raw = json.loads(Path("data2/train.json").read_text())
    Path("data2/train.json").write_text(json.dumps({**raw, "tokenizer_sha256": None}))  # as of a pair of Megatron's
    assert refused() == []


@pytest.mark.parametrize("key", ["page_port", "metrics_port"])
def test_a_taken_port_is_found_before_the_folder_holds_a_run(place: Path, key: str, taken: int) -> None:
    change("run.json", **{f"monitor__{key}": taken})
    for command in ("dry-run", "launch", "launch"):
        code, text = said(command, "run.json", "cluster.json")
        assert code == 2 and f"cannot listen on 127.0.0.1:{taken}" in text and key in text
        assert "holds a run already" not in text


def test_ports_given_twice(place: Path, taken: int) -> None:
    change("run.json", monitor__page_port=taken)
    change("cluster.json", global_server={"port": taken})
    told = refused()
    assert f"monitor.page_port and the server of 'global' both want 127.0.0.1:{taken}; give one" in told[0]
    assert len(told) == 3  # and both find it taken
    change("run.json", monitor__page_port=None, monitor__metrics_port=taken - 1)
    change("cluster.json", global_server={"port": 0})
    for here, told in ((("here",), False), (("global",), True)):  # the port after the global server's
        found = preflight.port_obstacles(*files(), here)
        assert any("metrics of 'launcher'" in str(each) for each in found) == told


@pytest.mark.parametrize("board", [{"wandb": {"project": "p"}}, {"tensorboard": "tb"}])
def test_a_board_that_is_not_installed(place: Path, board: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    (package,) = board
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
    change("run.json", **{f"monitor__{key}": value for key, value in board.items()})
    assert refused() == [f"monitor.{package}: the package is not installed here: pip install {package}"]
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: object())
    assert refused() == []


def test_missing_certificates(place: Path) -> None:
    change("cluster.json", security={"folder": "certs"})
    told = "\n".join(refused())
    for pair in ("operator-operator", "global-global", "region-here", "worker-here-0"):
        assert f"certs/{pair}.key: cannot be read" in told
    make_certificates(load_cluster("cluster.json"), Path("certs"), days=365)
    assert refused() == [] and preflight.cautions(*files()) == []
    Path("certs/worker-here-0.pem").unlink()
    make_certificates(load_cluster("cluster.json"), Path("certs"), days=0)
    assert "worker-here-0.pem: expired on" in "\n".join(refused())
    (told,) = preflight.cautions(*files())
    assert told.startswith("worker-here-0.pem: end on 20") and "renew it with `geotrain certs`" in told


def test_a_worker_goes_on_only_from_a_checkpoint_of_which_every_file_is_whole(place: Path) -> None:
    """It has saved one, as its server's snapshot shows; here one of two ranks."""
    run, cluster = files()
    told = {"state": {"members": {"here-0": {"job": 9}}}, "ended": True}
    SnapshotStore(run.run_folder / "servers/here" / SNAPSHOTS).save(FrozenState({}), told)

    def lost() -> list[str]:
        return [str(each) for each in preflight.obstacles(run, cluster, ("global", "here"), begins=False)]

    assert "trained 9 jobs, and no whole checkpoint of it is in" in lost()[0]
    saved, names = run.checkpoint_folder / "here-0/job-9", ("rank-0", "rank-1")
    saved.mkdir(parents=True)
    for name in names:
        (saved / name).write_bytes(b"state")
    manifest = {"format": FORMAT, "number": 1, "tag": "job-9", "files": {name: [5, 0] for name in names}}
    (saved / "manifest.json").write_text(sealed(manifest))
    assert not lost()
    (saved / "rank-1").write_bytes(b"stat")
    assert lost()
    (saved / "rank-1").unlink()
    assert lost()


ACCO = {"acco": {}, "deepspeed__optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
AWAY = {"regions__0__ssh": "eu.example.org", "regions__0__server": {"host": "10.1.2.3", "port": 7070}}


@pytest.mark.parametrize(
    ("run", "cluster", "told"),
    [
        (ACCO, {}, "acco.form = 'delayed' without the optimizer Muon"),
        (ACCO | {"deepspeed__optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}, {}, ""),
        ({}, {"global_server": {"host": "10.1.2.3", "port": 7070}},
         "plaintext, and everyone who reaches 'global' at 10.1.2.3:7070 can take part"),
        ({}, {"global_server": {"port": 7070, "bind": "0.0.0.0"}}, "'global' at 127.0.0.1:7070 can take part"),
        ({}, AWAY, "reaches the server of 'global' at 127.0.0.1:0 through a tunnel only; give the `host`"),
    ],
)  # fmt: skip
def test_what_is_warned_of(place: Path, run: dict[str, Any], cluster: dict[str, Any], told: str) -> None:
    change("run.json", **run)
    change("cluster.json", **cluster)
    found = preflight.cautions(*files())
    assert any(told in line for line in found) if told else not found, found


def test_hosts_are_asked_where_wanted(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ssh is a program here that knows one host, which is this machine with another folder's data."""
    stand_in(
        monkeypatch,
        place / "bin/ssh",
        '#!/bin/sh\ncase "$*" in *"-- near cd"*) while [ $# -gt 1 ]; do shift; done; exec sh -c "$1";; esac\n'
        'echo "no route to it" >&2\nexit 255\n',
    )
    change("cluster.json", regions__0__ssh="far", regions__0__server={"host": "far", "port": 7071}, global_ssh="near")
    change("cluster.json", global_server={"host": "near", "port": 7070}, global_folder=str(place / "near"))
    (place / "near").mkdir()
    code, text = said("dry-run", "run.json", "cluster.json")
    assert code == 0 and "not asked: far, near; --ask-hosts" in text
    monkeypatch.setattr("rich.console.Console.width", 400)  # cells are not broken
    code, text = said("dry-run", "run.json", "cluster.json", "--ask-hosts")
    assert code == 2 and "refused far cannot be looked at by ssh: no route to it `ssh far true` must work" in text
    # near has answered for itself: the server's address is no address of this machine
    assert "refused near the server of 'global': cannot listen on near:7070" in text
    assert "near cannot be looked at" not in text


def test_a_schedule_that_ends_before_the_data_is_warned_of(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"total_num_steps": 4, "warmup_num_steps": 2}
    change("run.json", deepspeed__scheduler={"type": "WarmupCosineLR", "params": params})
    code, text = said("dry-run", "run.json", "cluster.json")
    assert code == 0
    assert "total_num_steps = 4, but the run has 10 steps" in text and "cos_min_ratio is not stated" in text


def test_a_tokenizer_that_its_models_family_reads_otherwise(place: Path) -> None:
    """Transformers reads the same tokenizer in two ways beside a llama's config and a qwen2's."""
    text = "e\u0301 "
    train_bpe([text * 9], 264).save(place / "own")
    for family, otherwise in (("llama", False), ("qwen2", True)):
        config = {**MODEL, "model_type": family}
        change("run.json", model__config=config, data__tokenizer=str(place / "own"))
        (place / "own/config.json").write_text(json.dumps(config))
        ids = AutoTokenizer.from_pretrained(place / "own").encode(text, add_special_tokens=False)
        file = tokenizers.Tokenizer.from_file(str(place / "own/tokenizer.json"))
        assert (ids != file.encode(text).ids) == otherwise
        told = preflight.cautions(*files())
        assert ["AutoTokenizer cuts text as Qwen's" in line for line in told] == [True] * otherwise


def test_links_that_cannot_be_emulated_are_said_so(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = {"regions": ["here", "global"], "gbps": 1.0}
    change("cluster.json", emulate_links=True, links=[link])
    monkeypatch.setattr(preflight.wan, "cannot_emulate", lambda: "network namespaces need root")
    (told,) = preflight.cautions(*files())
    assert told.startswith("links are shaped by a proxy in front of the global server") and "need root." in told
    change("run.json", outer={"local_steps": 1, "levels": 1})
    (told,) = preflight.cautions(*files())
    assert told.startswith("LINKS ARE NOT EMULATED: network namespaces need root.")
    monkeypatch.setattr(preflight.wan, "cannot_emulate", lambda: "")
    assert preflight.cautions(*files()) == []
