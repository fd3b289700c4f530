"""Whole runs with real servers, DeepSpeed jobs and ranks: over ssh's stand-in, killed, resumed; the quickstart."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from geotrain.commands import quickstart
from geotrain.commands.prepare import prepare_files
from geotrain.config import load_cluster, load_run
from geotrain.data.dataset import read_manifest
from geotrain.emulate import wan
from geotrain.kernels.devices import processor_has_bf16
from geotrain.launch.check import free_ports
from geotrain.launch.terminal import ask
from tests.support.command_line import Run
from tests.support.process_trees import marked, new_mark, until
from tests.support.small_runs import FAKE_SSH

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
PACKAGED = ("geotrain", "kernels", "launch", "configs", "setup.py", "pyproject.toml", "LICENSE")  # a wheel's sources
START_S = 500.0  # until ranks have joined, on a busy machine


def small_run(folder: Path, steps: int, **outer: Any) -> dict[str, Any]:
    """The quickstart's run, shorter, of a smaller model."""
    raw: dict[str, Any] = json.loads((CONFIGS / "runs/quickstart.json").read_text())
    model = json.loads((CONFIGS / "models/llama-tiny.json").read_text())
    model.update(hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=16)
    raw["model"]["config"] = model
    raw["deepspeed"]["bf16"]["enabled"] = processor_has_bf16()  # as `geotrain quickstart` does
    raw["outer"].update(outer)
    raw["data"]["train_samples"] = steps * raw["deepspeed"]["train_batch_size"]
    raw["deepspeed"]["scheduler"]["params"].update(total_num_steps=steps, warmup_num_steps=8)
    raw["monitor"] = {"every_s": 1.0}
    (folder / "run.json").write_text(json.dumps(raw))
    return raw


