"""Runs every command in README and docs whose block says so, and checks all others against the real command line.

A block that begins with ```sh run is executed, line by line, in one folder; ```json NAME is saved there as NAME. Of
other ```sh blocks, and of commands within sentences, program, subcommand, options and files are checked by the
parsers that would take them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from geotrain.commands import cli
from geotrain.commands.evaluate import evaluate
from geotrain.commands.export import export_run
from tests.support.command_line import say
from tests.support.small_runs import status

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("[RC][EO]*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*/*.md")])
FENCE = re.compile(r"^```(\w*) ?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:geotrain|make|python|deepspeed) [^`]+)`", re.DOTALL)
BIN = Path(sys.executable).parent
SMALLER = 256  # samples of the tutorial's run
MORE = 512  # when it is resumed with more data: less than the tutorial's, as they
APP: Any = typer.main.get_command(cli.app)


@dataclass(frozen=True)
class Block:
    page: str
    kind: str
    note: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(page.name, *found) for found in FENCE.findall(page.read_text())]


def commands(text: str) -> Iterator[str]:
    """Lines of a shell block without their comments."""
    for line in text.replace("\\\n", " ").splitlines():
        if bare := re.sub(r"(^|\s{2,})#.*$", "", line).strip():
            yield bare


CHECKED = sorted({(b.page, c) for p in PAGES for b in blocks(p) if b.kind == "sh" for c in commands(b.text)})
SPOKEN = sorted({(p.name, " ".join(c.split())) for p in PAGES for c in INLINE.findall(FENCE.sub("", p.read_text()))})


@pytest.mark.parametrize(("page", "command"), CHECKED, ids=str)
def test_a_command_that_docs_give_is_one(page: str, command: str) -> None:
    check(shlex.split(command.partition(" | ")[0].partition(" > ")[0]))


@pytest.mark.parametrize(("page", "command"), SPOKEN, ids=str)
def test_a_command_that_docs_speak_of_is_one(page: str, command: str) -> None:
    """Checks program and options only, since a sentence may leave arguments out."""
    program, *rest = shlex.split(command.replace("…", ""))
    if program != "geotrain":
        check([program, *rest])
        return
    found, _ = subcommand(rest)
    known = {option for parameter in found.params for option in parameter.opts} | {"-h", "--help"}
    told = {word.partition("=")[0] for word in rest if word.startswith("-")}
    assert told <= known, f"{command!r}: no option {', '.join(sorted(told - known))}"


def test_no_command_hides_in_an_indented_block() -> None:
    for page in PAGES:
        hidden = re.findall(r"^    (?:geotrain|make|python|deepspeed) .*$", FENCE.sub("", page.read_text()), re.M)
        assert not hidden, f"{page.name}: put them in a ```sh block: {hidden}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_pages_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{page.name}: there is no {path}"
        assert not anchor or anchor in anchors(found), f"{page.name}: {path} has no heading {anchor!r}"


def check(words: list[str]) -> None:
    """Check one command. Raises what the program's own parser raises, or AssertionError."""
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):  # environment
        words = words[1:]
    program, *rest = words
    match program:
        case "geotrain":
            found, rest = subcommand(rest)
            assert not hasattr(found, "commands") or rest, f"which command of geotrain {found.name}?"
            context = found.make_context(found.name, list(rest))  # raises for unknown options and missing arguments
            for path in (value for value in context.params.values() if isinstance(value, Path)):
                assert not str(path).startswith("configs/") or (ROOT / path).exists(), f"there is no {path}"
        case "make":
            done = subprocess.run(["make", "--dry-run", *rest], cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        case "deepspeed" | "torchrun" if scripts := [word for word in rest if word.startswith("examples/")]:
            assert (ROOT / scripts[0]).exists(), f"there is no {scripts[0]}"
        case "deepspeed":
            check_deepspeed(rest)
        case "python" if rest[0] == "-c":
            compile(rest[1], "docs", "exec")
        case "python" if rest[0] == "-m":
            name, module = rest[1], ROOT / rest[1].replace(".", "/")
            found = [p for p in (module.with_suffix(".py"), module / "__main__.py") if p.exists()]
            assert found, f"there is no module {name}"
            source = found[0].read_text() + (ROOT / "benchmarks/common.py").read_text()
            for option in (word.partition("=")[0] for word in rest[2:] if word.startswith("--")):
                assert f'"{option}"' in source, f"{name} takes no {option}"
        case "python":
            script = ROOT / rest[0]
            assert script.exists(), f"there is no {script}"
            for option in (word.partition("=")[0] for word in rest[1:] if word.startswith("--")):
                assert f'"{option}"' in script.read_text(), f"{script.name} takes no {option}"
        case "bash":
            script = ROOT / rest[0]
            assert f"\n{rest[1]}() {{" in script.read_text(), f"{script.name} has no command {rest[1]}"
        case "pytest":
            assert all((ROOT / folder).is_dir() for folder in rest), f"one of {rest} is no folder"
        case ".":
            assert rest == [".venv/bin/activate"]  # where `make install` puts it
        case "pre-commit":
            assert rest == ["install"] and (ROOT / ".pre-commit-config.yaml").exists()
        case _:
            raise AssertionError(f"nothing here checks {program!r}: teach tests/project/test_docs.py how")


def subcommand(words: list[str]) -> tuple[Any, list[str]]:
    found = APP
    while hasattr(found, "commands") and words and not words[0].startswith("-"):
        assert words[0] in found.commands, f"geotrain has no command {words[0]!r}"
        found, words = found.commands[words[0]], words[1:]
    return found, words


def check_deepspeed(words: list[str]) -> None:
    from deepspeed.launcher.runner import parse_args

    from geotrain.launch import pretrain

    given = parse_args(words)
    assert (ROOT / given.user_script).samefile(ROOT / "launch/pretrain.py")
    arguments, sys.argv = sys.argv, ["pretrain.py", *given.user_args]
    try:
        assert pretrain.arguments().region
    finally:
        sys.argv = arguments


@pytest.mark.long("docs/tutorial.md", "geotrain/commands", "geotrain/data", "launch")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tutorial_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On less data."""
    monkeypatch.chdir(tmp_path)
    ran = run_page(ROOT / "docs/tutorial.md")
    assert len(ran) > 10
    last = json.loads((tmp_path / "runs/mine/servers/global/status.json").read_text())
    assert last["complete"] and last["committed_samples"] == MORE
    assert last["validation"]["loss"] < 5.6  # below log 264: validated, and it learns
    assert (last["validation"]["worker"], last["validation"]["samples"]) == ("global", MORE)  # the final weights
    export_run(Path("runs/mine"), Path("final"))
    by_export = evaluate(Path("final"), Path("data/mine/validation"), 32, 64)
    assert last["validation"]["loss"] == pytest.approx(by_export, rel=1e-5)
    rates = {
        event["start"]: event["lr"]
        for line in (tmp_path / "runs/mine/events/here-0.jsonl").read_text().splitlines()
        if (event := json.loads(line))["event"] == "JobTrained"
    }
    assert max(rates) >= MORE - 64  # of the last job
    assert rates[min(start for start in rates if start >= SMALLER)] > 0.001  # of the first with more
    assert "</svg>" in (tmp_path / "mine.svg").read_text()


@pytest.mark.long("README.md", "geotrain/commands", "geotrain/data", "launch")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_readme_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In what a clone holds, on less data. `make train` is left to `.ci/run`, which runs it as it is printed."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("runs", "data", "certs"))
    own = tmp_path / "examples/own-text/run.json"
    own.write_text(json.dumps(smaller(json.loads(own.read_text()), 288, 256)))
    monkeypatch.chdir(tmp_path)
    ran = run_page(ROOT / "README.md")
    assert len(ran) > 15 and {"make", ".", "python", "geotrain"} == {command.split()[0] for command in ran}
    top = status(own, "global")
    assert top["complete"] and top["committed_samples"] == 288


def smaller(run: dict[str, Any], samples: int, validate: int) -> dict[str, Any]:
    """A run file's content, with less data."""
    return {**run, "data": {**run["data"], "train_samples": samples}, "monitor": {"validate_every_samples": validate}}


def run_page(page: Path) -> list[str]:
    """Run a page's commands in order, in the working directory, which is to be their own; returns them."""
    shutil.copytree(ROOT / "configs", "configs")
    ran = []
    for block in blocks(page):
        if block.kind == "json":
            raw = json.loads(block.text)
            Path(block.note).write_text(json.dumps(smaller(raw, SMALLER, 128) if "data" in raw else raw))
        elif block.note == "run":
            for command in commands(block.text):
                run(re.sub(r"train_samples=\d+", f"train_samples={MORE}", command))
                ran.append(command)
    return ran


def run(command: str) -> None:
    """Run one command. Only what trains is a process; the rest runs in this one, which has imported what is slow to
    import."""
    words = shlex.split(command)
    if words in ([".", ".venv/bin/activate"], ["make", "train"]):
        return
    if words[:2] in (["geotrain", "launch"], ["python", "-c"]):
        environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        environment["DS_ACCELERATOR"] = "cpu"
        done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, timeout=560)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return
    assert words[0] == "geotrain", command
    said = say(*words[1:], cwd=Path.cwd())
    assert said.returncode == (3 if words[1] == "status" else 0), f"{command}\n{said.text}"
