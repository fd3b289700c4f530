"""The commands that look at a run and steer it, by its folder on the machine that launched it."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from geotrain.commands.output import Json, Output, with_json

if TYPE_CHECKING:
    from geotrain.commands.operate import LiveRun, RunStatus

app = typer.Typer()
command = partial(app.command, rich_help_panel="A live run")

RunFolder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A run's folder, as in runs/NAME.")]
Wait = Annotated[float, typer.Option("--wait", min=0, metavar="SECONDS", help="Return only when it is done.")]


def live_run(folder: Path) -> LiveRun:
    """The run in that folder. Imported when a command needs it, because that takes seconds."""
    from geotrain.commands.operate import LiveRun

    return LiveRun(folder)


def phase_result(phase: str, after: RunStatus | None = None) -> Output:
    """The result of a command that steers a run. after: the run when that was waited for; its state is the exit code
    if it has failed, or no server tells of it."""
    if after is None:
        return Output({"phase": phase}, phase)
    code = int(after.state) if after.state.name in ("FAILED", "UNREACHABLE") else 0
    return Output({"phase": phase, "status": after.as_json()}, f"{phase}\n{after.headline}", code)


@command(epilog="Example: geotrain status runs/mine; geotrain status runs/mine --json | jq .state")
def status(
    folder: RunFolder,
    once: Annotated[bool, typer.Option("--once", help="One table, also on a terminal.")] = False,
    as_json: Json = False,
    every: Annotated[float, typer.Option(min=0.2, metavar="SECONDS", help="Time between looks.")] = 2.0,
) -> None:
    """Show how a run goes, or went; on a terminal, until it is over or Ctrl-C.

    Exit codes: 0 running (also paused, draining, stopping), 3 finished, 4 failed, 5 no server answers, 6 stopped
    before its data was trained, 2 no such run.
    """
    from geotrain.commands.operate import picture, watch
    from geotrain.launch.terminal import new_console

    run, console = live_run(folder), new_console()
    if console.is_terminal and not once and not as_json:
        raise typer.Exit(int(watch(run, console, every)))
    seen = run.see()
    if as_json:
        print(json.dumps(seen.as_json(), indent=2))
    else:
        console.print(picture(run, seen), highlight=False)
    raise typer.Exit(int(seen.state))


@command(epilog="Examples: geotrain logs runs/mine eu-0 --follow; geotrain logs runs/mine --update eu-0/2.17")
def logs(
    folder: RunFolder,
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]…", help="Processes; none: all.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run is over, or Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of each log's end.")] = 30,
    update: Annotated[
        str | None,
        typer.Option(metavar="MEMBER/NUMBER", help="Show instead the way of this update, and where it is."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the logs of a run's processes: global, a region's name, a worker's name.

    Those of a far region lie in the same folder on its machine; here, REGION.ssh has what its launcher says.

    With --json each line is an object of its own.

    With --update: when it was made, sent, applied and answered, by whom, and, if it has not arrived, what it waits
    for.
    """
    from geotrain.commands.logs import shown, stream, trace_update
    from geotrain.commands.operate import launcher_runs

    if update is not None:
        found = trace_update(folder, update)
        print(json.dumps(asdict(found), indent=2) if as_json else "\n".join(shown(found)))
        return
    with suppress(KeyboardInterrupt):
        for line in stream(folder, names or (), lines, lambda: follow and launcher_runs(folder) is True):
            print(json.dumps({"line": line}) if as_json else line, flush=follow)


@command(epilog="Example: geotrain pause runs/mine")
@with_json
def pause(folder: RunFolder) -> Output:
    """Hand out no more data: workers finish the job that they have (and the next one they hold), then wait.

    Nothing is lost, and it outlives restarts of the servers. `geotrain resume` lets the run go on.
    """
    return phase_result(live_run(folder).steer("pause"))


