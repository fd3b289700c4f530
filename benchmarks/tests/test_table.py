"""The benchmarks' common parts: one table of goals, short forms, intervals, and who else uses the machine."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import benchmarks.hide.__main__ as hide
from benchmarks import __main__ as bench
from benchmarks import codec, common
from benchmarks.goals import PARTS, Goal, Part
from benchmarks.servers.shards import PIECES, roles, same
from benchmarks.servers.world import write_files
from geotrain.config import load_cluster, load_run, shard_name, shards_of
from geotrain.outer.codec import make_codec
from geotrain.parameters.chunks import deal
from geotrain.parameters.parameter_map import parameter_map_of

ROOT = Path(__file__).parents[2]
# Run by hand: they take hours and read kept rows, or need a run's files or a GPU.
BY_HAND = {
    "benchmarks.gpu",
    *(f"benchmarks.studies.{name}" for name in ("confirm", "loss_curve", "short")),
}


def programs() -> dict[str, Path]:
    """Module → file of each program in benchmarks/ and tests/chaos/."""
    files = {}
    for package in ("benchmarks", "benchmarks.studies", "tests.chaos"):
        folder = ROOT / package.replace(".", "/")
        files |= {f"{package}.{path.stem}": path for path in folder.glob("*.py") if path.stem != "__main__"}
        files |= {f"{package}.{path.parent.name}": path for path in folder.glob("*/__main__.py")}
    return {name: path for name, path in files.items() if '"__main__"' in path.read_text()}


def test_every_benchmark_is_in_the_table_and_has_a_short_form() -> None:
    found = programs()
    assert {f"{part.package}.{part.module}" for part in PARTS} == set(found) - BY_HAND
    for part in PARTS:
        source = found[f"{part.package}.{part.module}"].read_text()
        calls = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call)]
        lines = [c for c in calls if getattr(c.func, "id", "") == "command_line"]
        assert part.quick == any(k.arg == "quick" for c in lines for k in c.keywords), part.module


def test_the_short_forms_leave_out_what_tests_play() -> None:
    left_out = set(PARTS) - set(bench.chosen((), True))
    for part in left_out:
        if part.quick:
            assert f"{part.package}.{part.module}" in (ROOT / part.tested).read_text(), part.name
    assert len(left_out) < len(PARTS) / 3
    assert bench.chosen((), False) == list(PARTS)
    assert {part.module for part in bench.chosen(("faults", "claims"), True)} == {"faults"}


def test_the_table_says_what_was_found_and_what_was_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(bench, "LOGS", tmp_path / "logs")
    package = tmp_path / "benchmarks"
    package.mkdir()
    said = {"good": {"a": 2.0, "a_low": 1.5, "a_high": 2.5, "deep": {"b": {"mean": 1.0, "low": 0.5, "high": 1.5}}}}
    said["busy"] = {"a": 2.0, "others_share": 0.5}
    for name, figures in said.items():
        (package / f"{name}.py").write_text(f"print('first')\nprint({json.dumps(json.dumps(figures))})\n")
    (package / "broken.py").write_text("raise SystemExit(3)\n")
    (package / "mute.py").write_text("print('no figures')\n")
    (package / "slow.py").write_text("import time\ntime.sleep(600)\n")

    def verdict(name: str, goal: Goal, quick: bool = False, minutes: float = 1.0) -> str:
        return bench.judge(goal, bench.run(Part(name, (goal,), quick=False), False, minutes), quick)

    assert verdict("good", Goal("a", least=2)) == verdict("good", Goal("deep.b.mean", most=1)) == "yes"
    assert verdict("good", Goal("a", most=0)) == "no"
    sides = [Goal("a", least=1, most=most) for most in (1.5, 2)], [Goal("a", least=least, most=4) for least in (2, 3)]
    assert [[verdict("good", goal) for goal in side] for side in sides] == [["no", "yes"], ["yes", "no"]]
    assert str(Goal("a", least=0.8, most=1.25)) == "0.8 to 1.25"
    assert verdict("good", Goal("a")) == verdict("good", Goal("a", least=2), quick=True) == "–"
    assert verdict("good", Goal("c")) == "not measured"
    assert verdict("busy", Goal("a", least=2)) == "busy"
    assert verdict("busy", Goal("a", least=2, timed=False)) == "yes"
    assert verdict("broken", Goal("a")) == "exit code 3, see logs/broken.log"
    assert verdict("mute", Goal("a")) == "its last line is no JSON object, see logs/mute.log"
    assert verdict("slow", Goal("a"), minutes=0.02) == "not ended within 0.02 minutes"
    part = Part("good", ())
    outcome = bench.run(part, False, 1.0)
    kept = {("good", "a"): ("1.25", "2026-11-24T02:00Z"), ("good", "b"): ("3", "2026-11-23T02:00Z")}
    assert bench.row(part, Goal("a", least=2), outcome, kept)[2:] == ("≥ 2", "2", "1.5 to 2.5", "1.25 (2026-11-24)")
    assert bench.row(part, Goal("deep.b.mean"), outcome, kept)[2:] == ("–", "1", "0.5 to 1.5", "3 (2026-11-23)")


def test_worlds_with_shards_divide_every_large_fragment_and_tell_states_apart(tmp_path: Path) -> None:
    cluster = load_cluster((path := write_files(tmp_path, 2e6, shards=4, pieces=PIECES)).parent / "cluster.json")
    assert len(shards_of(cluster, "global")) == len(shards_of(cluster, "eu")) == 4
    parameter_map = parameter_map_of(load_run(path))
    cut = {group for group in parameter_map.groups if parameter_map.groups.count(group) == PIECES}
    for own in deal(parameter_map.fragments, 4):
        assert len({parameter_map.groups[fragment] for fragment in own} & cut) > len(cut) / 2
    names = ["global", "eu", *(shard_name(server, i) for server in ("global", "eu") for i in range(2))]
    assert roles(dict.fromkeys(names)) == ["global", "eu", "global.shard-1", "eu.shard-1"]  # type: ignore[arg-type]
    one = {"a": torch.zeros(2)}
    assert same(one, {"a": torch.zeros(2)})
    assert not same(one, {"a": torch.ones(2)}) and not same(one, {**one, "b": torch.zeros(1)})


@pytest.mark.slow
def test_the_table_is_printed_by_one_command() -> None:
    command = [sys.executable, "-m", "benchmarks", "--quick", "--only", "kernels"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == {
        "benchmarks": 1,
        "failed": 0,
        "judged": 0,
        "met": 0,
        "busy": 0,
    }
    assert "merge.vs_memcpy" in ended.stdout


def test_all_benchmarks_end_within_the_time_of_all() -> None:
    assert sum(part.minutes for part in PARTS) <= bench.ALL_MINUTES
    assert bench.minutes_of(PARTS, 0.0) >= PARTS[0].minutes
    two = (Part("a", (), minutes=10.0), Part("b", (), minutes=10.0))
    passed = bench.ALL_MINUTES - 22
    assert bench.minutes_of(two, passed) == 12  # what the other one does not need
    assert bench.minutes_of(two[1:], passed + 12) == 10
    assert bench.minutes_of(two[1:], 0.0) == bench.LONGEST_MINUTES
    assert bench.minutes_of(two[1:], bench.ALL_MINUTES + 1) == 0
    assert [bench.minutes_of(two, at, quick=True) for at in (0.0, 40.0, 50.0)] == [bench.QUICK_MINUTES, 5.0, 0.0]


# It leaves a process that no longer is its child, in a session of its own.
LEAVES = """
import subprocess, sys, time
burn = [sys.executable, "-c", "import time; time.sleep(600)"]
start = f"import subprocess; print(subprocess.Popen({burn!r}, start_new_session=True, stdout=-3).pid)"
print(subprocess.run([sys.executable, "-c", start], stdout=-1, text=True).stdout, flush=True)
time.sleep(float(sys.argv[1]))
print('{"a": 1}')
"""
RUNS = """
import subprocess, sys, time
from pathlib import Path
from benchmarks import __main__ as bench
from benchmarks import common
from benchmarks.goals import Goal, Part

