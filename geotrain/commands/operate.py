"""Looks at a run and steers it for an operator, from the run's folder on the machine that launched it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from geotrain.common.files import read_object, try_lock
from geotrain.common.names import GLOBAL
from geotrain.config import ClusterConfig, ConfigError, RunConfig, Topology, load_cluster, load_run, shards_of
from geotrain.launch.branches import where_it_goes_on
from geotrain.launch.forming import cordon, cordoned, formed_here, may_form
from geotrain.launch.launcher import OUTCOME
from geotrain.launch.launchers.ssh import over_ssh
from geotrain.launch.one_host import ask as run_there
from geotrain.launch.site_processes import path_there, remote_python
from geotrain.launch.terminal import (
    Eta,
    Status,
    addresses,
    ask,
    draw,
    headline,
    last_seen,
    last_words,
    share_of,
    waits_of,
)
from geotrain.monitor.events import Record
from geotrain.net.transport import rpc
from geotrain.net.transport.certs import OPERATOR, trust_between
from geotrain.net.transport.grpc_client import Unreachable
from geotrain.net.transport.operator_client import command
from geotrain.outer.events import UpdateApplied

COMMAND_S = 30.0
EVERY = "outer.rule.updates_per_send"  # K, of which each region's server keeps account
SNAPSHOT_S = 600.0  # a large model's
READ_BYTES = 1 << 20  # of the end of an event log


class RunState(IntEnum):
    """How a run is; the values are the exit codes of `geotrain status`."""

    RUNNING = 0  # also paused, draining, stopping
    FINISHED = 3  # all its data is trained
    FAILED = 4
    UNREACHABLE = 5
    STOPPED = 6  # ended in good order before its data did


@dataclass(frozen=True)
class RunStatus:
    """A run at one moment. statuses: by site, what each server says, or last said; then it has `as_of`, unless it
    ended. reason: of a failure. formed, cordoned: as `geotrain.launch.forming` has them, of sites on this machine."""

    state: RunState
    reason: str
    statuses: Mapping[str, Status]
    formed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    cordoned: Mapping[str, str] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        return self.state not in (RunState.RUNNING, RunState.UNREACHABLE)

    @property
    def headline(self) -> str:
        top = self.statuses.get(GLOBAL, {})
        running = self.state is RunState.RUNNING
        return headline(top, top["phase"] if running else self.state.name.lower(), self.reason)

    def as_json(self) -> dict[str, Any]:
        state, waits = self.state.name.lower(), waits_of(self.statuses)
        hosts = {"formed": dict(self.formed), "cordoned": dict(self.cordoned)}
        return {"state": state, "reason": self.reason, "waits": waits, "servers": dict(self.statuses), **hosts}

    @property
    def host_lines(self) -> list[str]:
        """Say what workers are formed of that are not as in the cluster file, and which hosts are out of use."""
        formed = [
            f"{worker} is formed of {', '.join(of['hosts'])}: {of['layout']}; {of['why']}"
            for worker, of in self.formed.items()
        ]
        return [*formed, *(f"{host} is cordoned: {why}" for host, why in self.cordoned.items())]


def judge(
    live: Status | None, words: Status | None, outcome: Mapping[str, Any] | None, launcher: bool | None
) -> tuple[RunState, str]:
    """Decide the run's state, and why, from what is known. live: what the global server says now. words: what it
    said when it ended. outcome: what its launcher left. launcher: whether that runs; None: there never was one here.

    What answers now counts first, then how the launcher ended, then what the server left behind."""
    if live is not None and live.get("phase") != "ended":
        return RunState.RUNNING, ""
    last = live or words
    if outcome is not None and outcome["code"]:
        return RunState.FAILED, str(outcome["reason"] or f"exit code {outcome['code']}").splitlines()[0]
    if last is not None and last.get("phase") == "ended":
        return (RunState.FINISHED if last.get("complete") else RunState.STOPPED), ""
    if outcome is not None:
        return RunState.FINISHED, ""  # the global server's own words lie on its machine
    if launcher is False:
        return RunState.FAILED, "its launcher is gone without a word; continue with --resume"
    return RunState.UNREACHABLE, "its launcher runs, but no server answers" if launcher else "no server answers"


class LiveRun:
    """A run, found by its folder. Raises ConfigError if there is none."""

    def __init__(self, folder: Path) -> None:
        folder = where_it_goes_on(folder)
        if not (folder / "run.json").exists():
            raise ConfigError(f"{folder}: no run is here, since it has no run.json; give a run's folder, runs/<name>")
        self.folder = folder
        self.config: RunConfig = load_run(folder / "run.json")
        self.cluster: ClusterConfig = load_cluster(folder / "cluster.json")
        self.servers = addresses(self.config, self.cluster)

    def see(self) -> RunStatus:
        """Ask all servers, and read what those that have ended left here. Raises CertificateError."""
        live, seen = ask(self.cluster, self.servers), last_seen(self.folder)
        if GLOBAL not in live and (merged := last_merge(self.folder, self.config)):
            seen[GLOBAL] = {**seen.get(GLOBAL, {}), **merged}
        words = last_words(self.folder, self.servers)
        outcome = read_object(self.folder / OUTCOME)
        known = outcome if outcome.keys() >= {"code", "reason"} else None
        state, reason = judge(live.get(GLOBAL), words.get(GLOBAL), known, launcher_runs(self.folder))
        if state is RunState.UNREACHABLE and live:
            reason = f"the global server at {self.servers[GLOBAL]} does not answer, but {', '.join(live)}"
        try:
            out_of_use = cordoned(self.folder)
        except ConfigError as error:
            out_of_use = {"perhaps a host": str(error)}
        return RunStatus(state, reason, {**seen, **words, **live}, formed_here(self.folder), out_of_use)

    def steer(self, what: str, region: str = "") -> str:
        """Steer the run through the global server; returns its phase then. Raises Refused, Unreachable,
        CertificateError, ConfigError."""
        if region:
            self.cluster.region(region)
        return self._send(GLOBAL, rpc.Control(what, region), COMMAND_S)

    def set(self, setting: str) -> tuple[dict[str, str], list[str]]:
        """Change a key of the live run, given as KEY=VALUE: K at each region's server, all else at the global one.
        Returns site → its answer, or why it was not reached, and the sites that were not. Raises Refused,
        Unreachable, CertificateError, ConfigError."""
        regions = [site for site in self.servers if site != GLOBAL and setting.startswith(f"{EVERY}=")]
        if not regions:
            return {GLOBAL: self.steer(f"set {setting}")}, []
        said, missed = {}, []
        for site in regions:
            try:
                said[site] = self._send(site, rpc.Control(f"set {setting}"), COMMAND_S)
            except OSError as error:
                said[site] = str(error)
                missed.append(site)
        return said, missed

    def bar(self, what: str, member: str) -> str:
        """Expel or unban a worker or region at the server that it speaks to; returns the answer. Raises Refused,
        Unreachable, CertificateError, ConfigError.

        what: "expel" or "unban"."""
        return self._send(Topology(self.config, self.cluster).server_of(member), rpc.Control(what, member), COMMAND_S)

    def cordon(self, host: str, why: str | None, here: bool = False) -> list[str]:
        """Put a host out of use, or back into it (None), where its region is launched. here: by the file in this
        folder, wherever that is. Returns its workers that cannot do without it. Raises ConfigError, OSError."""
        regions = [
            region
            for region in self.cluster.regions
            if host in {each.host for each in (*region.spare_hosts, *(h for w in region.workers for h in w.hosts))}
        ]
        if not regions:
            raise ConfigError(
                f"no worker has a host {host!r}, nor is it a spare one; write it as the cluster file does"
            )
        for region in regions:
            if region.ssh is None or here:
                cordon(self.folder, host, why)
                continue
            words = ["uncordon"] if why is None else ["cordon", "--why", why]
            there = path_there(str(self.folder.absolute()), region.folder)
            geotrain = (remote_python(region.folder), "-P", "-m", "geotrain")
            _, failed = run_there(
                over_ssh(region.ssh, region.folder, (*geotrain, *words, "--here", there, host)), COMMAND_S
            )
            if failed:
                raise ConfigError(f"region {region.name!r} was not reached on {region.ssh}: {failed}")
        bound = (worker for region in regions for worker in region.workers if not may_form(region, worker))
        return [worker.name for worker in bound if host in {each.host for each in worker.hosts}]

    def profile(self, worker: str, steps: int) -> str:
        """Have a worker's ranks record their next inner steps; returns the answer. Raises Refused, Unreachable,
        CertificateError, ConfigError."""
        site = Topology(self.config, self.cluster).server_of(worker)
        return self._send(site, rpc.Control("profile", worker, steps), COMMAND_S)

    def take_back(self, number: int) -> None:
        """Have the run's launcher take it back to that snapshot. Raises ConfigError, StoreError, OutputError."""
        from geotrain.launch.rollback import check, request, snapshots_of  # which imports torch

        if launcher_runs(self.folder) is not True:
            raise ConfigError(
                f"{self.folder}: --live needs the launcher of the whole run at work here; else `geotrain stop`, "
                "`geotrain rollback … --out`, and launch"
            )
        check(self.config, self.folder, number, [each["snapshot"] for each in snapshots_of(self.folder)])
        request(self.folder, number)

    def snapshot(self) -> dict[str, str]:
        """Have every server that is reached write a snapshot: site → where it lies, or what went wrong. The global
        one must succeed.

        Raises Refused, Unreachable, CertificateError.
        """
        where = {GLOBAL: self.snapshot_of(GLOBAL)}
        for site in self.servers:
            if site != GLOBAL:
                try:
                    where[site] = self.snapshot_of(site)
                except OSError as error:
                    where[site] = str(error)
        return where

    def snapshot_of(self, site: str) -> str:
        """Have a site's server, and each of its shards, write a snapshot; returns where they lie. Raises Refused,
        Unreachable, CertificateError, ConfigError."""
        trust = trust_between(self.cluster, "operator", OPERATOR, "shard", site)
        snapshot, shards = rpc.Control("snapshot"), shards_of(self.cluster, site)
        of_shards = [command(str(address), snapshot, SNAPSHOT_S, trust) for address in shards]
        return ", ".join([self._send(site, snapshot, SNAPSHOT_S), *of_shards])

    def wait(self, until: Callable[[RunStatus], bool], within_s: float, every_s: float = 0.5) -> RunStatus:
        """Ask until a status satisfies `until`. Raises TimeoutError."""
        deadline = time.monotonic() + within_s
        while not until(seen := self.see()):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{self.folder}: not within {within_s:g} s; now: {seen.headline}")
            time.sleep(every_s)
        return seen

    def wait_until_over(
        self, within_s: float, or_when: Callable[[RunStatus], bool] = lambda seen: False
    ) -> RunStatus:
        """Ask until the run is over. One of which no server tells any more, and that no launcher here runs, is taken
        for over after `COMMAND_S`: its servers may have ended elsewhere. Raises TimeoutError."""
        heard_s = time.monotonic()

        def over(seen: RunStatus) -> bool:
            nonlocal heard_s
            if seen.state is not RunState.UNREACHABLE or launcher_runs(self.folder):
                heard_s = time.monotonic()
            left = or_when is not None and or_when(seen)
            return seen.over or left or time.monotonic() > heard_s + COMMAND_S

        return self.wait(over, within_s)

    def has_left(self, region: str, seen: RunStatus) -> bool:
        """Whether all members of a drained region have left, as the global server says."""
        names = {region, *(worker.name for worker in self.cluster.region(region).workers)}
        own = [m for name, m in seen.statuses.get(GLOBAL, {}).get("members", {}).items() if name in names]
        return bool(own) and all(member["left"] for member in own)

    def _send(self, site: str, control: rpc.Control, within_s: float) -> str:
        trust = trust_between(self.cluster, "operator", OPERATOR, "global" if site == GLOBAL else "region", site)
        try:
            return command(self.servers[site], control, within_s, trust)
        except Unreachable:
            seen = self.see()
            if not seen.over:
                raise
            more = "" if seen.state is RunState.FINISHED else "; `geotrain launch … --resume` goes on with it"
            raise ConfigError(f"{self.folder}: the run is not on, nothing was done: {seen.headline}{more}") from None