@command(epilog="Example: geotrain resume runs/mine")
@with_json
def resume(folder: RunFolder) -> Output:
    """Let a paused run go on. (One that has ended: geotrain launch … --resume.)"""
    return phase_result(live_run(folder).steer("resume"))


@command(name="set", epilog="Example: geotrain set runs/mine outer.local_steps=64")
@with_json
def set_key(
    folder: RunFolder,
    setting: Annotated[
        str,
        typer.Argument(metavar="KEY=VALUE", help="outer.local_steps=NUMBER, or outer.rule.updates_per_send=NUMBER."),
    ],
) -> Output:
    """Change a setting of a live run: from the next lease on workers take jobs of so many inner steps, or at once
    regions send up after so many updates.

    It outlives restarts of the servers and `geotrain launch … --resume`, whose run file stays as it is. Exit code 1
    when a region's server was not reached: say it again.
    """
    said, missed = live_run(folder).set(setting)
    lines = [f"{site}: {words}" for site, words in said.items()]
    return Output({"setting": setting, "said": said, "missed": missed}, "\n".join(lines), 1 if missed else 0)


@command(epilog="Example: geotrain drain runs/mine eu --wait 600")
@with_json
def drain(
    folder: RunFolder,
    region: Annotated[str, typer.Argument(metavar="REGION", help="Its name in the cluster file.")],
    wait: Wait = 0.0,
) -> Output:
    """Let a region go: its workers finish their job, send what they have, and leave. The others train on.

    It takes part again when its processes are started again, with --resume.
    """
    run = live_run(folder)
    phase = run.steer("drain", region)
    return phase_result(phase, run.wait_until_over(wait, lambda seen: run.has_left(region, seen)) if wait else None)


@command(epilog="Example: geotrain unban runs/mine eu-0")
@with_json
def unban(
    folder: RunFolder, member: Annotated[str, typer.Argument(metavar="MEMBER", help="A worker, or a region.")]
) -> Output:
    """Unban a worker or region whose updates were refused too often, or that was expelled: started anew it may
    join."""
    answer = live_run(folder).bar("unban", member)
    return Output({"answer": answer}, answer)


@command(epilog="Example: geotrain expel runs/mine eu-0")
@with_json
def expel(
    folder: RunFolder, member: Annotated[str, typer.Argument(metavar="MEMBER", help="A worker, or a region.")]
) -> Output:
    """Put a worker or region out of the run, as one that hangs: others train what it held, and its process ends when
    it next calls. It outlives restarts of the servers; `geotrain unban` lets the member join again, started anew.
    """
    answer = live_run(folder).bar("expel", member)
    return Output({"answer": answer}, answer)


HostName = Annotated[str, typer.Argument(metavar="HOST", help="As the cluster file names it.")]
Here = Annotated[bool, typer.Option("--here", hidden=True)]


@command(epilog="Example: geotrain cordon runs/mine gpu07 --why 'a fan is loud'")
@with_json
def cordon(
    folder: RunFolder,
    host: HostName,
    why: Annotated[str, typer.Option(metavar="TEXT", help="For others who look at the run.")] = "by hand",
    here: Here = False,
) -> Output:
    """Put a host out of use: at the end of its job its worker is formed anew of other hosts, without loss.

    It outlives restarts of the launcher; `geotrain uncordon` takes it back. Under the rule `sync` a worker is formed
    anew when it is next started again.
    """
    bound = live_run(folder).cordon(host, why, here)
    only = "goes on with it: only a worker of several hosts of one region, or with a spare one, is formed anew"
    keep = f"\n{', '.join(bound)} {only}" if bound else ""
    return Output({"host": host, "why": why, "bound": bound}, f"{host} is cordoned: {why}{keep}")


@command(epilog="Example: geotrain uncordon runs/mine gpu07")
@with_json
def uncordon(folder: RunFolder, host: HostName, here: Here = False) -> Output:
    """Take a cordoned host back: its worker is formed of it again at the end of a job."""
    live_run(folder).cordon(host, None, here)
    return Output({"host": host}, f"{host} may be used again")