folder, seconds = Path(sys.argv[1]), sys.argv[2]
bench.ROOT, bench.LOGS, log = folder, folder / "logs", folder / "logs/leaves.log"
common.adopt_orphans()
if seconds == "0":
    print(bench.run(Part("leaves", (Goal("a"),), (seconds,), quick=False), False, 10).figures["a"])
else:
    log.parent.mkdir()
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-m", "benchmarks.leaves", seconds], stdout=file, cwd=folder)
    deadline = time.monotonic() + 120
    while not log.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    bench.end(process, set())
"""


@pytest.mark.parametrize("seconds", ["0", "600"])
def test_nothing_that_a_benchmark_has_started_goes_on_after_it(tmp_path: Path, seconds: str) -> None:
    """Whether it ends or its time is over."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/leaves.py").write_text(LEAVES)
    command = [sys.executable, "-c", RUNS, str(tmp_path), seconds]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=560)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == ("1.0\n" if seconds == "0" else "")
    left = int((tmp_path / "logs/leaves.log").read_text().split()[0])
    with pytest.raises(ProcessLookupError):
        os.kill(left, 0)


REPORTS = """
import sys, time
from pathlib import Path
from benchmarks import common
common.RESULTS, timed = Path(sys.argv.pop(1)), sys.argv.pop(1) == "timed"
options = common.command_line("").parse_args()
deadline = time.monotonic() + 120
while common.others_share() <= 1.5 * common.BUSY and time.monotonic() < deadline:
    time.sleep(0.05)
common.report("some", {"a": 1.0}, options, lambda metric: "", timed=timed)
"""


