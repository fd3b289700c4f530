"""The command line: quick to answer, and every error one clear message."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from typer.main import get_command

from geotrain import __version__
from geotrain.commands import cli
from geotrain.commands.cli import app
from geotrain.commands.operate import RunState
from tests.support.command_line import Run

ROOT = Path(__file__).parents[2]
FOUR_REGIONS = ROOT / "configs/clusters/four-regions-ssh.json"
SHORT = ("--tflops", "150", "--set", "data.train_samples=409600")
SLOW = ("torch", "numpy", "pydantic", "grpc", "deepspeed", "megatron", "transformers")
SERVERS = ("serve", "serve global", "serve region", "serve shard")
ROOT_COMMAND: Any = get_command(app)
COMMANDS = (*(name for name, each in ROOT_COMMAND.commands.items() if not each.hidden), *SERVERS[1:])


@pytest.fixture
def refused(geotrain: Run) -> Callable[..., str]:
    """The message of a command that must fail with exit code 2."""

    def run(*arguments: str | Path, cwd: Path = ROOT) -> str:
        done = geotrain(*arguments, cwd=cwd)
        assert done.returncode == 2, done.stdout + done.stderr
        return " ".join(done.stderr.split())

    return run


def test_help_imports_nothing_slow() -> None:
    script = f"""
import runpy, sys
sys.argv = ["geotrain", "--help"]
try:
    runpy.run_module("geotrain", run_name="__main__")
