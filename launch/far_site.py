"""A site on another machine than the launcher's.

One process keeps it: in a session of its own it starts the site's servers and workers, starts again what dies, and
lives on when nobody is connected. What ssh runs is a front, which begins that process if none lives, and then
carries orders there and words back (`geotrain.launch.control`). The site's lock, which the kernel releases however
its holder ends, sees to it that there is only one.

In the run's folder, `.site-<site>.json` names the launcher's incarnation that the site was begun by or attached to
last, and how it ended if it has: a launcher whose connection was lost meanwhile is told when it comes back.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from geotrain.common.files import OutputError, out_of_room, write_whole
from geotrain.config import EXIT_FOR_GOOD
from geotrain.launch.check import check_data
from geotrain.launch.control import ControlSocket, attach, follow
from geotrain.launch.far_hosts import prepare_far_hosts
from geotrain.launch.host_check import check_hosts, refuse
from geotrain.launch.launcher import RunsAlready, event_log, locked, supervisor_of
from geotrain.launch.site_processes import LaunchRequest, local_processes
from geotrain.launch.supervisor import RunOutcome, exit_code, tail
from geotrain.launch.worker_command import this_machine
from geotrain.outer.messages import GLOBAL

BEGIN_S = 120.0  # a site's process listens within this time, or another launcher holds its lock
LOOK_S = 0.1
EXIT_HELD = 75  # of a site's process that found the lock held


def launch_site() -> int:
    """The front: attach to the site that a line on standard input asks for, or begin it. Returns its exit code.

    The end of standard input leaves the site as it is; `STOP_ORDER` stops it.
    """
    line = b""
    # Byte by byte, because a buffered reader could swallow the orders that follow.
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    request = LaunchRequest.from_line(line)
    folder, site = request.run.run_folder.absolute(), "-".join(request.sites)
    log = folder / "logs" / f"{site}.launcher.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    begun: subprocess.Popen[bytes] | None = None
    deadline = time.monotonic() + BEGIN_S
    while True:
        if link := attach(folder, site):
            with link:
                code = follow(link, line, orders=0)
            if code is not None:
                return code
        ended = _record(folder, site)
        if ended.get("launch") == request.launch and "code" in ended:
            return exit_code(RunOutcome(ended["code"], ended["reason"]))
        code = None if begun is None else begun.poll()
        if time.monotonic() > deadline:
            why = "is held by a launcher that was started there" if code == EXIT_HELD else "does not begin"
            return exit_code(RunOutcome(EXIT_FOR_GOOD, f"{folder}: site {site} {why}; see {log}"))
        if code not in (None, EXIT_HELD):
            return exit_code(RunOutcome(1, "\n".join([f"{site} could not be begun; the end of {log}:", *tail(log)])))
        if begun is None or code is not None:
            begun = _begin(line, log)
        time.sleep(LOOK_S)


def keep_site() -> int:
    """Keep the site that standard input asks for until it has ended. Returns the exit code."""
    request = LaunchRequest.from_line(sys.stdin.buffer.readline())
    folder, site = request.run.run_folder.absolute(), "-".join(request.sites)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(folder, request.sites))
        except RunsAlready:
            return EXIT_HELD
        # It may have begun in this incarnation of the launcher, which says the same again after each loss of the
        # connection.
        before = _record(folder, site).get("launch") == request.launch
        control = stack.enter_context(ControlSocket(folder, request))
        _note(folder, site, launch=request.launch)
        try:
            outcome = _kept(replace(request, resume=request.resume or before), folder, control)
            # Restarts were tried here, so the launcher should not try.
            code = EXIT_FOR_GOOD if 0 < outcome.code < 128 else outcome.code
        except Exception as error:
            if not isinstance(error, OSError) and not type(error).__module__.startswith("geotrain."):
                raise
            outcome, code = RunOutcome(1, str(error)), 1 if out_of_room(error) else EXIT_FOR_GOOD
        if code in (0, EXIT_FOR_GOOD):
            _note(folder, site, launch=control.request.launch, code=code, reason=outcome.reason)
        control.end(RunOutcome(code, outcome.reason))
    return exit_code(RunOutcome(code, outcome.reason))


def _kept(request: LaunchRequest, folder: Path, control: ControlSocket) -> RunOutcome:
    if set(request.sites) - {GLOBAL}:
        check_data(request.run)
    with (
        event_log(request.run, folder, request.sites) as events,
        supervisor_of(request, folder, events, control.say) as supervisor,
    ):
        control.serve_in(supervisor)
        wrong = check_hosts(request.run, request.cluster, request.sites, request.resume)
        for each in wrong:
            control.say(f"{each.host}: {each.what}; {each.remedy}")
        refuse(wrong)
        request.write_files(folder)
        starting = local_processes(request, folder, this_machine())
        prepare_far_hosts(request, folder)
        for process in starting:
            supervisor.start(process)
        return supervisor.wait()


def _begin(line: bytes, log: Path) -> subprocess.Popen[bytes]:
    """Start the process that keeps the site, in a session of its own, which has nothing of the connection's."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            (sys.executable, "-m", "geotrain", "launch-site", "--keep"),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(line)
    return process


def _record(folder: Path, site: str) -> dict[str, Any]:
    """What `_note` wrote last; empty if that is nothing."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        found: dict[str, Any] = json.loads(_place(folder, site).read_text())
        return found
    return {}


def _note(folder: Path, site: str, **what: Any) -> None:
    with contextlib.suppress(OutputError):  # without room; then the site is begun again, and finds that it has ended
        write_whole(_place(folder, site), json.dumps(what))


def _place(folder: Path, site: str) -> Path:
    return folder / f".site-{site}.json"
