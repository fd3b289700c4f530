"""An operator's view of a run, and word to it: from the run's folder, on the machine that launched it."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from geotrain.config import ClusterConfig, ConfigError, RunConfig, load_cluster, load_run
from geotrain.launch.progress import Eta, Status, addresses, ask, last_words, page_line, share_of, table, view
from geotrain.launch.region import OUTCOME
from geotrain.net import calls
from geotrain.net.certs import OPERATOR, trust_between
from geotrain.net.status import command
from geotrain.outer.messages import GLOBAL

COMMAND_S = 30.0
SNAPSHOT_S = 600.0  # a large model's


class State(IntEnum):
    """How a run is; as exit codes of `geotrain status`."""

    RUNNING = 0  # also paused, draining, stopping
    FINISHED = 3  # all its data is trained
    FAILED = 4
    UNREACHABLE = 5
    STOPPED = 6  # ended in good order before its data did


@dataclass(frozen=True)
class Seen:
    """A run at one moment. statuses: by site, what each server says, or last said. reason: of a failure."""

    state: State
    reason: str
    statuses: Mapping[str, Status]

    @property
    def headline(self) -> str:
        top = self.statuses.get(GLOBAL, {})
        words = [top["phase"] if self.state is State.RUNNING and "phase" in top else self.state.name.lower()]
        if top.get("draining"):
            words.append(f"draining {', '.join(top['draining'])}")
        words.append(f"{share_of(top):.1%} committed")
        if validated := top.get("validation"):
            words.append(f"validation loss {validated['loss']:.4f} (at {validated['samples']:,} samples)")
        if self.reason:
            words.append(self.reason)
        return "; ".join(words)

    def as_json(self) -> dict[str, Any]:
        return {"state": self.state.name.lower(), "reason": self.reason, "servers": dict(self.statuses)}


def judge(
    live: Status | None, words: Status | None, outcome: Mapping[str, Any] | None, launcher: bool | None
) -> tuple[State, str]:
    """Pure: the run's state, and why. live: what the global server says now. words: what it said when it ended.
    outcome: what its launcher left. launcher: whether that runs; None: there never was one here."""
    if live is not None and live.get("phase") != "ended":
        return State.RUNNING, ""
    last = live or words
    if outcome is not None and outcome["code"]:
        return State.FAILED, str(outcome["reason"] or f"exit code {outcome['code']}").splitlines()[0]
    if last is not None and last.get("phase") == "ended":
        return (State.FINISHED if last.get("complete") else State.STOPPED), ""
    if outcome is not None:
        return State.FINISHED, ""  # the global server's own words lie on its machine
    if launcher is False:
        return State.FAILED, "its launcher is gone without a word; continue with --resume"
    return State.UNREACHABLE, "its launcher runs, but no server answers" if launcher else "no server answers"


class Run:
    """A run by its folder. Raises ConfigError: there is none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: RunConfig = load_run(folder / "run.json")
        self.cluster: ClusterConfig = load_cluster(folder / "cluster.json")
        self.servers = addresses(self.config, self.cluster)

    def see(self) -> Seen:
        """Raises CertificateError."""
        live = ask(self.cluster, self.servers)
        words = last_words(self.folder, self.servers)
        state, reason = judge(live.get(GLOBAL), words.get(GLOBAL), self._outcome(), launcher_runs(self.folder))
        return Seen(state, reason, {**words, **live})

    def steer(self, what: str, region: str = "") -> str:
        """Tell the global server; its phase then. Raises Refused, Unreachable, CertificateError, ConfigError."""
        if region:
            self.cluster.region(region)
        return self._tell(GLOBAL, calls.Control(what, region), COMMAND_S)

    def pardon(self, member: str) -> str:
        """Tell the server that a worker or region speaks to; its answer. Raises as `steer` does."""
        region = next((r for r in self.cluster.regions if member in (r.name, *(w.name for w in r.workers))), None)
        if region is None:
            names = ", ".join(name for r in self.cluster.regions for name in (r.name, *(w.name for w in r.workers)))
            raise ConfigError(f"{member!r} is no worker or region of this run; there are {names}")
        site = GLOBAL if member == region.name or self.config.outer.levels == 1 else region.name
        return self._tell(site, calls.Control("pardon", member), COMMAND_S)

    def snapshot(self) -> dict[str, str]:
        """Every server that is reached writes one: site → where, or what went wrong. The global one must succeed.

        Raises Refused, Unreachable, CertificateError.
        """
        where = {GLOBAL: self._tell(GLOBAL, calls.Control("snapshot"), SNAPSHOT_S)}
        for site in self.servers:
            if site != GLOBAL:
                try:
                    where[site] = self._tell(site, calls.Control("snapshot"), SNAPSHOT_S)
                except OSError as error:
                    where[site] = str(error)
        return where

    def wait(self, until: Callable[[Seen], bool], within_s: float, every_s: float = 0.5) -> Seen:
        """Ask again and again. Raises TimeoutError."""
        deadline = time.monotonic() + within_s
        while not until(seen := self.see()):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{self.folder}: not within {within_s:g} s; now: {seen.headline}")
            time.sleep(every_s)
        return seen

    def _tell(self, site: str, control: calls.Control, within_s: float) -> str:
        role = "global" if site == GLOBAL else "region"
        trust = trust_between(self.cluster, "operator", OPERATOR, role, site)  # type: ignore[arg-type]
        return command(self.servers[site], control, within_s, trust)

    def _outcome(self) -> dict[str, Any] | None:
        try:
            outcome: dict[str, Any] = json.loads((self.folder / OUTCOME).read_text())
            return outcome
        except FileNotFoundError:
            return None


def launcher_runs(folder: Path) -> bool | None:
    """Whether the run's launcher holds its lock; None: no launcher ever held one here."""
    try:
        with (folder / ".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return True


def has_left(cluster: ClusterConfig, region: str, seen: Seen) -> bool:
    """Whether a drained region is gone: its members at the global server have left, or the run has ended."""
    names = {region, *(worker.name for worker in cluster.region(region).workers)}
    own = [m for name, m in seen.statuses.get(GLOBAL, {}).get("members", {}).items() if name in names]
    return seen.state is not State.RUNNING or (bool(own) and all(member["left"] for member in own))


def watch(run: Run, console: Console, every_s: float) -> State:
    """A table that follows the run until it is over, or Ctrl-C. Gives its state then."""
    eta = Eta()
    seen = run.see()
    with Live(draw(run, seen, eta), console=console, auto_refresh=False) as live:
        try:
            while seen.state in (State.RUNNING, State.UNREACHABLE):
                time.sleep(every_s)
                seen = run.see()
                live.update(draw(run, seen, eta), refresh=True)
        except KeyboardInterrupt:
            pass
    return seen.state


def draw(run: Run, seen: Seen, eta: Eta | None = None) -> Group:
    share = share_of(seen.statuses.get(GLOBAL, {}))
    left_s = eta.update(share, time.monotonic()) if eta else None
    text = Text(f"{run.config.name}: {seen.headline}")
    if not seen.statuses:
        where = ", ".join(f"{site} at {address}" for site, address in run.servers.items())
        return Group(text, Text(f"no server answers ({where}), and none has left its last status"))
    page = seen.statuses.get(GLOBAL, {}).get("page")
    more = [Text(page_line(run.cluster, page))] if page and seen.state is State.RUNNING else []
    return Group(text, table(view(run.cluster, seen.statuses, left_s)), *more)