except SystemExit as ended:
    print(ended.code, [m for m in {SLOW} if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0 []"
    for command in COMMANDS:
        assert f" {command.split()[0]} " in done.stdout


@pytest.mark.parametrize(
    "env",
    [{"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"PYTHONIOENCODING": "latin-1"}],
    ids=["ascii", "latin-1"],
)
def test_output_that_is_not_utf_8_lacks_signs_and_nothing_else(env: dict[str, str], tmp_path: Path) -> None:
    """What is read is UTF-8 whatever the locale says."""
    run = json.loads((ROOT / "configs/runs/1b.json").read_text())
    run["folder"], run["model"]["config"] = str(tmp_path / "größe"), str(ROOT / "configs/models/llama-1b.json")
    (tmp_path / "run.json").write_text(json.dumps(run, ensure_ascii=False))
    command = [sys.executable, "-m", "geotrain", "dry-run", tmp_path / "run.json", FOUR_REGIONS]
    done = subprocess.run(command, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    words = done.stdout.decode("latin-1")
    assert done.returncode in (0, 2) and "Traceback" not in words
    assert re.search(r"^global\.example\.org +global +\S+ GB +\?$", words, re.MULTILINE)  # an en dash elsewhere


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example_and_its_result_as_json(command: str, geotrain: Run) -> None:
    """What runs until it is stopped has no result: `status` tells of it."""
    done = geotrain(*command.split(), "--help")
    assert done.returncode == 0 and re.search(f"Examples?: geotrain {command}", done.stdout)
    assert ("--json" in done.stdout) != (command in ("launch", *SERVERS))


def test_json_is_all_that_stands_on_standard_output(
    tmp_path: Path, geotrain: Run, refused: Callable[..., str]
) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(200)))
    data, files = tmp_path / "data", ("configs/runs/1b.json", "configs/clusters/four-regions-ssh.json")
    prepared = "prepare", tmp_path / "a.jsonl", "--out", data, "--bytes", "--validation", "0.2", "--processes", "1"
    planned = (
        "plan",
        "configs/models/llama-tiny.json",
        "configs/clusters/world-inventory.json",
        "--out",
        tmp_path / "p",
    )
    certified = "certs", files[1], tmp_path / "certs"
    wanted: dict[tuple[str | Path, ...], tuple[int, set[str]]] = {
        prepared: (0, {"train", "validation"}),
        ("adopt", tmp_path / "other"): (0, {"tokens", "documents", "vocab_size"}),
        ("dry-run", *files): (2, {"workers", "servers", "accepted", "lines"}),
        planned: (0, {"run", "cluster", "tokens_per_s", "workers", "notes"}),
        certified: (0, {"files"}),
        ("configs", tmp_path / "c"): (0, {"folder"}),
    }
    found = {}
    for command, (code, keys) in wanted.items():
        if "adopt" in command:
            for ending in ("bin", "idx"):
                (data / f"train.{ending}").rename(tmp_path / f"other.{ending}")
        done = geotrain(*command, "--json")
        assert done.returncode == code, done.stderr
        found[command] = json.loads(done.stdout)
        assert keys <= found[command].keys(), command
    assert found[prepared]["train"]["documents"] + found[prepared]["validation"]["documents"] == 200
    assert (
        found[certified]["files"]
        == geotrain(*certified[:2], tmp_path / "certs2").stdout.replace("certs2", "certs").split()
    )
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/eu.log").write_text("a line\n")
    assert json.loads(geotrain("logs", tmp_path, "--json").stdout) == {"line": "a line"}


def test_an_unsupported_model(tmp_path: Path, refused: Callable[..., str]) -> None:
    raw = json.loads((ROOT / "configs/runs/quickstart.json").read_text())
    raw["model"]["config"] = {"model_type": "mamba"}
    (tmp_path / "run.json").write_text(json.dumps(raw))
    said = refused("dry-run", tmp_path / "run.json", "configs/clusters/local-wan.json")
    families = (
        "llama, qwen2, qwen3, mistral, smollm3, granite, granitemoehybrid, nemotron_h, olmo2, olmo3, gemma2, "
        "gemma3_text, qwen3_moe, mixtral, gpt_oss, qwen2_moe, qwen3_next, deepseek_v3; of a model of text and images "
        "give its text_config alone"
    )
    assert said == f"geotrain: model config: model_type 'mamba' is not supported; supported: {families}"


def test_prepare_needs_one_tokenizer(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "a.txt").write_text("text")
    for choice in ((), ("--bytes", "--train-bpe", "400")):
        said = refused("prepare", tmp_path / "a.txt", "--out", tmp_path / "out", *choice)
        assert said == "geotrain: prepare: choose one of --tokenizer FOLDER, --train-bpe IDS and --bytes"
    assert not (tmp_path / "out").exists()


def test_prepare_replaces_nothing_unasked(tmp_path: Path, geotrain: Run, refused: Callable[..., str]) -> None:
    (tmp_path / "a.txt").write_text("first")
    command = ("prepare", tmp_path / "a.txt", "--out", tmp_path / "out", "--bytes", "--validation", "0")
    assert "prepare: 100 % in" in (done := geotrain(*command)).stdout + done.stderr
    before = (tmp_path / "out/train.json").read_text()
    (tmp_path / "a.txt").write_text("second, which is longer")
    assert "holds a data set already; --overwrite replaces it" in refused(*command)
    assert (tmp_path / "out/train.json").read_text() == before
    assert geotrain(*command, "--overwrite").returncode == 0
    assert (tmp_path / "out/train.json").read_text() != before


def test_prepare_passes_over_broken_lines_and_counts_them(
    tmp_path: Path, geotrain: Run, refused: Callable[..., str]
) -> None:
    good = [json.dumps({"text": f"text {i}"}) for i in range(20)]
    lines = [*good[:10], "{broken", '{"txt": "no such key"}', "", *good[10:], '{"text": 3}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    command = ("prepare", tmp_path / "a.jsonl", "--bytes", "--validation", "0", "--processes", "1", "--out")
    done = geotrain(*command, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert f"3 broken lines or rows were passed over; the first: {tmp_path}/a.jsonl:11: not JSON" in said
    assert json.loads((tmp_path / "out/train.json").read_text())["documents"] == 20
    assert "a.jsonl:11: not JSON" in refused(*command, tmp_path / "strict", "--strict")
    (tmp_path / "a.jsonl").write_text("\n".join([*good[:2], "{", "{", "{"]))
    assert "most lines or rows are broken, 3 beside 2 good ones" in refused(*command, tmp_path / "most")
    assert not (tmp_path / "strict").exists() and not (tmp_path / "most").exists()


def test_prepare_says_when_little_is_held_out(tmp_path: Path, geotrain: Run) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(400)))
    command = ("prepare", tmp_path / "a.jsonl", "--bytes", "--processes", "1")
    for share, told in (("0.01", True), ("0.2", False)):
        done = geotrain(*command, "--out", tmp_path / share, "--validation", share)
        assert done.returncode == 0
        few = json.loads((tmp_path / share / "validation.json").read_text())["documents"]
        said = f"only {few} of 400 documents are held out for validation" in " ".join(done.stderr.split())
        assert said == told == (few < 8)


@pytest.mark.parametrize("command", [(), ("launch",), ("serve", "global")])
def test_help_is_also_h(command: tuple[str, ...], geotrain: Run) -> None:
    short, long = (geotrain(*command, option) for option in ("-h", "--help"))
    assert short.returncode == 0 and short.stdout == long.stdout and "Usage" in short.stdout


def test_the_version(geotrain: Run) -> None:
    assert geotrain("--version").stdout == f"geotrain {__version__}\n"


def test_keys_of_the_run_file_can_be_set(tmp_path: Path, geotrain: Run, refused: Callable[..., str]) -> None:
    files = ("configs/runs/70b.json", "configs/clusters/four-regions-ssh.json")
    assert "146 s" in geotrain("dry-run", *files).stdout
    assert "564 s" in geotrain("dry-run", *files, "--set", 'outer.up={"name": "bf16"}').stdout
    said = refused("dry-run", *files, "--set", "outer.local_step=64")
    assert "outer.local_step: unknown key; did you mean 'local_steps'?" in said
    for change, told in (
        ("outer", "write KEY=VALUE, as in outer.local_steps=64"),
        ("outer..x=1", "write KEY=VALUE"),
        ("name.x=1", "the run file has nothing with such parts"),
        ("outer.local_steps=many", 'outer.local_steps = "many"'),
        ("deepspeed.gradient_cliping=1", "did you mean 'gradient_clipping'?"),
    ):
        assert told in refused("dry-run", *files, "--set", change)
    report = geotrain("simulate", *files, *SHORT, "--json", "--set", "outer.local_steps=64")
    assert json.loads(report.stdout)["outer"]["local_steps"] == 64


def test_pictures_of_unknown_kinds_are_refused(tmp_path: Path, refused: Callable[..., str]) -> None:
    for command in (("picture", tmp_path, "x.gif"), ("simulate", "r.json", "c.json", "--picture", "x.gif")):
        assert "x.gif: use .png, .svg, .pdf" in refused(*command)


def test_status_and_export_where_no_run_is(tmp_path: Path, refused: Callable[..., str]) -> None:
    said = f"geotrain: {tmp_path}: no run is here, since it has no run.json; give a run's folder, runs/<name>"
    assert refused("status", tmp_path) == said
    assert "run.json: cannot be read: No such file" in refused("export", tmp_path, tmp_path / "out")
    assert refused("sample", tmp_path).startswith(f"geotrain: {tmp_path}: cannot be loaded")


def test_a_run_that_left_nothing(tmp_path: Path, geotrain: Run, refused: Callable[..., str]) -> None:
    for name, source in (("run", "runs/quickstart"), ("cluster", "clusters/local-two-regions")):
        raw = json.loads((ROOT / f"configs/{source}.json").read_text())
        if name == "run":
            raw["model"]["config"] = json.loads((ROOT / "configs/models/llama-tiny.json").read_text())
            raw["data"]["tokenizer"] = None
        (tmp_path / f"{name}.json").write_text(json.dumps(raw))
    done = geotrain("status", tmp_path, "--once")
    assert done.returncode == RunState.UNREACHABLE
    assert "no server answers (global at 127.0.0.1:0" in " ".join(done.stdout.split())
    for command in (("pause",), ("expel", "eu-0")):
        assert "the server at 127.0.0.1:0 does not answer" in refused(command[0], tmp_path, *command[1:])
    assert "'mars'" in refused("expel", tmp_path, "mars")
    assert "holds no snapshot that is whole" in refused("export", tmp_path, tmp_path / "out")
    assert "say both" in refused("rollback", tmp_path, "--to", "1")
    assert not (tmp_path / "out").exists()


def test_options_of_serving_alone_are_no_server_s(refused: Callable[..., str]) -> None:
    assert "write --steps behind 'global'" in refused("serve", "--steps", "4", "global", "--run", "run.json")


def test_serve_names_unknown_regions(tmp_path: Path, refused: Callable[..., str]) -> None:
    said = refused(
        "serve", "region", "mars", "--run", "configs/runs/quickstart.json", "--cluster", "configs/clusters/slurm.json"
    )
    assert "has no region 'mars'; its regions: here" in said


def test_schema_writes_both(tmp_path: Path, geotrain: Run) -> None:
    assert geotrain("schema", "--out", tmp_path / "s", "--docs", tmp_path / "d/c.md").returncode == 0
    for made, kept in (("s/run.json", "configs/schema/run.json"), ("s/cluster.json", "configs/schema/cluster.json"),
                       ("d/c.md", "docs/configuration.md")):  # fmt: skip
        assert (tmp_path / made).read_text() == (ROOT / kept).read_text(), f"{kept} is old: run `geotrain schema`"
    assert json.loads((tmp_path / "s/run.json").read_text())["title"] == "RunConfig"
    assert json.loads((tmp_path / "s/cluster.json").read_text())["title"] == "ClusterConfig"


def test_dry_run_prints_what_a_rank_needs(geotrain: Run) -> None:
    done = geotrain("dry-run", "configs/runs/70b.json", "configs/clusters/four-regions-ssh.json")
    assert done.returncode == 2  # it could not be launched here, which is told after the figures
    assert f"launch would refuse\n  {ROOT}/certs/four-regions/operator-operator.key: cannot be read" in done.stdout
    assert "70,553,706,496 parameters" in done.stdout
    assert "TP 8 + sequence × PP 4 × DP 1, ZeRO 1" in done.stdout
    assert "pinned  checkpoint" in done.stdout
    assert "146 s" in done.stdout  # 36.4 GB at 2 Gbit/s


def test_simulate_tells_what_if(tmp_path: Path, geotrain: Run) -> None:
    files = "configs/runs/1b.json", "configs/clusters/four-regions-ssh.json"
    reports = []
    for more in ((), ("-H", "64", "-K", "4", "--codec", "int4", "--picture", tmp_path / "run.svg")):
        done = geotrain("simulate", *files, *SHORT, *more, "--json")
        assert done.returncode == 0, done.stderr
        reports.append(json.loads(done.stdout))
    plain, changed = reports
    assert (changed["outer"]["local_steps"], changed["outer"]["rule"]["updates_per_send"]) == (64, 4)
    assert changed["outer"]["up"]["name"] == changed["outer"]["down"]["name"] == "int4"
    assert changed["links"].keys() == plain["links"].keys() and changed["links"] != plain["links"]
    assert (tmp_path / "run.svg").read_text().startswith("<?xml")
    region = json.loads((ROOT / files[1]).read_text())["regions"][0]["name"]
    done = geotrain("simulate", *files, *SHORT, "--without", region)
    assert done.returncode == 0 and " h for " in done.stdout and region not in done.stdout


def test_eval_says_how_to_install_the_harness(
    tmp_path: Path, geotrain: Run, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "say what to measure" in geotrain("eval", tmp_path).stderr
    assert "is no checkpoint folder" in refused("eval", tmp_path, "--tasks", "arc_easy")
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    said = refused("eval", tmp_path, "--tasks", "arc_easy")
    assert said.endswith("which is not installed: pip install lm-eval")


def test_a_fault_of_the_programs_own_is_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "leave_quickly", lambda: None)
    monkeypatch.setattr(sys, "__stdout__", None)
    for error, raised in ((ValueError("a fault"), ValueError), (OSError("no room"), SystemExit)):
        monkeypatch.setattr(cli, "app", mock.Mock(side_effect=error))
        with pytest.raises(raised):
            cli.main()
