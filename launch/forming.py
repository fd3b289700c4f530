"""Keeps what a worker is formed of: on which hosts it runs, in which parallel layout, and why.

Before a worker is started again its hosts are asked, all at once. One that does not answer is lost, and so is one on
which the worker ended first, soon after its start, twice in a row. The worker is formed of the others, and of spare
hosts in place of those that lack. While it runs, hosts that were lost are asked from time to time; with one that
answers, and without one that a person has cordoned, it is formed anew at the end of a job.

Hosts are asked, and layouts searched, in threads: what the supervisor calls waits for nothing. In the run's folder
there are `cordoned.json`, host → why, and for each worker that is formed otherwise than in the cluster file
`hosts/<worker>.formed.json`, for `geotrain status`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geotrain.common.files import OutputError, read_object, write_whole
from geotrain.config import ClusterConfig, ConfigError, HostConfig, RunConfig, WorkerConfig, WorkerSetup
from geotrain.config.cluster import RegionConfig
from geotrain.data.dataset import local_files
from geotrain.launch.launchers.base import HostLauncher, end_file, hostfile_path, regions_of
from geotrain.launch.launchers.registry import launcher_of
from geotrain.launch.one_host import ask, bring_files
from geotrain.monitor.events import FAILED_MARK, Trouble, WorkerFormed
from geotrain.outer.events import Event

CORDONED = "cordoned.json"
PROBE_S = 15.0  # for a host to answer, besides what it waits in a queue
SOON_S = 120.0  # after its start: a host that ends its worker then, twice in a row, is lost
ASK_AGAIN_S = 5.0  # between two requests to a worker that it ends its job
FAILED_S = 5.0  # for a command to end once ranks have failed: more, and it waits for some on a host that is lost
LONGEST_S = 3600.0  # until a lost host is asked again, however often it was lost
Probe = Callable[[WorkerConfig, str], str]


@dataclass(frozen=True)
class Found:
    """What was found out. answers: host → why it does not answer, "": it does. formed: the worker of those that do;
    None: no layout fits, and why."""

    answers: dict[str, str]
    formed: WorkerConfig | None
    why: str = ""


def cordoned(folder: Path) -> dict[str, str]:
    """Read which hosts are not to be used, each with why. folder: the run's. Raises ConfigError: nobody knows."""
    try:
        hosts: dict[str, str] = json.loads((folder / CORDONED).read_text())
        if not isinstance(hosts, dict) or not all(isinstance(why, str) for why in hosts.values()):
            raise ValueError("it is no object of texts")
        return hosts
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder / CORDONED}: cannot be read, so that nobody knows which hosts are out of use: {error}; write "
            '{"HOST": "WHY"} of them, or remove it'
        ) from error


def without_cordoned(run: RunConfig, cluster: ClusterConfig, folder: Path) -> ClusterConfig:
    """Form the workers of a launch without cordoned hosts, which are not asked. Raises ConfigError."""
    if not (hosts := cordoned(folder)):
        return cluster
    from geotrain.plan.reforming import without

    return without(run, cluster, hosts, may_form)


def may_form(region: RegionConfig, worker: WorkerConfig) -> bool:
    """Whether a worker can be formed of other hosts than it has."""
    more = len(worker.hosts) + len(region.spare_hosts) > 1
    return more and not launcher_of(worker).on_this_machine and regions_of(region.name, worker) == (region.name,)


def cordon(folder: Path, host: str, why: str | None) -> None:
    """Put a host out of use; with None for why, back into it. Raises OSError, ConfigError."""
    with (folder / f".{CORDONED}").open("a") as lock:  # an operator may cordon one while a launcher does another
        fcntl.flock(lock, fcntl.LOCK_EX)
        others = {name: said for name, said in cordoned(folder).items() if name != host}
        write_whole(folder / CORDONED, json.dumps(others if why is None else {**others, host: why}))


def formed_file(worker: str) -> str:
    return f"hosts/{worker}.formed.json"


def formed_here(folder: Path) -> dict[str, dict[str, Any]]:
    """Read what workers are formed of that are not as in the cluster file: worker → hosts, layout, why."""
    found = {}
    for path in sorted(folder.glob(formed_file("*"))):
        if of := read_object(path):
            found[path.name.partition(".")[0]] = of
    return found


