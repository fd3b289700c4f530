"""One life of a run, from a wheel, with all that may happen to one; what it said and left is kept for tests to read.

Two regions over emulated links, with TLS. In `eu` the server's shards are processes; in `us` two ranks divide a
model's experts. Its packets are damaged, and a server, a shard and a rank killed; it is paused, resumed, drained and
stopped, then resumed by `geotrain quickstart`, which exports it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil

from geotrain.checkpoint.folders import manifests
from geotrain.commands.operate import LiveRun, RunStatus
from geotrain.commands.prepare import prepare_files
from geotrain.config import ClusterConfig, parse
from geotrain.kernels.devices import processor_has_bf16
from geotrain.net.storage.snapshots import checked_meta
from geotrain.net.transport.authority import make_certificates
from tests.chaos.faults.runner import FaultyRun
from tests.chaos.faults.scenario import PACKETS, Event, Fault
from tests.support.command_line import Done, say
from tests.support.process_trees import marked, new_mark, until
from tests.support.programs import program

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
PACKAGED = ("geotrain", "kernels", "launch", "configs", "setup.py", "pyproject.toml", "README.md", "LICENSE")
BUSY_S = 500.0  # until ranks have joined, on a busy machine
ENOUGH = 1_000_000  # samples: no machine trains them before the run is stopped
PACE_S = 1.0  # a step: workers that wait leave the processor to those who look at them
STEPS, BATCH, LOCAL_STEPS = 48, 16, 2  # STEPS: after the run was resumed
BAD_RECORD = "DECRYPTION_FAILED_OR_BAD_RECORD_MAC"  # what TLS says of what had passed TCP's checksum
RECORDED = 2 * LOCAL_STEPS  # steps in a trace: an update leaves during them
QUIET_S = 4 * LOCAL_STEPS * PACE_S  # several jobs
# A first step at a rate of 0 would send updates of equal bytes, zeros, which the audit counts as one applied twice.
LEARNING = {"total_num_steps": 2000, "warmup_num_steps": 8, "warmup_min_ratio": 0.1}
RATES = {"corrupt": 0.1, "drop": 0.03, "delay": 0.1, "reorder": 0.1, "duplicate": 0.1}
FAULTS = (
    *(
        Fault(kind, Event("eu-0", "JobTrained", 1), "eu", for_s=20.0, rate=RATES[kind], seed=1,
              amount={"corrupt": 0.3, "delay": 0.1}.get(kind, 0.0))
        for kind in PACKETS
    ),
    Fault("kill", Event("eu-0", "JobTrained", 2), "eu", "server"),
    Fault("kill", Event("us-0", "JobTrained", 2), "us-0", "rank"),
    Fault("kill", Event("eu", "Joined", 2), "eu.shard-0", "shard"),  # a worker has joined the server's successor
)  # fmt: skip


@dataclass
class Life:
    """What a run said and left. said: what commands said, by name; output: of the launchers; seen: what its servers
    said of it, by the moment; left: its processes that were still there when a launcher had ended."""

    folder: Path
    site: Path
    run: FaultyRun
    said: dict[str, Done] = field(default_factory=dict)
    output: dict[str, str] = field(default_factory=dict)
    seen: dict[str, RunStatus] = field(default_factory=dict)
    page: dict[str, Any] = field(default_factory=dict)
    ranks: list[dict[str, str]] = field(default_factory=list)  # the environments of us-0's ranks
    metrics: str = ""
    quiet: list[int] = field(default_factory=list)  # updates of eu and us, while the run was paused
    left: list[int] = field(default_factory=list)

    def say(self, name: str, *words: str | Path) -> Done:
        """Run a command of an operator, and keep what it says by this name."""
        self.said[name] = say(*words, cwd=self.folder)
        return self.said[name]

    def look(self, moment: str) -> RunStatus:
        self.seen[moment] = LiveRun(self.run.folder).see()
        return self.seen[moment]

    def updates(self, *regions: str) -> list[int]:
        statuses = LiveRun(self.run.folder).see().statuses
        return [sum(m["updates"] for m in statuses.get(r, {}).get("members", {}).values()) for r in regions]


def install_wheel(folder: Path) -> Path:
    """Build a wheel of the sources and install it, without what it needs. Returns the folder for PYTHONPATH, which
    comes before the checkout."""
    sources = folder / "sources"
    sources.mkdir()
    for name in PACKAGED:  # a copy: setuptools builds beside them, and takes what older builds left there
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, sources / name)
    # Kernels have the same bits at each level, and most of the build is gcc's last one. The last word holds.
    compiler = folder / "bin/cc"
    program(compiler, '#!/bin/sh\nexec gcc "$@" -O1\n')
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    target = ["--target", str(folder / "site"), "--find-links", str(folder), "--no-index"]
    for words in (
        ["wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(sources)],
        ["install", "--no-deps", *target, "geotrain"],
    ):
        subprocess.run([*pip, *words], check=True, timeout=300, env={**os.environ, "CC": str(compiler)})
    return folder / "site"


def write_files(folder: Path, samples: int = ENOUGH, pace_s: float = PACE_S) -> tuple[Path, Path]:
    """The shipped run with experts, of a smaller model, and its shipped regions, over links."""
    raw = json.loads((CONFIGS / "runs/quickstart-moe.json").read_text())
    model = json.loads((CONFIGS / "models/qwen3-moe-tiny.json").read_text())
    model |= {"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    raw |= {"folder": str(folder / "run"), "checkpoint": {"every_jobs": 4, "every_minutes": 0.1}}
    raw["model"]["config"] = model
    raw["deepspeed"]["bf16"]["enabled"] = processor_has_bf16()  # as `geotrain quickstart` does
    raw["deepspeed"]["scheduler"]["params"] |= LEARNING
    raw["data"] |= {what: str(folder / "run/data" / what) for what in ("train", "validation", "tokenizer")}
    raw["data"] |= {"sequence_length": 32, "train_samples": samples, "validation_samples": 64}
    raw["monitor"] = {"every_s": 1.0, "metrics_port": 0, "validate_every_samples": 20 * BATCH}
    raw["outer"] |= {
        "local_steps": LOCAL_STEPS,
        "lease_reserve": 2,
        "fragments": {"layers_per_fragment": 1, "chunk_elements": 8192},
    }
    cluster = json.loads((CONFIGS / "clusters/local-two-regions-moe.json").read_text())
    links = json.loads((CONFIGS / "clusters/local-wan.json").read_text())
    cluster |= {key: links[key] for key in ("links", "emulate_links")}
    cluster["global_shards"] = [{}]
    cluster["restart"] = {"limit": 1000, "first_s": 0.5, "longest_s": 4.0}
    eu, us = cluster["regions"]
    alone = {"name": "eu-0", "parallel": {"expert": 1}, "hosts": [{"host": "localhost", "slots": 1}]}
    alone["deepspeed"] = {"train_micro_batch_size_per_gpu": BATCH}  # a step in one: half the processor time
    eu |= {"workers": [alone], "shards": [{}]}
    us["workers"][0]["env"] = {"NOTE": "two words"}
    for worker in (*eu["workers"], *us["workers"]):
        worker["min_step_s"] = pace_s
    certificates = folder / "certificates"
    if not certificates.exists():
        make_certificates(parse(ClusterConfig, cluster, "cluster"), certificates)
    cluster["security"] = {"folder": str(certificates)}
    for path, content in ((folder / "run.json", raw), (folder / "cluster.json", cluster)):
        path.write_text(json.dumps(content))
    return folder / "run.json", folder / "cluster.json"


def played(folder: Path) -> Life:
    """Play the life in the folder. A stage that does not come about raises AssertionError."""
    site, mark = install_wheel(folder), new_mark()
    text = folder / "texts.jsonl"
    text.write_text("".join(json.dumps({"text": f"the number {i} and the next\n" * 9}) + "\n" for i in range(600)))
    prepare_files([str(text)], folder / "run/data", None, None, True, 0.05, processes=1)
    files = write_files(folder)
    env = {**mark, "PYTHONPATH": str(site), "DS_ACCELERATOR": "cpu"}
    with FaultyRun(*files, folder / "archive", env) as run:
        life = Life(folder, site, run)
        _trained(life, 1)
        life.ranks = [psutil.Process(pid).environ() for pid in run.pids("rank", "us-0")]
        _disturbed(life)
        _operated(life)
        life.output["stopped"] = _ended(life, mark)
        life.look("stopped")
        for name, words in (("stop again", ("stop", run.folder)), ("launch again", ("launch", *files))):
            life.say(name, *words)
        saved = run.folder / "checkpoints"
        (saved / "eu-0").rename(run.folder / "eu-0")
        life.say("resume without a worker's state", "launch", *files, "--resume")
        (run.folder / "eu-0").rename(saved / "eu-0")
        manifests(saved / "us-0")[0][1].joinpath("manifest.json").write_bytes(b"")
        # Beyond all that was ever leased: a replay of the whole journal meets no other end.
        newest = max((run.folder / "servers/global/snapshots").glob("*/meta.json"))
        trained = checked_meta(newest.read_bytes())["meta"]["state"]["leases"]["next_start"]
        write_files(folder, trained + STEPS * BATCH, 0.0)
        run.start("quickstart", "--resume", "--run", str(files[0]), "--cluster", str(files[1]))
        life.output["finished"] = _ended(life, mark).removeprefix(life.output["stopped"])
    life.look("finished")
    for name, words in (
        ("status", ("status", run.folder, "--json")),
        ("launch a finished run", ("launch", *files)),
        ("resume a finished run", ("launch", *files, "--resume")),
        ("pause a finished run", ("pause", run.folder)),
    ):
        life.say(name, *words)
    return life


def _trained(life: Life, jobs: int) -> None:
    """Wait until every worker has trained so many jobs more."""
    run = life.run
    wanted = {worker: run.jobs_of(worker) + jobs for workers in run.regions.values() for worker in workers}
    done = run.wait_for(lambda: all(run.jobs_of(worker) >= n for worker, n in wanted.items()), BUSY_S)
    assert done, run.log.read_text()


def _disturbed(life: Life) -> None:
    run = life.run
    for fault in FAULTS:
        assert run.wait_for(lambda f=fault: run.happened(f.when), BUSY_S), (fault, run.log.read_text())
        run.play([fault], 0.0)
    damage = next(fault for fault in FAULTS if fault.what == "corrupt")
    logs = [run.folder / f"logs/{server}.log" for server in ("global", "eu")]
    for _ in range(20):  # on a busy machine few packets pass in its time, and TCP finds all that is wrong with them
        if until(lambda: any(BAD_RECORD in log.read_text() for log in logs), damage.for_s):
            break
        run.play([damage], 0.0)
    _trained(life, 2)


def _operated(life: Life) -> None:
    """What an operator says while the run is on, up to its end."""
    run, folder = life.run, life.run.folder
    status = life.look("disturbed")
    top = status.statuses["global"]
    with urlopen(top["page"] + "state.json", timeout=60) as page, urlopen(top["metrics"], timeout=60) as metrics:
        life.page, life.metrics = json.load(page), metrics.read().decode()
    life.say("status while it trains", "status", folder, "--once")
    life.say("launch beside it", "launch", *run.files)
    for member in ("eu-0", "us", "x"):
        life.say(f"unban {member}", "unban", folder, member)

    life.say("pause", "pause", folder)

    def at_rest() -> bool:
        life.quiet = life.updates("eu", "us")
        time.sleep(QUIET_S)
        return life.updates("eu", "us") == life.quiet

    # Regions hear of it by their next heartbeats; their workers then finish the job in hand and the next.
    assert until(at_rest, BUSY_S)
    life.look("paused")
    life.say("status while it is paused", "status", folder, "--once")
    life.say("resume", "resume", folder)

    def goes_on() -> bool:
        return all(now > then for now, then in zip(life.updates("eu", "us"), life.quiet, strict=True))

    assert until(goes_on, BUSY_S)

    for worker in ("us-0", "us"):
        life.say(f"profile {worker}", "profile", folder, "--worker", worker, "--steps", str(RECORDED))
    assert until(lambda: len(list((folder / "profiles").glob("us-0-*.gz"))) == 2, BUSY_S), run.log.read_text()
    life.say("snapshot", "snapshot", folder)
    life.say("drain", "drain", folder, "us", "--wait", "300")
    assert until(lambda: not (folder / "servers/us/listening.json").exists(), BUSY_S)  # its server has ended
    (before,) = life.updates("eu")
    assert until(lambda: life.updates("eu")[0] > before, BUSY_S)
    assert run.launcher.poll() is None
    life.look("drained")
    life.say("stop", "stop", folder, "--wait", "300")


def _ended(life: Life, mark: dict[str, str]) -> str:
    """Wait until the launcher has ended well, and count what is left; returns all that launchers have said."""
    code = life.run.launcher.wait(BUSY_S)
    said = life.run.log.read_text()
    assert code == 0, said
    life.left += marked(mark)
    return said


def in_wheel(life: Life, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python as somebody without a checkout."""
    env = {**os.environ, "PYTHONPATH": str(life.site)}
    return subprocess.run([sys.executable, *words], cwd=life.folder, env=env, capture_output=True, text=True)
