"""The commands that look ahead of a run: what it needs, takes and costs. Nothing is started."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from geotrain.commands.cli_options import Changes, ClusterFile, RunFile, drawn
from geotrain.commands.output import Output, with_json

app = typer.Typer()
command = partial(app.command, rich_help_panel="Before a run")
Objective = Literal["speed", "cost", "tokens"]


@command(
    epilog="Example: geotrain simulate configs/runs/1b.json configs/clusters/four-regions-ssh.json --tflops 150 "
    "--codec int4 --picture run.svg",
)
@with_json
def simulate(
    run: RunFile,
    cluster: ClusterFile,
    tflops: Annotated[
        float | None, typer.Option(help="What one rank really reaches; without it, what `plan` predicts.")
    ] = None,
    step_s: Annotated[float | None, typer.Option("--step-s", help="Or: measured seconds of an inner step.")] = None,
    local_steps: Annotated[int | None, typer.Option("--local-steps", "-H", min=1, help="What if: H.")] = None,
    updates: Annotated[int | None, typer.Option("--updates-per-send", "-K", min=1, help="What if: K.")] = None,
    codec: Annotated[str | None, typer.Option(help="What if: codec of both directions between regions.")] = None,
    without: Annotated[str | None, typer.Option(metavar="REGION", help="What if: one region less.")] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it: .png, .svg or .pdf.", callback=drawn)
    ] = None,
    changes: Changes = None,
) -> Output:
    """Run a run in a simulated world: hours, utilization, bytes of each link; and what if. Nothing is started."""
    from geotrain.commands.simulate import WhatIf, report_text
    from geotrain.commands.simulate import simulate as start

    report = start(
        run,
        cluster,
        step_s=step_s,
        tflops=tflops,
        what_if=WhatIf(local_steps, updates, codec, without),
        changes=tuple(changes or ()),
        picture=picture,
    )
    return Output(report, report_text(report))


@command(epilog="Example: geotrain probe configs/clusters/four-regions-ssh.json --run configs/runs/1b.json")
@with_json
def probe(
    cluster: ClusterFile,
    run: Annotated[
        Path | None, typer.Option(help="Measure also how fast accelerators train this run's model.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.5, max=60.0, help="Time for each direction of each link.")] = 3.0,
    bytes_: Annotated[
        int,
        typer.Option("--bytes", min=1 << 20, max=16 << 30, help="Bytes at most, for each direction of each link."),
    ] = 256 << 20,
) -> Output:
    """Measure a cluster's links, and its accelerators, and write the figures into the cluster file.

    Every pair of regions is measured over the channel that training uses, one after another. The servers' ports must
    be free: probe before the run, not during it.
    """
    from geotrain.commands.probe import probe as measure
    from geotrain.net.transport.link_probe import Limits

    return Output(measure(cluster, run, Limits(seconds, bytes_), lambda line: print(line, flush=True)))


@app.command("probe-site", hidden=True)
def probe_site() -> None:
    """Measure one place, started by `probe` on its machine: reads what to measure from standard input."""
    from geotrain.commands.probe_site import serve_site

    raise typer.Exit(serve_site())


@command("dry-run", epilog="Example: geotrain dry-run configs/runs/70b.json configs/clusters/slurm.json")
@with_json
def dry_run(
    run: RunFile,
    cluster: ClusterFile,
    ask_hosts: Annotated[bool, typer.Option("--ask-hosts", help="Look at all other hosts, too.")] = False,
    changes: Changes = None,
) -> Output:
    """Check both files together; print memory a rank, bytes an exchange, and all that `launch` would refuse here.

    Builds no weights, starts nothing. Exit code 2: it would be refused.
    """
    from geotrain.config import load_cluster, load_run

    files = (
        load_run(run, changes or ()),
        load_cluster(cluster),
    )  # mistakes are reported before torch is imported
    from geotrain.commands.dry_run import needs, report, show, show_forecast
    from geotrain.launch.terminal import new_console

    console = new_console()
    found = needs(*files)
    show(found, console)
    forecast = show_forecast(*files, console)
    console.record = True
    accepted = report(*files, console, ask_hosts)
    lines = [line.strip() for line in console.export_text().splitlines() if line]
    return Output(
        {**asdict(found), "forecast": forecast, "accepted": accepted, "lines": lines}, code=0 if accepted else 2
    )


@command(epilog="Example: geotrain plan model.json configs/clusters/world-inventory.json --out planned")
@with_json
def plan(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL.json|RUN.json",
            help="A Hugging Face config, or a run file with pins; with --live a folder.",
        ),
    ],
    cluster: Annotated[Path, typer.Argument(metavar="CLUSTER.json", help="Regions with hosts, devices, links.")],
    out: Annotated[Path | None, typer.Option(help="Folder for run, cluster, hostfiles and picture.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Why this plan, and what came next.")] = False,
    tokens: Annotated[float | None, typer.Option(min=1, help="Tokens to train, as in 1e11.")] = None,
    objective: Annotated[Objective, typer.Option(help="Tokens/s, dollars a token, tokens for --usd.")] = "speed",
    within_days: Annotated[float | None, typer.Option(min=0, help="The latest end.")] = None,
    usd: Annotated[float | None, typer.Option(min=0, help="Most to pay for accelerators.")] = None,
    tokens_per_s: Annotated[float | None, typer.Option(min=0, help="The least speed.")] = None,
    most_workers: Annotated[int | None, typer.Option(min=1, help="The fastest are kept; without it, 16.")] = None,
    pin_global: Annotated[str | None, typer.Option(metavar="REGION", help="Where the global server must be.")] = None,
    utilization: Annotated[
        float, typer.Option(min=0.01, max=1, help="Utilization that workers are to reach.")
    ] = 0.95,
    imbalance: Annotated[
        float, typer.Option(min=1, help="Assumed ratio of the fullest rank's tokens to the mean, with experts.")
    ] = 1.0,
    live: Annotated[
        bool, typer.Option("--live", help="What to add, drop or move in the live run of that folder.")
    ] = False,
    catalogue: Annotated[
        Path | None, typer.Option(metavar="VMS.csv", help="Prices: a catalogue of SkyPilot's.")
    ] = None,
) -> Output:
    """Decide who computes what, where the global server stands, and H, K, fragments and codecs that the links bear.

    What the run file says under parallel, outer and model.recompute is kept.
    """
    from geotrain.commands.plan import as_json
    from geotrain.commands.plan import plan as make_plan

    wish = tokens, objective, within_days, utilization, usd, tokens_per_s, most_workers
    found = make_plan(
        *(run, cluster, out, explain, *wish),
        pin_global=pin_global,
        imbalance=imbalance,
        live=live,
        catalogue=catalogue,
    )
    return Output(as_json(*found))