def start(folder: Path, *arguments: str, env: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "geotrain", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, env={**os.environ, **env}, stdout=pipe, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_far_region_is_killed_and_resumed(tmp_path: Path, geotrain: Run) -> None:
    """One region on "another machine", its worker started host by host: both launchers are killed, and resume."""
    raw = small_run(tmp_path, steps=128, local_steps=4)  # so that it is not over when the launcher is killed
    (tmp_path / "text.txt").write_text("".join(f"the number {i} and the next\n" for i in range(20_000)))
    prepare_files([str(tmp_path / "text.txt")], tmp_path / "data", None, None, True, 0.0, processes=1)
    raw["data"].update(train="data/train", validation=None, tokenizer=None)
    raw["checkpoint"] = {"every_jobs": 1, "every_minutes": 0.001}
    (tmp_path / "run.json").write_text(json.dumps(raw))
    free_port, master_port = free_ports(2)
    worker = {
        "name": "eu-0",
        "hosts": [{"host": "127.0.0.1", "slots": 2}],
        "launcher": "ssh",
        "master_port": master_port,
        "env": {"OMP_NUM_THREADS": "1", "NOTE": "two words"},
    }
    server = {"host": "127.0.0.2", "port": free_port}
    region = {"name": "eu", "ssh": "eu.example.org", "server": server, "workers": [worker]}
    (tmp_path / "cluster.json").write_text(json.dumps({"name": "far", "regions": [region]}))
    cluster = load_cluster(tmp_path / "cluster.json")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ssh").write_text(FAKE_SSH)
    (tmp_path / "bin/ssh").chmod(0o755)
    mark = new_mark()
    hosts = tmp_path / "hosts.txt"
    env = {**mark, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "FAKE_SSH_HOSTS": str(hosts)}

    def updates() -> int:
        said = ask(cluster, {"eu": f"127.0.0.2:{free_port}"}, within_s=1.0).get("eu", {})
        return int(said.get("members", {}).get("eu-0", {}).get("updates", 0))

    launcher = start(tmp_path, "launch", "run.json", "cluster.json", env=env)
    try:
        assert until(lambda: launcher.poll() is not None or updates() > 0, START_S)
        assert launcher.poll() is None, launcher.communicate()[0]
        # Of the three calls of the worker's host, the first looks at it, the second brings the run's files.
        assert hosts.read_text().split() == ["eu.example.org", "127.0.0.1", "127.0.0.1", "127.0.0.1"]
        assert len(marked(mark)) >= 8  # launcher; two servers; far launcher; guards, deepspeed, ranks
        second = geotrain("launch", "run.json", "cluster.json", cwd=tmp_path)
        assert second.returncode == 2
        assert "this run is running already" in second.stderr
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.communicate()
        for process in map(psutil.Process, marked(mark)):  # the region would live on
            if "--keep" in process.cmdline():
                process.kill()
    assert until(lambda: marked(mark) == [])

    again = geotrain("launch", "run.json", "cluster.json", cwd=tmp_path)
    assert again.returncode == 2
    assert "holds a run already: continue it with --resume" in again.stderr

    resumed = start(tmp_path, "launch", "run.json", "cluster.json", "--resume", env=env)
    said = resumed.communicate(timeout=START_S)[0]
    assert resumed.returncode == 0, said
    assert "committed 100%" in said
    assert until(lambda: marked(mark) == [])
    mine = read_manifest(tmp_path / "data/train").sha256  # the launcher's machine decides which data is the run's
    assert load_run(tmp_path / "runs/quickstart/run.json").data.sha256 == mine
    logs = {"global.log", "eu.ssh.log", "eu.launcher.log", "eu.log", "eu-0.log"}
    assert {p.name for p in (tmp_path / "runs/quickstart/logs").iterdir()} == logs


@pytest.mark.parametrize(("has_bf16", "mine"), [(True, False), (False, False), (False, True)])
def test_the_quickstart_computes_in_what_the_processor_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_bf16: bool, mine: bool
) -> None:
    """The shipped run in fp32 where bf16 is only emulated; a user's own as it says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(quickstart, "processor_has_bf16", lambda: has_bf16)
    monkeypatch.setattr(quickstart, "prepare_files", lambda *_: None)
    seen: list[bool] = []

    def launch(run: Path, cluster: Path, resume: bool, changes: tuple[str, ...]) -> int:
        seen.append(load_run(run, changes).deepspeed["bf16"]["enabled"])
        return 3

    monkeypatch.setattr(quickstart, "launch", launch)
    assert quickstart.quickstart(CONFIGS / "runs/quickstart.json" if mine else None, None, resume=False) == 3
    assert seen == [has_bf16 or mine]


def install_wheel(folder: Path) -> Path:
    """Build a wheel of the sources and install it, without what it needs. Returns the folder for PYTHONPATH, which
    comes before the checkout."""
    sources = folder / "sources"
    sources.mkdir()
    for name in PACKAGED:  # a copy: setuptools builds beside them, and takes what older builds left there
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, sources / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    for arguments in (
        ["wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(sources)],
        [
            "install",
            "--no-deps",
            "--target",
            str(folder / "site"),
            "--find-links",
            str(folder),
            "--no-index",
            "geotrain",
        ],
    ):
        subprocess.run([*pip, *arguments], check=True, timeout=300)
    return folder / "site"


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(900)
def test_the_quickstart_over_emulated_links_from_a_wheel(tmp_path: Path) -> None:
    """Run as by somebody without a checkout: all code and configurations are those that the wheel brings."""
    site = install_wheel(tmp_path)
    away = {"PYTHONPATH": str(site)}
    where = "import geotrain, geotrain.kernels.cpu as cpu; print(geotrain.__file__, cpu.library() is not None)"
    said = subprocess.check_output([sys.executable, "-c", where], cwd=tmp_path, env={**os.environ, **away}, text=True)
    assert said.split() == [str(site / "geotrain/__init__.py"), "True"]
    done = start(tmp_path, "configs", "mine", env=away)
    assert done.communicate(timeout=START_S)[0] == "mine\n"
    shipped = [path for path in CONFIGS.rglob("*.*") if "schema" not in path.parts]
    assert len(shipped) > 20
    for path in shipped:
        assert (tmp_path / "mine" / path.relative_to(CONFIGS)).read_bytes() == path.read_bytes()
    assert "mine is there already" in start(tmp_path, "configs", "mine", env=away).communicate(timeout=START_S)[0]
    raw = small_run(tmp_path, steps=96)
    cluster = site / "geotrain/configs/clusters/local-wan.json"
    mark = new_mark()
    done = start(tmp_path, "quickstart", "--run", "run.json", "--cluster", str(cluster), env={**mark, **away})
    said = done.communicate(timeout=800)[0]
    assert done.returncode == 0, said
    assert marked(mark) == []
    folder = tmp_path / "runs/quickstart"
    summary = json.loads((folder / "summary.json").read_text())
    parameters = summary["parameters"]
    assert summary["validation_loss_final"] < 0.8 * summary["validation_loss_start"]
    assert summary["tokens"] == 96 * 16 * 128
    assert summary["data_parallel_bytes"] == 4 * parameters * 48
    assert summary["committed_share"] == 1.0
    assert summary["lost_updates"] == 0
    assert summary["workers"] == 2
    assert len(set(summary["layouts"].values())) == 2
    every = raw["outer"]["rule"][
        "updates_per_send"
    ]  # at least: what comes while an answer is awaited leaves together
    most = sum(-(-v // every) for v in summary["region_versions"].values())
    assert most / 2 <= summary["global_versions"] <= most + 2  # the flush at the end may add one a region
    payload = (1 / 2 + 2 / 128) * parameters * summary["global_versions"]  # 4 bits, and a bf16 scale for each 128
    assert 0.9 * payload < summary["wan_bytes_up"] < 1.3 * payload
    assert {p.name for p in (folder / "logs").iterdir()} == {
        f"{name}.log" for name in ("global", "eu", "us", "eu-0", "us-0", "wan")
    }
    assert "emulated links carried" in said
    assert (folder / "export/model.safetensors").exists()
    assert list((folder / "checkpoints/eu-0").iterdir())
    for region in ("eu: ", "us: "):
        assert any(text.startswith(region + "loss") for text in said.splitlines())
    assert wan.cannot_emulate() == ""
