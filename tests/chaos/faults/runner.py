"""A real run under faults: launches it, does to its processes and links what a scenario says, and keeps what is
needed to audit it afterwards."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import psutil

from geotrain.commands.operate import LiveRun
from geotrain.common.names import GLOBAL
from geotrain.config import ClusterConfig, RunConfig, load_cluster, load_run, shard_name, shards_of
from geotrain.emulate import wan
from geotrain.launch.launcher import WAN_CONTROL
from geotrain.net.storage.snapshots import META, SNAPSHOTS, checked_meta
from geotrain.net.transport.grpc_client import Unreachable
from geotrain.outer.messages import Refused
from tests.chaos.faults.scenario import Event, Fault
from tests.support.process_trees import until

KEPT = "faulty-run.pickle"
POLL_S = 0.1
SOON_S = 0.01  # a server that ends may be gone soon
KEEP_S = 0.5  # between looks at the journals: a segment stays for much longer
SAMPLE_TURNS = 10  # of those, between samples of memory and open files
LATE_S = 120.0  # that faults may be
STOP_S = 60.0  # for the run's end after Ctrl-C
FINISH_S = 180.0  # for an orderly end


@dataclass(frozen=True)
class Found:
    """A process of the run. kind: as in `Fault`; of: its worker, server or shard."""

    pid: int
    kind: str
    of: str


@dataclass
class Samples:
    """(seconds, resident bytes, open files) of one process while it lived."""

    found: Found
    points: list[tuple[float, int, int]] = field(default_factory=list)


class FaultyRun:
    """A context manager: entering launches the run in its file's folder, leaving ends it and waits for all its
    processes.

    archive: the servers' whole journals and all snapshots are kept there, by hard links: the run itself drops them.
    """

    def __init__(self, run_file: Path, cluster_file: Path, archive: Path, env: dict[str, str] | None = None) -> None:
        self.files = run_file, cluster_file
        self.run: RunConfig = load_run(run_file)
        self.cluster: ClusterConfig = load_cluster(cluster_file)
        self.folder = self.run.run_folder.absolute()
        self.archive = archive
        self.env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        self.regions = {region.name: [w.name for w in region.workers] for region in self.cluster.regions}
        self.shards = {
            site: tuple(shard_name(site, i) for i in range(len(shards_of(self.cluster, site))))
            for site in (GLOBAL, *self.regions)
        }
        self.servers = [name for site, shards in self.shards.items() for name in (site, *shards)]
        self.done: list[tuple[float, Fault]] = []  # (Unix time, what was done)
        self.samples: dict[int, Samples] = {}
        self.noted: dict[str, Any] = {}  # what else is known of it, once it has ended
        self.exit_code: int | None = None
        self._ended = threading.Event()
        self._keeping = threading.Thread(target=self._keep_on, daemon=True)

    def __enter__(self) -> FaultyRun:
        self.start("launch", *map(str, self.files))
        self._keeping.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._ended.set()
        self._keeping.join()

    def start(self, *words: str) -> None:
        """Start the command of GeoTrain that launches the run; its output is added to `log`."""
        self.log = self.folder.parent / "launch.log"
        with self.log.open("ab") as log:
            self.launcher = subprocess.Popen(
                [sys.executable, "-m", "geotrain", *words],
                cwd=self.folder.parent, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def finish(self, kills: Sequence[Fault] = (), tell: Callable[[str], None] = lambda text: None) -> None:
        """End the run as `geotrain stop` does: workers train what they were lent, and all of it reaches the global
        weights. What goes on after FINISH_S is left to `stop`. kills: done meanwhile; who has ended is left alone."""
        with suppress(Refused, Unreachable):
            LiveRun(self.folder).steer("stop")
        begin_s, waiting, ending = time.monotonic(), list(kills), dict[str, float]()  # server → since when it ends
        while self.launcher.poll() is None and (passed_s := time.monotonic() - begin_s) < FINISH_S:
            for server in (GLOBAL, *self.regions):
                if server not in ending and self._ends(server):
                    ending[server] = passed_s
            for fault in list(waiting):
                when = fault.when
                if passed_s >= (ending.get(when.source, inf) + fault.after_s if isinstance(when, Event) else when):
                    waiting.remove(fault)
                    if self._inflict(fault, []):
                        at_end = ", at its end" if isinstance(when, Event) else ""
                        tell(f"{passed_s:6.1f} s after stop{at_end}: {fault}")
            time.sleep(SOON_S)

    def _ends(self, server: str) -> bool:
        """Whether it has written its last snapshot."""
        with suppress(OSError, ValueError):
            newest = max((self.folder / "servers" / server / SNAPSHOTS).glob(f"*/{META}"))
            return bool(checked_meta(newest.read_bytes())["meta"]["ended"])
        return False

    def stop(self) -> None:
        """End the run by Ctrl-C at the launcher, if it is still on: servers write their last snapshots."""
        if self.launcher.poll() is None:
            self.launcher.send_signal(signal.SIGINT)
        try:
            self.exit_code = self.launcher.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.launcher.kill()
            self.exit_code = self.launcher.wait()

    # -- what is there

    def processes(self) -> list[Found]:
        found = []
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.launcher.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    known = self._recognize(process.pid, process.cmdline())
                    found += [known] if known else []
        return found

    def _recognize(self, pid: int, words: list[str]) -> Found | None:
        """By its command line."""
        if not words:
            return None
        guarded = any(word.endswith("launch/guard.py") for word in words[:5])
        if "serve" in words:
            which = words[words.index("serve") + 1 : words.index("--run")]
            kind = {"global": "global", "region": "server", "shard": "shard"}[which[0]]
            of = shard_name(which[1], int(which[2])) if kind == "shard" else which[-1]
            return Found(pid, "guard-of-server" if guarded else kind, of)
        if "--worker" in words:
            worker = words[words.index("--worker") + 1]
            if guarded:
                return Found(pid, "guard", worker)
            if any(word.startswith("--world_info") for word in words):
                return Found(pid, "deepspeed", worker)
            if any(word.startswith("--local_rank") for word in words):
                return Found(pid, "rank", worker)
            return Found(pid, "runner", worker)
        if any(word.endswith("geotrain/emulate/pump.py") for word in words):
            return Found(pid, "pump", "guarded" if guarded else "wan")
        return None

    def pids(self, kind: str, of: str) -> list[int]:
        """kind "region": all processes of its server, of that's shards, and of its workers."""
        found = self.processes()
        if kind == "region":
            return [f.pid for f in found if f.of in (of, *self.shards[of], *self.regions[of])]
        return [f.pid for f in found if (f.kind, f.of) == (kind, of)]

    # -- what happened

    def events(self, source: str) -> list[dict[str, Any]]:
        """The event log of a worker, a region, "global" or "launcher"."""
        return read_events(self.folder, source)

    def jobs_of(self, worker: str) -> int:
        """Jobs that it has trained until now."""
        return len(read_events(self.folder, worker, "JobTrained"))

    def happened(self, event: Event) -> bool:
        return len(read_events(self.folder, event.source, event.kind)) >= event.count

    def wait_for(self, condition: Callable[[], bool], within_s: float) -> bool:
        """False when it does not come true in time, or when the run ends before."""
        until(lambda: condition() or self.launcher.poll() is not None, within_s)
        return condition()

    def impaired_packets(self) -> dict[str, int]:
        """Count what befell packets, by kind, as each incarnation of the pump told at its end."""
        counts = Counter[str]()
        for line in (self.folder / "logs/wan.log").read_text().splitlines():
            with suppress(ValueError, KeyError):
                counts.update(json.loads(line)["impaired_packets"])
        return dict(counts)

    # -- faults

    def play(self, faults: Sequence[Fault], seconds: float, tell: Callable[[str], None] = lambda text: None) -> None:
        """Do each when its time or event has come, for `seconds`, and longer if some could not be done by then: on a
        busy machine, to fill a disk alone takes seconds. Raises RuntimeError when the run ends."""
        begin, waiting, ends = time.monotonic(), list(faults), list[tuple[float, Callable[[], None]]]()
        while (passed_s := time.monotonic() - begin) < seconds + (LATE_S if waiting else 0.0):
            if self.launcher.poll() is not None:
                raise RuntimeError(f"the run has ended: {self.log.read_text()[-3000:]}")
            for fault in [f for f in waiting if self._is_due(f, passed_s)]:
                if self._inflict(fault, ends):
                    waiting.remove(fault)
                    tell(f"{passed_s:6.1f} s: {fault}")
            for until_s, end in list(ends):
                if time.monotonic() >= until_s:
                    ends.remove((until_s, end))
                    end()
            time.sleep(POLL_S)
        for _, end in ends:
            end()

    def _is_due(self, fault: Fault, passed_s: float) -> bool:
        return self.happened(fault.when) if isinstance(fault.when, Event) else passed_s >= fault.when

    def _inflict(self, fault: Fault, ends: list[tuple[float, Callable[[], None]]]) -> bool:
        """False when there is no such process now: later, then. ends: gets what ends the fault, and when."""
        until_s = time.monotonic() + fault.for_s
        if fault.what == "fill":
            if not self.pids("global", "global"):  # a launcher begins, which would not without room, and rightly
                return False
            ends.append((until_s, fill(self.folder.parent)))
        elif fault.what in ("starve", "files"):
            # One that has not begun to listen yet still loads its modules, for which there would be no descriptor.
            pids = [pid for pid in self.pids(fault.kind, fault.of) if pid == self._listening(fault.of)]
            with suppress(psutil.NoSuchProcess):
                ends += [(until_s, {"starve": starve, "files": take_files}[fault.what](pid)) for pid in pids[-1:]]
            if not pids:
                return False
        elif fault.what not in ("kill", "stop"):
            try:
                wan.disturb(self.folder / WAN_CONTROL, fault.of, fault.what, *fault.numbers)
            except OSError:
                return False
        elif fault.kind == "launcher":
            self.launcher.kill()
            self.launcher.wait()
            self.start("launch", *map(str, self.files), "--resume")
        else:
            pids = self.pids(fault.kind, fault.of)
            if not pids:
                return False
            for pid in pids if fault.kind == "region" else pids[-1:]:
                _signal(pid, signal.SIGKILL if fault.what == "kill" else signal.SIGSTOP)
            if fault.what == "stop":
                ends.append((until_s, partial(_signal, pids[-1], signal.SIGCONT)))
        self.done.append((time.time(), fault))
        return True

    def _listening(self, server: str) -> int | None:
        """The process that listens as this server or shard."""
        with suppress(OSError, ValueError, KeyError):
            return int(json.loads((self.folder / "servers" / server / "listening.json").read_text())["pid"])
        return None

    # -- what is kept

    def keep(self, **noted: Any) -> None:
        """Write down beside the run what only this process knows of it."""
        self.noted = noted
        (self.folder.parent / KEPT).write_bytes(pickle.dumps((self.done, self.samples, self.noted)))

    @staticmethod
    def kept(disk: Path) -> FaultyRun:
        """A run that has ended and was kept, to look at what it has left."""
        run = FaultyRun(disk / "run.json", disk / "cluster.json", disk / "archive")
        run.done, run.samples, run.noted = pickle.loads((disk / KEPT).read_bytes())
        return run

    def _keep_on(self) -> None:
        turn = 0
        while not self._ended.wait(KEEP_S):
            self.keep_journals()
            turn += 1
            if turn % SAMPLE_TURNS == 0:
                self._sample()
        self.keep_journals()

    def keep_journals(self) -> None:
        """Links to what servers and shards have written; a segment that still grows is the same file."""
        for server in self.servers:
            here, there = self.folder / "servers" / server, self.archive / server
            for name in ("journal", "snapshots"):
                (there / name).mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                for segment in (here / "journal").glob("*.journal"):
                    with suppress(FileExistsError, FileNotFoundError):
                        os.link(segment, there / "journal" / segment.name)
                for snapshot in (here / "snapshots").iterdir():
                    kept, partial_copy = there / "snapshots" / snapshot.name, there / "snapshot.partial"
                    if snapshot.name.isdecimal() and not kept.exists():
                        shutil.rmtree(partial_copy, ignore_errors=True)
                        with suppress(FileNotFoundError, shutil.Error):  # it may be deleted meanwhile
                            shutil.copytree(snapshot, partial_copy, copy_function=os.link)
                            partial_copy.rename(kept)

    def _sample(self) -> None:
        for found in [Found(self.launcher.pid, "launcher", "here"), *self.processes()]:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process = psutil.Process(found.pid)
                point = (time.time(), process.memory_info().rss, process.num_fds())
                self.samples.setdefault(found.pid, Samples(found)).points.append(point)


