"""Plays the stories of `supervisor.txt` with real processes; each must come out as it stands, and leave nothing.

A story has a title, processes with scripts of bash, and what was told (sorted, since processes end at the same time),
the exit code and its reason at last. `with` sets what `Supervisor` and `RestartConfig` take. A process is

    NAME [server|shard|helper|relay] [again] [group=…] [after=…]: SCRIPT

again: it may be started again. after: the server that it depends on. A script may `now` name what has happened, and
`await` it, as what happens to others: `died.GROUP`, `lost.GROUP` (given up), `ended.NAME`, `trouble`; what it may
`tell` stands among what was told.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from geotrain.config import RestartConfig
from geotrain.launch import supervisor as supervisor_module
from geotrain.launch.supervisor import ProcessSpec, Supervisor, guarded
from geotrain.monitor.events import ProcessDied, ProcessEnded, Trouble
from geotrain.outer.events import Event
from tests.support.process_trees import marked, new_mark, until

FILE = Path(__file__).with_name("supervisor.txt")
STORIES = FILE.read_text().strip().split("\n\n")
WORDS = """
now() { touch "$HAPPENED/$1"; }
tell() { echo "$*" >> "$HAPPENED/told"; }
await() { until [ -e "$HAPPENED/$1" ]; do sleep 0.05; done; }
"""
ROLES = {"server", "shard", "helper"}
BUSY_S = 120.0  # until a story has ended, on a busy machine


def processes(story: list[str], env: dict[str, str]) -> list[ProcessSpec]:
    made: list[ProcessSpec] = []
    for line in story:
        head, _, script = line.partition(": ")
        name, *words = head.split()
        keys = dict(word.split("=") for word in words if "=" in word)
        group, command = keys.get("group", name), ("bash", "-c", WORDS + script)
        made.append(
            ProcessSpec(
                name,
                command if "relay" in words else guarded(command, grace_s=1.0),
                env,
                role=next(iter(ROLES & {*words}), "worker"),  # type: ignore[arg-type]
                respawn=(lambda g=group: [p for p in made if p.group_name == g]) if "again" in words else None,
                relay="relay" in words,
                group=group,
                depends_on=keys.get("after", ""),
            )
        )
    return made


def played(story: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Give the story with what happened now."""
    title, *lines = [line for line in story.splitlines() if not line.startswith("> ")]
    keys = dict(word.split("=") for line in lines if line.startswith("with ") for word in line.split()[1:])
    monkeypatch.setattr(supervisor_module, "LEAF_DRAIN_S", float(keys.get("leaf_drain_s", 30.0)))
    mark, told = new_mark(), list[str]()

    def hear(event: Event) -> None:
        match event:
            case ProcessDied(group, how, None):
                told.append(f"{group} {how}: given up")
                (folder / f"lost.{group}").touch()
            case ProcessDied(group, how, pause_s):
                told.append(f"{group} {how}: again in {pause_s:g} s")
                (folder / f"died.{group}").touch()
            case ProcessEnded(name):
                (folder / f"ended.{name}").touch()
            case Trouble(what):
                told.append(what)
                (folder / "trouble").touch()

    def in_time() -> None:
        assert time.monotonic() < deadline_s, f"it goes on after {told}"

    deadline_s = time.monotonic() + BUSY_S
    restart = RestartConfig(
        limit=int(keys.get("limit", 3)), first_s=float(keys.get("first_s", 0.05)), longest_s=600.0, window_s=6000.0
    )
    with Supervisor(folder, float(keys.get("drain_s", 1000.0)), restart, "needs_all" in keys, hear) as running:
        env = {**mark, "HAPPENED": str(folder), "SUPERVISOR": str(os.getpid())}
        for process in processes([line for line in lines if not line.startswith("with ")], env):
            running.start(process)
        outcome = running.wait(in_time)
        assert until(lambda: marked(mark) == [])
    if (folder / "told").exists():
        told += (folder / "told").read_text().splitlines()
    reason = re.sub(
        r"(\n  \| .*)(?:\n  \| .*){2,}(\n  \| .*)", r"\1 …\2", outcome.reason.replace(str(folder), "LOGS")
    )
    found = [*sorted(told), *f"code {outcome.code}: {reason}".rstrip(": ").splitlines()]
    return "\n".join([title, *lines, *(f"> {line}" for line in found)])


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.splitlines()[0][2:])
def test_supervisors(
    story: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    now = played(story, tmp_path, monkeypatch)
    if request.config.option.rewrite:
        FILE.write_text(FILE.read_text().replace(story, now))
    assert now == story
