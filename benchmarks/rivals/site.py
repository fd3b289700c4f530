"""Two regions on this machine, one emulated link between them, and the processes that train there.

The link joins two network namespaces, as `geotrain launch` makes them for its emulated runs. Whatever a method needs
beside the two trainers (torchft's lighthouse, our servers) runs in these namespaces too: what all share stands in the
first region. So every byte that leaves a region is counted at its only device.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.common import processor_s
from benchmarks.processes import start_guarded
from benchmarks.rivals.methods import OUTER
from benchmarks.rivals.task import BATCH, LENGTH, LOCAL_STEPS, REGIONS, Task
from geotrain.common.files import write_whole
from geotrain.config import LinkConfig
from geotrain.emulate import wan

OWN = ROOT / "build/rivals"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
INSTALL_S, END_S = 1200.0, 30.0
FIRST_PORT = 7700
ENVIRONMENT = {"PYTHONPATH": str(OWN), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}  # of each process


def make_folder() -> None:
    """Make the folder in which trainers are started. They see this package alone: transformers would take kernels/
    for another one."""
    OWN.mkdir(parents=True, exist_ok=True)
    if not (link := OWN / "benchmarks").exists():
        link.symlink_to(ROOT / "benchmarks")


def environment() -> tuple[Path | None, str]:
    """The rivals' Python, and why there is none. It is made at the first call, which takes a minute or two."""
    python, made = OWN / "venv/bin/python", OWN / "requirements.txt"
    make_folder()
    if made.exists() and made.read_text() == REQUIREMENTS.read_text():
        return python, ""
    print(f"installing {REQUIREMENTS.name} into {OWN}/venv …", file=sys.stderr, flush=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(REQUIREMENTS)]
    try:
        subprocess.run([sys.executable, "-m", "venv", str(OWN / "venv")], check=True, timeout=INSTALL_S)
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"the environment could not be made: {error}"
    if done.returncode:
        return None, "pip: " + " ".join(done.stderr.split()[-40:])
    write_whole(made, REQUIREMENTS.read_text())
    return python, ""


