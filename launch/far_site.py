"""Keeps a site on another machine than the launcher's.

One process keeps it: in a session of its own it starts the site's servers and workers, starts again what dies, and
lives on when nobody is connected. What ssh runs is a relay, which begins that process if none lives, and then
carries commands there and lines back. The site's lock, which the kernel releases however its holder ends, sees to it
that there is only one keeper. In the run's folder there are

    .site-<site>.json   the keeper's process and a digest of what it was asked to keep; once it has ended, how: a
                        launcher whose connection was lost meanwhile learns it when it comes back
    .launch-<site>      the launcher's incarnation that began the site, or attached to it last
    .relay-<site>       a FIFO of the relay that attached last, by which the keeper sends it lines for people

A relay stops the site by SIGTERM, but only if its own FIFO is still there: a command of an earlier one may come late.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from geotrain.common.files import OutputError, out_of_room, read_object, write_whole
from geotrain.common.names import GLOBAL
from geotrain.config import EXIT_FOR_GOOD
from geotrain.launch.check import check_data
from geotrain.launch.far_hosts import prepare_far_hosts
from geotrain.launch.forming import without_cordoned
from geotrain.launch.host_check import check_hosts, refuse
from geotrain.launch.launcher import RunsAlready, event_log, locked, supervisor_of, troubles_of
from geotrain.launch.machine import this_machine
from geotrain.launch.preflight import check_states
from geotrain.launch.site_processes import LaunchRequest, local_processes
from geotrain.launch.supervisor import EXIT_SSH, STOP_COMMAND, RunOutcome, exit_code, tail

BEGIN_S = 120.0  # a site's keeper is there within this time, or another launcher holds its lock
LOOK_S = 0.1
STOPPED = 128 + signal.SIGTERM
EXIT_HELD = 75  # of a keeper that found the lock held


@dataclass(frozen=True)
class SiteFiles:
    """The files by which a site's keeper and its relays find each other. folder: the run's, absolute."""

    folder: Path
    site: str

    @staticmethod
    def of(request: LaunchRequest) -> SiteFiles:
        return SiteFiles(request.run.run_folder.absolute(), "-".join(request.sites))

    def path(self, kind: str) -> Path:
        return self.folder / f".{kind}-{self.site}"

    def launch(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return self.path("launch").read_text()
        return ""

    def record(self) -> dict[str, Any]:
        """Read what the last keeper wrote: process, start and asked, or code and reason once it has ended. Empty
        if there was none."""
        return read_object(self.path("site").with_suffix(".json"))

    def write_record(self, **what: Any) -> None:
        """Replace the record. Raises OutputError."""
        write_whole(self.path("site").with_suffix(".json"), json.dumps(what))

    def keeper(self) -> int | None:
        """Find the living keeper: a descriptor of its process, which becomes readable when it ends."""
        record = self.record()
        with contextlib.suppress(KeyError, ProcessLookupError):
            keeper = os.pidfd_open(record["process"])
            # Another process may have its number by now.
            if start_of(record["process"]) == record["start"] and not select.select([keeper], [], [], 0)[0]:
                return keeper
            os.close(keeper)
        return None

    def attach(self, launch: str) -> int:
        """Make a relay the newest; returns its FIFO, to read from. launch: the launcher's incarnation. Raises
        OSError."""
        relay = self.path(f"relay-{os.getpid()}")
        relay.unlink(missing_ok=True)
        os.mkfifo(relay, 0o600)
        lines = os.open(relay, os.O_RDWR | os.O_CLOEXEC)  # for writing, too, or it would end between two lines
        relay.replace(self.path("relay"))
        write_whole(self.path("launch"), launch)
        return lines

    def is_newest(self, lines: int) -> bool:
        """Whether no relay has attached since the one with this FIFO."""
        with contextlib.suppress(FileNotFoundError):  # the keeper has ended
            return os.path.samestat(os.fstat(lines), self.path("relay").stat())
        return True

    def say(self, line: str) -> None:
        """Print a line to the log, and send it to the relay that attached last, if that takes it: the site must not
        wait. The disk may be full."""
        with contextlib.suppress(OSError):
            print(line, flush=True)
        with contextlib.suppress(OSError):
            relay = os.open(self.path("relay"), os.O_WRONLY | os.O_NONBLOCK)
            with os.fdopen(relay, "wb", buffering=0) as file:
                file.write(f"{line}\n".encode())


def start_of(process: int) -> int:
    """Start of a process, in clock ticks since the machine's: no other process has both its number and its start.
    Clocks are set, so the time of day would not do. Raises ProcessLookupError."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    except FileNotFoundError:
        raise ProcessLookupError(process) from None


def asked(request: LaunchRequest) -> str:
    """Digest what a site is to be, in hex, whichever launcher asks for it."""
    return hashlib.sha256(replace(request, resume=False, launch="").to_line()).hexdigest()


# ------------------------------------------------------------------------------------------------------- the relay


def launch_site() -> int:
    """Relay: attach to the site that a line on standard input asks for, or begin it. Returns its exit code.

    The end of standard input leaves the site as it is; `STOP_COMMAND` stops it.
    """
    line = b""
    # Byte by byte, because a buffered reader could swallow the commands that follow.
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    request = LaunchRequest.from_line(line)
    files = SiteFiles.of(request)
    log = files.folder / "logs" / f"{files.site}.launcher.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    begun: subprocess.Popen[bytes] | None = None
    deadline = time.monotonic() + BEGIN_S
    while True:
        if keeper := files.keeper():
            outcome = _attach(files, request, keeper)
            os.close(keeper)
            if outcome is not None:
                return exit_code(outcome)
        # In this order: where the launch is this one, the record is not of a launch before it.
        if files.launch() == request.launch and (ended := files.record()).get("code") in (0, EXIT_FOR_GOOD):
            return exit_code(RunOutcome(**ended))
        code = None if begun is None else begun.poll()
        if time.monotonic() > deadline:
            why = "is held by a launcher that was started there" if code == EXIT_HELD else "does not begin"
            return exit_code(RunOutcome(EXIT_FOR_GOOD, f"{files.folder}: site {files.site} {why}; see {log}"))
        if code not in (None, EXIT_HELD):
            why = f"{files.site} could not be begun; the end of {log}:"
            return exit_code(RunOutcome(1, "\n".join([why, *tail(log)])))
        if begun is None or code is not None:
            begun = _begin(line, log)
        time.sleep(LOOK_S)


