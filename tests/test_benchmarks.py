"""The benchmarks' common parts: one table of goals, short forms, intervals, and who else uses the machine."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as bench
from benchmarks import common
from benchmarks.goals import PARTS, Goal, Part
from benchmarks.servers.vaults import PIECES, roles, same
from benchmarks.servers.world import write_files
from geotrain.config import load_cluster, load_run, vault_name, vaults_of
from geotrain.layout import layout_of
from geotrain.pieces import deal

ROOT = Path(__file__).parent.parent
# Run by hand: they take hours and read kept rows, or need a run's files or a GPU.
BY_HAND = {"confirm", "delay", "gap", "gpu", "loss_curve"}


def programs() -> dict[str, Path]:
    """Name → file of each program in benchmarks/."""
    files = {path.stem: path for path in (ROOT / "benchmarks").glob("*.py")}
    files |= {path.parent.name: path for path in (ROOT / "benchmarks").glob("*/__main__.py")}
    return {name: path for name, path in files.items() if "__main__" in path.read_text() and name != "__main__"}


def test_every_benchmark_is_in_the_table_and_has_a_short_form() -> None:
    found = programs()
    assert {part.module for part in PARTS} == set(found) - BY_HAND
    for part in PARTS:
        calls = [n for n in ast.walk(ast.parse(found[part.module].read_text())) if isinstance(n, ast.Call)]
        lines = [c for c in calls if getattr(c.func, "id", "") == "command_line"]
        assert part.quick == any(k.arg == "quick" for c in lines for k in c.keywords), part.module


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
        return bench.judge(goal, bench.run(Part(name, (goal,), minutes=minutes, quick=False), False), quick)

    assert verdict("good", Goal("a", least=2)) == verdict("good", Goal("deep.b.mean", most=1)) == "yes"
    assert verdict("good", Goal("a", most=0)) == "no"
    assert verdict("good", Goal("a")) == verdict("good", Goal("a", least=2), quick=True) == "–"
    assert verdict("good", Goal("c")) == "not measured"
    assert verdict("busy", Goal("a", least=2)) == "busy"
    assert verdict("broken", Goal("a")) == "exit code 3, see logs/broken.log"
    assert verdict("mute", Goal("a")) == "its last line is no JSON object, see logs/mute.log"
    assert verdict("slow", Goal("a"), minutes=0.02) == "it did not end within 0.02 minutes"
    part = Part("good", ())
    outcome = bench.run(part, False)
    kept = {("good", "a"): ("1.25", "2026-11-24T02:00Z"), ("good", "b"): ("3", "2026-11-23T02:00Z")}
    assert bench.row(part, Goal("a", least=2), outcome, kept)[2:] == ("≥ 2", "2", "1.5 to 2.5", "1.25 (2026-11-24)")
    assert bench.row(part, Goal("deep.b.mean"), outcome, kept)[2:] == ("–", "1", "0.5 to 1.5", "3 (2026-11-23)")


def test_worlds_with_vaults_divide_every_large_fragment_and_tell_states_apart(tmp_path: Path) -> None:
    cluster = load_cluster((path := write_files(tmp_path, 2e6, vaults=4, pieces=PIECES)).parent / "cluster.json")
    assert len(vaults_of(cluster, "global")) == len(vaults_of(cluster, "eu")) == 4
    layout = layout_of(load_run(path))
    whole = [f for f in layout.fragments if f.numel > max(g.numel for g in layout.fragments) / 2]
    for own in deal(layout.pieces, 4):
        assert {piece.fragment for piece in own} >= {fragment.index for fragment in whole}
    names = ["global", "eu", *(vault_name(server, i) for server in ("global", "eu") for i in range(2))]
    assert roles(dict.fromkeys(names)) == ["global", "eu", "global.vault-1", "eu.vault-1"]  # type: ignore[arg-type]
    one = {"a": torch.zeros(2)}
    assert same(one, {"a": torch.zeros(2)})
    assert not same(one, {"a": torch.ones(2)}) and not same(one, {**one, "b": torch.zeros(1)})


@pytest.mark.slow
def test_the_table_is_printed_by_one_command() -> None:
    command = [sys.executable, "-m", "benchmarks", "--quick", "--only", "kernels"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == {"benchmarks": 1, "failed": 0, "judged": 0, "met": 0}
    assert "merge.vs_memcpy" in ended.stdout


def test_what_others_take_of_the_processors_is_seen_and_not_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process that this one has not waited for counts as another's; one that it has waited for does not."""
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results.csv")
    monkeypatch.setattr(common, "_BEGAN", common._processor_s())
    with ExitStack() as others:
        for _ in range(1 + (os.cpu_count() or 1) // 4):
            others.callback(others.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"])).kill)
        deadline = time.monotonic() + 60
        while (share := common.others_share() or 0.0) <= common.BUSY:
            assert time.monotonic() < deadline, share
            time.sleep(0.05)
        options = common.command_line("").parse_args(["--record"])
        with pytest.raises(SystemExit, match=r"some: not recorded: other processes took \d+% of the processors"):
            common.report("some", {"a": 1.0}, options, lambda metric: "")
        assert json.loads(capsys.readouterr().out)["others_share"] > common.BUSY
        assert not common.RESULTS.exists()
        common.report("some", {"a": 1.0}, options, lambda metric: "", timed=False)
        assert "some,a,1," in common.RESULTS.read_text()


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