def fill(disk: Path) -> Callable[[], None]:
    """Leave no room on this disk, a tmpfs of its own, by making it as small as what is on it (to write it full would
    take ten seconds a gigabyte where memory comes slowly); returns what makes room again."""
    whole = os.statvfs(disk)
    for _ in range(100):  # it may grow before it is made small, which is refused then
        now = os.statvfs(disk)
        with suppress(subprocess.CalledProcessError):
            _resize(disk, (now.f_blocks - now.f_bfree) * now.f_frsize)
            return partial(_resize, disk, whole.f_blocks * whole.f_frsize)
    raise RuntimeError(f"{disk} cannot be made as small as what is on it")


def _resize(disk: Path, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True, stderr=subprocess.DEVNULL)


def starve(pid: int) -> Callable[[], None]:
    """Let a process have a tenth of its time only; returns what ends that."""
    over = threading.Event()

    def flicker() -> None:
        while not over.is_set():
            _signal(pid, signal.SIGSTOP)
            over.wait(0.45)
            _signal(pid, signal.SIGCONT)
            over.wait(0.05)

    thread = threading.Thread(target=flicker, daemon=True)
    thread.start()

    def end() -> None:
        over.set()
        thread.join()

    return end


def take_files(pid: int) -> Callable[[], None]:
    """Let a process open no more files than it has open; returns what ends that."""
    process = psutil.Process(pid)
    before = process.rlimit(psutil.RLIMIT_NOFILE)
    process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds(), before[1]))

    def end() -> None:
        with suppress(psutil.NoSuchProcess):
            process.rlimit(psutil.RLIMIT_NOFILE, before)

    return end


def read_events(folder: Path, source: str, kind: str | None = None) -> list[dict[str, Any]]:
    """Read the events of a run's folder, all or those of one kind; a line that is being written is left out. Many
    waits look here again and again: only lines that name the kind are parsed."""
    servers = folder / "servers" / source / "events.jsonl"
    path = servers if servers.exists() else folder / "events" / f"{source}.jsonl"
    events = []
    for name in (path.with_name(path.name + ".1"), path):
        with suppress(FileNotFoundError):
            for line in name.read_text().splitlines():
                with suppress(ValueError):
                    if kind is None or (f'"{kind}"' in line and json.loads(line)["event"] == kind):
                        events.append(json.loads(line))
    return events


def kinds_done(run: FaultyRun) -> dict[str, int]:
    """Count how often each was done: "kill rank", …, "cut link"."""
    return dict(Counter(f"{fault.what} {fault.kind or 'link'}" for _, fault in run.done))


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