def _attach(files: SiteFiles, request: LaunchRequest, keeper: int) -> RunOutcome | None:
    """Relay until the keeper has ended, or standard input, which leaves the site as it is.

    keeper: as `SiteFiles.keeper` gives it. Returns the exit code and why; None: the site has ended, or was another
    than is asked for now and is stopped.
    """
    record = files.record()
    if "code" in record:
        return None  # it has just ended
    if not request.resume and request.launch != files.launch():
        return RunOutcome(
            EXIT_FOR_GOOD,
            f"{files.folder}: {files.site} of a run of this name lives here (process {record['process']}): attach to "
            "it with --resume, which also brings it back where it was stopped, or give this run another name",
        )
    if record["asked"] != asked(request):
        print(f"{files.site} is stopped, and started again as its launcher asks now", flush=True)
        _stop(keeper)
        select.select([keeper], [], [])
        return None
    try:
        lines = files.attach(request.launch)
    except OSError as error:  # as without room: it is tried again for as long as the run lasts
        return RunOutcome(EXIT_SSH, f"{files.site} lives, but cannot be attached to: {error}")
    print(f"attached to process {record['process']}", flush=True)
    stopping, sources = False, [0, lines, keeper]
    while True:
        ready, _, _ = select.select(sources, [], [])
        if 0 in ready:
            command = os.read(0, 4096)
            if not command and not stopping:
                return RunOutcome(0)
            if not command:
                sources.remove(0)
            elif STOP_COMMAND in command and files.is_newest(lines):
                stopping = True
                _stop(keeper)
        if lines in ready:
            os.write(1, os.read(lines, 1 << 16))
        elif keeper in ready:
            ended = files.record()
            if "code" in ended:
                return RunOutcome(**ended)
            return RunOutcome(STOPPED if stopping else 1, "the process that kept this site was killed")


def _stop(keeper: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(keeper, signal.SIGTERM)


def _begin(line: bytes, log: Path) -> subprocess.Popen[bytes]:
    """Start the keeper in a session of its own, which has nothing of the connection's."""
    with log.open("ab") as output:
        keeper = subprocess.Popen(
            (sys.executable, "-P", "-m", "geotrain", "launch-site", "--keep"),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    assert keeper.stdin is not None
    with contextlib.suppress(BrokenPipeError), keeper.stdin:
        keeper.stdin.write(line)
    return keeper


# ------------------------------------------------------------------------------------------------------ the keeper


def keep_site() -> int:
    """Keep the site that standard input asks for until it has ended. Returns the exit code."""
    request = LaunchRequest.from_line(sys.stdin.buffer.readline())
    files = SiteFiles.of(request)
    try:
        with locked(files.folder, request.sites):
            return exit_code(_kept(request, files))
    except RunsAlready:
        return EXIT_HELD


def _kept(request: LaunchRequest, files: SiteFiles) -> RunOutcome:
    """Keep the site until it has ended. The caller has its lock."""
    # It may have begun in this incarnation of the launcher, which says the same again after each loss of the
    # connection.
    resume = request.resume or files.launch() == request.launch
    if files.launch() != request.launch:  # a relay of this launch must not take the end of the last one for its own
        files.path("site").with_suffix(".json").unlink(missing_ok=True)
    write_whole(files.path("launch"), request.launch)
    files.write_record(process=os.getpid(), start=start_of(os.getpid()), asked=asked(request))
    try:
        outcome = _run(replace(request, resume=resume), files)
        if 0 < outcome.code < 128:  # restarts were tried here, so the launcher should not try
            outcome = replace(outcome, code=EXIT_FOR_GOOD)
    except Exception as error:
        if not isinstance(error, OSError) and not type(error).__module__.startswith("geotrain."):
            raise
        outcome = RunOutcome(1 if out_of_room(error) else EXIT_FOR_GOOD, str(error))
    try:
        files.write_record(code=outcome.code, reason=outcome.reason)
    except OutputError:  # without room: then the site is begun again, and finds that it has ended
        files.say(outcome.reason)
    files.path("relay").unlink(missing_ok=True)
    return outcome


def _run(request: LaunchRequest, files: SiteFiles) -> RunOutcome:
    if set(request.sites) - {GLOBAL}:
        check_data(request.run)
    if request.resume and not request.without_checkpoints:
        check_states(request.run, request.cluster, request.sites)
    with (
        event_log(request.run, files.folder, request.sites) as events,
        supervisor_of(request, files.folder, events, files.say) as supervisor,
    ):
        used = replace(request, cluster=without_cordoned(request.run, request.cluster, files.folder))
        wrong = check_hosts(used.run, used.cluster, used.sites, used.resume)
        for each in wrong:
            files.say(f"{each.host}: {each.what}; {each.remedy}")
        refuse(wrong)
        request.write_files(files.folder)
        starting = local_processes(request, files.folder, this_machine())
        prepare_far_hosts(used, files.folder)
        for process in starting:
            supervisor.start(process)
        return supervisor.wait(troubles_of(request, files.folder, files.say))