def last_merge(folder: Path, run: RunConfig) -> Status:
    """Read from the end of the global server's events, where they are on this machine, what was committed last."""
    found: Status = {}
    with contextlib.suppress(OSError), (folder / "servers" / GLOBAL / "events.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - READ_BYTES))
        for record in filter(None, map(Record.from_line, file)):
            if isinstance(record.event, UpdateApplied) and record.event.tokens is not None:
                committed = record.event.tokens // run.data.sequence_length
                counts = {"committed_samples": committed, "train_samples": run.data.train_samples}
                found = {**counts, "versions": record.event.versions, "as_of": record.time_s}
    return found


def launcher_runs(folder: Path) -> bool | None:
    """Whether the run's launcher holds its lock; None: no launcher ever held one here."""
    try:
        with (folder / ".lock").open() as file:
            return not try_lock(file.fileno(), fcntl.LOCK_SH)
    except FileNotFoundError:
        return None


def watch(run: LiveRun, console: Console, every_s: float) -> RunState:
    """Follow the run on a terminal until it is over, or Ctrl-C. Gives its state then."""
    seen, eta = run.see(), Eta()
    with Live(console=console, auto_refresh=False) as live, contextlib.suppress(KeyboardInterrupt):
        while True:
            left_s = eta.update(share_of(seen.statuses.get(GLOBAL, {})), time.monotonic())
            live.update(picture(run, seen, left_s), refresh=True)
            if seen.over:
                break
            time.sleep(every_s)
            seen = run.see()
    return seen.state


def picture(run: LiveRun, seen: RunStatus, left_s: float | None = None) -> RenderableType:
    """Draw the picture that `geotrain status` shows."""
    title = f"{run.config.name}: {seen.headline}"
    if seen.statuses:
        return Group(draw(title, run.cluster, seen.statuses, left_s), *map(Text, seen.host_lines))
    where = ", ".join(f"{site} at {address}" for site, address in run.servers.items())
    none = f"no server answers ({where}), and none has left its last status"
    return Group(*map(Text, (title, none, *seen.host_lines)))