@command(epilog="Example: geotrain profile runs/mine --worker eu-0 --steps 5")
@with_json
def profile(
    folder: RunFolder,
    worker: Annotated[str, typer.Option(metavar="WORKER", help="Whose ranks record.")],
    steps: Annotated[int, typer.Option(min=1, help="Inner steps; at most 50.")] = 5,
) -> Output:
    """Have a worker's ranks record their next inner steps with torch's profiler, while they train.

    Traces come into the run's folder `profiles` on each rank's machine, for Perfetto (ui.perfetto.dev) or
    chrome://tracing; their marks geotrain.lease, .step, .encode, .send, .adopt are NVTX ranges too on a GPU.
    """
    run = live_run(folder)
    answer = run.profile(worker, steps)
    traces = str(run.config.run_folder / "profiles")
    return Output({"answer": answer, "traces": traces}, f"{answer}; traces: {traces}")


@command(epilog="Example: geotrain snapshot runs/mine")
@with_json
def snapshot(folder: RunFolder) -> Output:
    """Have the servers write a snapshot now; prints where each lies.

    Exit code 1 when a region's server has not: it may be cut off, and what it lacks is with the global server.
    """
    written = live_run(folder).snapshot()
    whole = all("/snapshots/" in where for where in written.values())
    return Output(written, "\n".join(f"{site}: {where}" for site, where in written.items()), 0 if whole else 1)


@command(epilog="Example: geotrain stop runs/mine --wait 600")
@with_json
def stop(folder: RunFolder, wait: Wait = 0.0) -> Output:
    """End the run in good order: workers finish their job, everything is sent and written, all processes end.

    `geotrain launch … --resume` goes on as if it had never stopped, but for the time.
    """
    run = live_run(folder)
    phase = run.steer("stop")
    return phase_result(phase, run.wait_until_over(wait) if wait else None)


@command(epilog="Example: geotrain rollback runs/1b --to 12 --out runs/1b-again")
@with_json
def rollback(
    folder: RunFolder,
    to: Annotated[
        int | None, typer.Option(metavar="SNAPSHOT", help="Its number; without it, all are listed.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="For the new run; it must not exist.")] = None,
    live: Annotated[bool, typer.Option("--live", help="RUN is on: its launcher stops it and goes on so.")] = False,
) -> Output:
    """Begin a run anew from a snapshot of this one, which is stopped; data handed out since is not trained again.

    The run itself stays as it is. Workers begin with no optimizer state. With --live its launcher does it, in a
    folder NAME-rollback-1 beside the run's; status, stop and --resume follow it there.
    """
    from geotrain.commands.export import in_words
    from geotrain.launch.rollback import roll_back, snapshots_of

    if live:
        if to is None or out is not None:
            raise typer.BadParameter("--live takes --to SNAPSHOT, and no --out")
        live_run(folder).take_back(to)
        return Output({"snapshot": to}, f"the run stops, and goes on from snapshot {to} in a folder beside its own")
    if (to is None) != (out is None):
        raise typer.BadParameter("say both: --to SNAPSHOT and --out FOLDER; neither lists the snapshots")
    if to is None or out is None:
        found = snapshots_of(folder)
        lines = [f"{each['snapshot']}: {in_words(each | {'samples': each['committed_samples']})}" for each in found]
        if found and not found[-1]["ended"]:
            lines.append("The journal may hold more: `geotrain snapshot`, of a live run, makes one of it.")
        return Output(found, "\n".join(lines))
    skipped = roll_back(folder, to, out)
    launch = f"geotrain launch RUN.json CLUSTER.json --set folder={out} --resume --without-checkpoints"
    return Output({"folder": out, "skipped_samples": skipped}, f"{skipped:,} samples are skipped; train on: {launch}")
