"""Arguments and options that more than one command takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PICTURES = (".png", ".svg", ".pdf")

RunFile = Annotated[Path, typer.Argument(metavar="RUN.json", help="The run: model, data, DeepSpeed, outer loop.")]
ClusterFile = Annotated[Path, typer.Argument(metavar="CLUSTER.json", help="The cluster: regions, hosts, links.")]
RunOption = Annotated[Path, typer.Option("--run", help="The run file.")]
ClusterOption = Annotated[Path | None, typer.Option("--cluster", help="Default: cluster.json beside the run file.")]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Set a key of the run file: outer.local_steps=64. As often as wanted."
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue what is in the folder.")]
LaunchId = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="Name of this launch. What had ended in it stays ended when it is started again."
    ),
]


def drawn(path: Path | None) -> Path | None:
    """Check what a picture is to be written to."""
    if path is not None and path.suffix not in PICTURES:
        raise typer.BadParameter(f"{path}: use {', '.join(PICTURES)}")
    return path