class Site:
    """A link that is up, for one run. control: the pump's FIFO."""

    def __init__(self, folder: Path, up: wan.Wan, stack: ExitStack) -> None:
        self.folder, self.up, self.stack = folder, up, stack
        self.addresses = {region: up.addresses[region] for region in REGIONS}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, tuple[tuple[str, ...], str]] = {}
        self._used_s: dict[str, float] = {}

    def start(self, name: str, region: str, *command: str) -> None:
        """A process in a region's namespace; it ends with the site at the latest."""
        self._commands[name] = command, region
        netns = self.up.namespaces[region]
        self.processes[name] = start_guarded(
            self.stack, self.folder / f"{name}.log", command, netns, env=ENVIRONMENT, cwd=OWN
        )

    def kill(self, *names: str) -> None:
        """Kill the processes and all that they have started, at once."""
        for name in names:
            for child in processor_s(self.processes[name].pid):
                try:
                    os.kill(child, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self.processes.pop(name).wait(END_S)

    def again(self, name: str, *added: str) -> None:
        """Start a process that has ended, with the same command."""
        command, region = self._commands[name]
        self.start(name, region, *command, *added)

    def processor_s(self) -> dict[str, float]:
        """Seconds of processor time that each process and its children have used, the pump's left out. One that
        has ended counts as it was at the last call."""
        for name, process in self.processes.items():
            self._used_s[name] = max(self._used_s.get(name, 0.0), sum(processor_s(process.pid).values()))
        return dict(self._used_s)

    def cut(self, seconds: float) -> None:
        wan.disturb(self.folder / "control", "-".join(REGIONS), "cut", seconds)


@contextmanager
def site(folder: Path, gbps: float, rtt_ms: float) -> Iterator[Site]:
    """Raises SystemExit where links cannot be emulated."""
    if why_not := wan.cannot_emulate():
        raise SystemExit(f"benchmarks.rivals needs emulated links: {why_not}")
    make_folder()
    link = LinkConfig(regions=REGIONS, gbps=gbps, rtt_ms=rtt_ms)
    with ExitStack() as stack:
        up = stack.enter_context(wan.emulated({}, between=[link], control=folder / "control"))
        start_guarded(stack, folder / "wan.log", up.pump_command, keeps=up.pump_fds, env=ENVIRONMENT, cwd=OWN)
        yield Site(folder, up, stack)


def start_trainers(place: Site, task: Task, rivals: Path | None) -> None:
    """Start all processes of a run; they wait for each other."""
    path = place.folder / "task.json"
    task.write(path)
    python = str(rivals) if rivals and task.method not in OUTER else sys.executable
    if task.method in OUTER:
        serve(place, task)
    elif task.method.startswith("torchft"):
        lighthouse = str(Path(python).with_name("torchft_lighthouse"))
        bind = f"{place.addresses[REGIONS[0]]}:{task.ports[0]}"
        waits = ("--join_timeout_ms", "5000", "--heartbeat_timeout_ms", "5000")
        place.start("lighthouse", REGIONS[0], lighthouse, "--bind", bind, "--min_replicas", "1", *waits)
    for region in REGIONS:
        place.start(f"train-{region}", region, python, "-m", "benchmarks.rivals.worker", str(path), region)


def serve(place: Site, task: Task) -> None:
    """Our servers: the global one in the first region, a region server in each."""
    own = place.folder / "run"
    own.mkdir()
    samples = task.steps * len(REGIONS) * BATCH
    run = {
        "name": "rivals",
        "folder": str(own),
        "model": {"weights": str(Path(task.data).with_name(f"start-{task.seed}.safetensors"))},
        "data": {"train_samples": samples, "samples_per_step": BATCH, "sequence_length": LENGTH},
        "outer": {"local_steps": LOCAL_STEPS, **OUTER[task.method]},
    }
    where = place.addresses
    regions = [
        {"name": r, "server": {"host": where[r], "port": port}, "workers": [{"name": f"{r}-0"}]}
        for r, port in zip(REGIONS, task.ports[1:], strict=False)
    ]
    top = {"host": where[REGIONS[0]], "port": task.ports[0]}
    (own / "run.json").write_text(json.dumps(run))
    (own / "cluster.json").write_text(json.dumps({"name": "rivals", "global_server": top, "regions": regions}))
    command = (sys.executable, "-m", "geotrain", "serve")
    place.start("global", REGIONS[0], *command, "global", "--run", str(own / "run.json"))
    for region in REGIONS:
        place.start(f"server-{region}", region, *command, "region", region, "--run", str(own / "run.json"))


def marks(folder: Path, region: str) -> list[dict[str, Any]]:
    """Marks that a trainer has written so far."""
    path = folder / f"{region}.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def wait_until(place: Site, true: Callable[[], bool], within_s: float, what: str) -> str:
    """Wait; returns why it did not come true: a process that failed, or the time. what: that is waited for."""
    deadline, look_s = time.monotonic() + within_s, 0.0
    while not true():
        if time.monotonic() > look_s:  # what a process has used until it ends
            place.processor_s()
            look_s = time.monotonic() + 0.5
        for name, process in place.processes.items():
            if process.poll():
                return f"{name} ended with code {process.returncode}: {last_words(place.folder / f'{name}.log')}"
        if time.monotonic() > deadline:
            told = [f"{name}: {last_words(place.folder / f'{name}.log')}" for name in place.processes]
            print(f"{what} not within {within_s:g} s", *told, sep="\n  ", file=sys.stderr, flush=True)
            return f"{what} not within {within_s:g} s"
        time.sleep(0.05)
    return ""


def last_words(log: Path) -> str:
    """The last lines of a log, cut to a cell of a table."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-2:])[-300:]