def test_what_others_take_of_the_processors_is_seen_and_not_recorded(tmp_path: Path) -> None:
    """Processes that a program has not started are others."""
    results = tmp_path / "results.csv"
    with ExitStack() as others:
        for _ in range(1 + (os.cpu_count() or 1) // 4):
            others.callback(others.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"])).kill)
        for timed in ("timed", "counted"):
            command = [sys.executable, "-c", REPORTS, str(results), timed, "--record"]
            ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
            assert json.loads(ended.stdout)["others_share"] > common.BUSY
            if timed == "timed":
                assert re.match(r"some: not recorded: other processes took \d+% of the processors", ended.stderr)
                assert ended.returncode == 1 and not results.exists()
    assert ended.returncode == 0 and "some,a,1," in results.read_text()


# Three processes compute: a child that is killed, a grandchild that is killed after its parent, and one that runs.
KILLS = """
import json, os, signal, subprocess, sys, time
from benchmarks import common

burn = [sys.executable, "-c", "while True: pass"]
start = f"import subprocess; p = subprocess.Popen({burn!r}); print(p.pid, flush=True); p.wait()"
common.command_line("").parse_args()
common._BEGAN = before = common._all_s()
child, running = subprocess.Popen(burn), subprocess.Popen(burn)
parent = subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True)
grandchild = int(parent.stdout.readline())
try:
    deadline = time.monotonic() + 120
    while min(used_s := [common.processor_s(pid)[pid] for pid in (child.pid, grandchild, running.pid)]) < 1.5:
        assert time.monotonic() < deadline, used_s
        time.sleep(0.05)
    child.kill()
    child.wait()
    parent.kill()
    parent.wait()
    os.kill(grandchild, signal.SIGKILL)
    while "State:\\tZ" not in open(f"/proc/{grandchild}/status").read():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    after, share = common._all_s(), common.others_share()
finally:
    for pid in (running.pid, grandchild):
        os.kill(pid, signal.SIGKILL)
busy_s, own_s, at_s = (b - a for b, a in zip(after, before))
print(json.dumps({"used": sum(used_s), "own": own_s, "busy": busy_s, "others": share * at_s * os.cpu_count()}))
"""


def test_what_a_benchmark_kills_counts_as_its_own() -> None:
    """Also what a killed process has started and nobody has waited for, and what runs yet."""
    ended = subprocess.run([sys.executable, "-c", KILLS], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["own"] >= found["used"] >= 4.5
    assert found["others"] <= found["busy"] - found["used"] + 0.5, found


def test_quick_sets_what_is_not_stated() -> None:
    parser = common.command_line("", quick={"rounds": 2, "size": 4})
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--size", type=int, default=100)
    assert vars(parser.parse_args([])) == {"quick": False, "record": False, "note": "", "rounds": 9, "size": 100}


@pytest.mark.parametrize("said", [["--quick", "--rounds", "3"], ["--rounds", "3", "--quick"]])
def test_what_is_stated_holds_beside_quick(said: list[str]) -> None:
    parser = common.command_line("", quick={"rounds": 2, "size": 4})
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--size", type=int, default=100)
    found = parser.parse_args(said)
    assert (found.rounds, found.size, found.quick) == (3, 4, True)
    with pytest.raises(SystemExit):
        parser.parse_args([*said, "--record"])


def test_an_interval_of_a_median_holds_what_it_says() -> None:
    assert common.spread("a", [3.0, 1.0, 2.0]) == {"a": 2.0, "a_low": 1.0, "a_high": 3.0}
    # Of nine values, the second and the eighth: 1 − 2·(1 + 9)/512 = 0.961.
    assert common.spread("a", list(range(1, 10))) == {"a": 5, "a_low": 2, "a_high": 8}
    assert common.ratio("a", [2.0, 4.0, 6.0], [1.0, 1.0, 1.0])["a"] == 4.0


@pytest.mark.parametrize("name", ["fp32", "topk2"])
def test_what_is_timed_of_a_codec_is_compiled(name: str) -> None:
    found = codec.resources(make_codec(codec.CONFIGS[name]), targets=1)
    assert [set(kernels) for kernels in found.values()] == [{"quantize", "dequantize"}]


def test_the_least_time_of_a_step(monkeypatch):
    """Of 1 s of compute in eight micro-batches; codes have 8.125 and 4.125 bits of 16, or of 32."""
    for bf16, bits in ((True, 16), (False, 32)):
        monkeypatch.setattr(hide, "processor_has_bf16", lambda bf16=bf16: bf16)
        for name, commit_s, least_s in (
            ("delayed", 1.0, 1.0),
            ("delayed", 2.0, 2.0),
            ("delayed_8_4", 4.0, max(1.0, 4.0 * 12.25 / (2 * bits))),
            ("exact", 1.0, 2.0),
            ("zero1", 1.0, 1.0 + 0.5 - 1 / 12 + 0.5 - 1 / 24),
            ("zero1", 0.1, 1.0 + 0.05 - 1 / 24),
            ("deepspeed", 1.0, 1.0 + 0.5 - 1 / 12 + 0.5),
        ):
            assert hide.way_bound_s(hide.WAYS[name], 1.0, commit_s, 8) == pytest.approx(least_s, rel=1e-5), name
