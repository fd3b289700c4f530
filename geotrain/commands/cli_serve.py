"""The commands that run servers: `geotrain serve`, alone or with a command behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from geotrain.commands.cli_options import Changes, ClusterOption, LaunchId, Resume, RunOption
from geotrain.launch.loading import loading

serve = typer.Typer(help="Run a server: alone, for loops that join by its address, or one of a launch, by hand.")

JoinedRule = Literal["async", "halos", "diloco", "local-sgd"]


@serve.callback(
    invoke_without_command=True, epilog="Example: geotrain serve --folder runs/mine --steps 20000 --workers 2"
)
def serve_alone(
    context: typer.Context,
    folder: Annotated[Path, typer.Option(help="Folder of the run, which has its name.")] = Path("runs/joined"),
    rule: Annotated[JoinedRule, typer.Option(help="Rule of the outer loop.")] = "async",
    steps: Annotated[int | None, typer.Option(min=1, help="Of the run, over all workers; default: no end.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="The run begins when so many have joined.")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to join at.")] = 7600,
    bind: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
    changes: Changes = None,
    resume: Resume = False,
) -> None:
    """Serve loops that join with an address and the token that this prints, without a run file.

    The first to join gives the model and its first weights; others are compared with it. All links are TLS. Ends
    when all steps are trained, or all workers have left. Started again with --resume added, it goes on. The folder is
    a run's, for `status`, `export` and all other commands.
    """
    # Before torch is imported: idle threads of a server must not spin on the cores of ranks beside it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sources = {option.opts[0]: context.get_parameter_source(option.name or "") for option in context.command.params}
    stated = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if context.invoked_subcommand is not None and stated:
        raise typer.BadParameter(f"write {stated[0]} behind {context.invoked_subcommand!r}")
    if context.invoked_subcommand is None:
        with loading():
            from geotrain.commands.serve import run_alone
        raise typer.Exit(run_alone(folder, rule, port, bind, steps, workers, resume, tuple(changes or ())))


@serve.command("global", epilog="Example: geotrain serve global --run runs/mine/run.json")
def serve_global(
    run: RunOption, cluster: ClusterOption = None, resume: Resume = False, launch_id: LaunchId = ""
) -> None:
    """Run the global server until every region has left."""
    with loading():
        from geotrain.commands.serve import run_server
    raise typer.Exit(run_server("global", run, cluster, resume, launch=launch_id))


@serve.command("region", epilog="Example: geotrain serve region eu --run runs/mine/run.json")
def serve_region(
    region: Annotated[str, typer.Argument(help="The region's name in the cluster file.")],
    run: RunOption,
    cluster: ClusterOption = None,
    resume: Resume = False,
    launch_id: LaunchId = "",
) -> None:
    """Run a region's server until its workers have left and all they did is sent."""
    with loading():
        from geotrain.commands.serve import run_server
    raise typer.Exit(run_server(region, run, cluster, resume, launch=launch_id))


@serve.command("shard", epilog="Example: geotrain serve shard eu 0 --run runs/mine/run.json")
def serve_shard(
    server: Annotated[str, typer.Argument(help="The server that it belongs to: `global` or a region's name.")],
    number: Annotated[int, typer.Argument(min=0, help="Its place in that server's `shards`, from 0.")],
    run: RunOption,
    cluster: ClusterOption = None,
    resume: Resume = False,
) -> None:
    """Run one shard of a server until that has ended."""
    with loading():
        from geotrain.commands.serve import run_server
    raise typer.Exit(run_server(server, run, cluster, resume, number))