class Forming:
    """What one worker is formed of.

    folder: the run's, absolute. taken: spare host → the worker that has it; of all workers of this launcher. clock,
    probe: for tests. formed: the worker as it runs, or is started next. ending: it was asked to end its job. events:
    for the supervisor to pass on.
    """

    def __init__(
        self, run: RunConfig, cluster: ClusterConfig, folder: Path, region: str, worker: WorkerConfig,
        taken: MutableMapping[str, str], clock: Callable[[], float] = time.monotonic, probe: Probe | None = None,
    ) -> None:  # fmt: skip
        self.run, self.cluster, self.folder, self.region, self.configured = run, cluster, folder, region, worker
        self.formed, self.ending, self.events = worker, False, deque[Event]()
        self._taken, self._clock, self._probe = taken, clock, probe or self._asked
        self._back_s = cluster.restart.host_back_s
        self._lost: dict[str, tuple[str, float]] = {}  # host → why, and when it is asked again
        self._times = Counter[str]()  # how often each was lost
        self._first: list[str] = []  # hosts on which the worker ended soon after its start, in a row
        self._pool = ThreadPoolExecutor(16, f"forming-{worker.name}")
        self._finding: Future[Found] | None = None
        self._found: Found | None = None  # for the next start
        self._since_s: float | None = None  # no layout has fitted since
        self._next_s = 0.0  # when anything is looked for again
        self._cordoned: dict[str, str] = {}
        self._unread = ""
        self._failed_s = math.inf  # when a rank of the running worker was seen to have failed
        self._read: dict[Path, int] = {log: log.stat().st_size for log in self._logs() if log.exists()}
        (folder / formed_file(worker.name)).unlink(missing_ok=True)
        if (without := cordoned(folder)).keys() & {host.host for host in worker.hosts}:
            self._cordoned = without
            found = self._formed_of(self._candidates(), {})
            if found.formed is None:
                raise ConfigError(f"worker {worker.name!r}: cordoned: {', '.join(without)}: {found.why}")
            self._form(found)

    # -- called by the supervisor

    def look(self) -> bool:
        """Look whether the running worker should be formed otherwise; asks it to end its job where it should. Returns
        whether it must be stopped, since its command goes on without some of its ranks."""
        now = self._clock()
        self._read_logs()
        if self._finding is not None:
            if self._finding.done():
                self._judge(self._take_found())
        elif self.ending:
            if now >= self._next_s:
                self._next_s = now + ASK_AGAIN_S
                self._pool.submit(self._ask_to_end)
        else:
            before = self._cordoned
            self._read_cordoned()
            mine = {host.host for host in self.formed.hosts}
            new = [host for host in self._candidates() if host.host not in mine]
            lacks = len(self.formed.hosts) < len(self.configured.hosts) or bool(mine & self._cordoned.keys())
            changed = before.keys() != self._cordoned.keys()
            if lacks and (changed or now >= self._next_s) and (new or mine & self._cordoned.keys()):
                self._find([host.host for host in new])
        if now <= self._failed_s + FAILED_S:
            return False
        if self._failed_s > -math.inf:  # it is said once
            self._failed_s = -math.inf
            self.events.append(Trouble(f"{self.configured.name}: ranks have failed, its command goes on: stopped"))
        return True

    def again(self, host: str = "", lived_s: float = SOON_S, why: str = "") -> None:
        """Begin to find out what the worker is to be formed of at its next start. host: the one on which it ended
        first; "": not known. lived_s: for how long it ran there."""
        self._read_logs()
        self.ending, self._found, self._failed_s = False, None, math.inf
        self._first = [*self._first, host] if host and lived_s < SOON_S else []
        if len(self.formed.hosts) > 1 and self._first[-2:] == [host, host]:
            self._lose(host, why)
            self._first = []
        self._read_cordoned()
        self._find([each.host for each in self._candidates()])

    def ready(self) -> bool:
        """Whether it is known what the worker is formed of, or that it has waited long enough for a host."""
        now = self._clock()
        if self._finding is not None and self._finding.done():
            self._found, self._next_s = self._take_found(), now + min(self._back_s, PROBE_S)
            if (formed := self._found.formed) is None and self._since_s is None:
                self._since_s = now
                self.events.append(Trouble(f"{self.configured.name} waits for a host: {self._found.why}"))
            elif formed is not None and any(self._others(host.host) for host in formed.hosts):
                self.again()  # another worker has just taken a spare host of these
            elif formed is not None:
                self._since_s = None
        if self._found is None:
            return False
        if self._found.formed is None and not self._waited_long(now):
            if now >= self._next_s and self._finding is None:
                self._read_cordoned()
                self._find([host.host for host in self._candidates(every=True)])
            return False
        return True

    def leaves(self, host: str) -> bool:
        """Whether the next start does without this host, which may not answer: nothing there is waited for."""
        found = self._found.formed if self._found else None
        return found is not None and bool(host) and host not in {each.host for each in found.hosts}

    def take(self) -> WorkerConfig:
        """Return the worker as it is to be started. Raises ConfigError where no host has come for too long."""
        if self._found is not None:
            if self._found.formed is None:
                raise ConfigError(f"worker {self.configured.name!r} leaves the run: {self._found.why}")
            self._form(self._found)
            self._found = None
        return self.formed

    # -- what it is formed of

    def _read_cordoned(self) -> None:
        """Where the file is damaged, what was known of it stays, and that is said once."""
        said, self._unread = self._unread, ""
        try:
            self._cordoned = cordoned(self.folder)
        except ConfigError as error:
            self._unread = str(error)
            self.events += [Trouble(self._unread)] if self._unread != said else []

    def _logs(self) -> list[Path]:
        name = self.configured.name
        names = (name, *(f"{name}.{number}" for number in range(len(self.configured.hosts))))
        return [self.folder / "logs" / f"{each}.log" for each in names]

    def _read_logs(self) -> None:
        """Cordon the hosts whose ranks have logged that their device is not fit to compute; note that ranks fail."""
        mark = launcher_of(self.formed).rank_failed
        places = [host.host for host in self.formed.hosts for _ in range(host.slots)]  # by rank
        for log in self._logs():
            with contextlib.suppress(OSError), log.open("rb") as file:
                file.seek(self._read.get(log, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    if mark and mark.match(line):
                        self._failed_s = min(self._failed_s, self._clock())
                    if said := line.partition(FAILED_MARK.encode())[2]:
                        with contextlib.suppress(ValueError, LookupError, TypeError):
                            failed = json.loads(said)
                            why = f"device {failed['device']}: {failed['what']}"
                            host = places[failed["rank"]]
                            try:
                                cordon(self.folder, host, why)
                            except ConfigError:  # the file is damaged; `_read_cordoned` reports it, and keeps this
                                self._cordoned = {**self._cordoned, host: why}
                    self._read[log] = self._read.get(log, 0) + len(line)  # now: a full disk may have room later

    def _candidates(self, every: bool = False) -> list[HostConfig]:
        """List the hosts that may be used: those that it has, its own, spare ones. every: also those whose time to be
        asked again has not come."""
        spare = self.cluster.region(self.region).spare_hosts
        free = [host for host in spare if not self._others(host.host)]
        known = {host.host: host for host in (*self.configured.hosts, *free)}
        has = [host.host for host in self.formed.hosts if host.host in known]
        now = self._clock()
        return [
            known[name]
            for name in dict.fromkeys((*has, *known))
            if name not in self._cordoned and (every or name not in self._lost or self._lost[name][1] <= now)
        ]

    def _others(self, host: str) -> bool:
        """Whether another worker has this spare host."""
        return self._taken.get(host, self.configured.name) != self.configured.name

    def _find(self, asked: Sequence[str]) -> None:
        hosts = self._candidates(every=True)
        usable = [host for host in hosts if host.host in asked or host.host not in self._lost]
        self._finding = self._pool.submit(self._find_out, usable, tuple(asked))

    def _find_out(self, hosts: Sequence[HostConfig], asked: Sequence[str]) -> Found:
        with ThreadPoolExecutor(max(1, len(asked))) as pool:
            whys = pool.map(lambda host: self._probe(self.configured, host), asked)
            import geotrain.plan.reforming  # noqa: F401 (takes seconds: while hosts are asked)

            return self._formed_of(hosts, dict(zip(asked, whys, strict=True)))

    def _formed_of(self, hosts: Sequence[HostConfig], answers: dict[str, str]) -> Found:
        from geotrain.plan.reforming import reform

        usable = [host for host in hosts if not answers.get(host.host)]
        try:
            if not usable:
                lost = {host: why for host, (why, _) in dict(self._lost).items()} | self._cordoned | answers
                raise ConfigError(f"no host is left: {'; '.join(f'{host}: {why}' for host, why in lost.items())}")
            chosen = usable[: len(self.configured.hosts)]
            return Found(answers, reform(self.run, self.cluster, self.region, self.configured, chosen))
        except (ValueError, ArithmeticError, LookupError) as error:  # ConfigError is one
            return Found(answers, None, str(error))

    def _take_found(self) -> Found:
        assert self._finding is not None
        found, self._finding = self._finding.result(), None
        for host, why in found.answers.items():
            if why:
                self._lose(host, why)
            else:
                self._lost.pop(host, None)
        return found

    def _lose(self, host: str, why: str) -> None:
        self._times[host] += host not in self._lost
        pause_s = min(self._back_s * 2.0 ** min(self._times[host] - 1, 30), max(LONGEST_S, self._back_s))
        self._lost[host] = why, self._clock() + pause_s

    def _judge(self, found: Found) -> None:
        """Ask the running worker to end its job where it is to be formed of other hosts than it is."""
        self._next_s = self._clock() + self._back_s
        if found.formed is None:
            self.events.append(Trouble(f"{self.configured.name} stays as it is: {found.why}"))
        elif {host.host for host in found.formed.hosts} != {host.host for host in self.formed.hosts}:
            self.ending, self._next_s = True, 0.0

    def _waited_long(self, now: float) -> bool:
        return self._since_s is not None and now - self._since_s > self.cluster.restart.window_s

    def _form(self, found: Found) -> None:
        """Take what was found as the worker's form."""
        assert found.formed is not None
        before, self.formed = self.formed, found.formed
        for host, of in [*self._taken.items()]:
            if of == self.configured.name:
                del self._taken[host]
        own = {host.host for host in self.configured.hosts}
        hosts = [host.host for host in self.formed.hosts]
        self._taken.update(dict.fromkeys((host for host in hosts if host not in own), self.configured.name))
        lost = {host: why for host, (why, _) in self._lost.items()}
        reasons = {**lost, **{host: f"cordoned: {why}" for host, why in self._cordoned.items()}}
        without = sorted(own - set(hosts))
        why = "; ".join(f"without {host}: {reasons.get(host, 'its layout does not use it')}" for host in without)
        layout = WorkerSetup.of(self.run, self.formed).parallel.text(self.formed.ranks)
        path = self.folder / formed_file(self.configured.name)
        if before != self.formed:
            self.events.append(WorkerFormed(self.configured.name, hosts, layout, why))
        with contextlib.suppress(OutputError, OSError):  # without room nothing is shown
            if self.formed == self.configured:
                path.unlink(missing_ok=True)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, json.dumps({"hosts": hosts, "layout": layout, "why": why}))

    # -- in threads

    def _asked(self, worker: WorkerConfig, host: str) -> str:
        """Ask a host, and bring it the run's files where it has its own; returns why it cannot be used, or ""."""
        launcher = launcher_of(worker)
        if isinstance(launcher, HostLauncher):
            data = [path for each in self.run.data.train for path in local_files(each.prefix)]
            try:
                return bring_files(launcher, host, self.folder, (hostfile_path(worker.name),), data, PROBE_S)
            except OSError as error:  # of the files here
                return str(error)
        inquiry = launcher.inquiry(worker, (host,), ("test", "-w", str(self.folder)))
        if inquiry is None:
            return ""
        return ask(inquiry.command, PROBE_S + launcher.queue_s, env={**os.environ, **inquiry.env})[1]

    def _ask_to_end(self) -> None:
        launcher, path = launcher_of(self.formed), self.folder / end_file(self.configured.name)
        if isinstance(launcher, HostLauncher):
            ask(launcher.on_host(self.formed.hosts[0].host, ("touch", str(path))), PROBE_S)
        else:
            with contextlib.suppress(OSError):
                path.touch()
