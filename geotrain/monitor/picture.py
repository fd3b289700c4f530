"""What a run's events tell, as a picture: does it learn, and what do its links carry."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from geotrain.files import OutputError

Points = list[tuple[float, float]]


@dataclass
class Story:
    """What is drawn. losses: worker → (tokens of the run so far, loss of a job). validations: (tokens, loss).
    sent: region and direction → (seconds since the beginning, bytes so far)."""

    losses: dict[str, Points] = field(default_factory=dict)
    validations: Points = field(default_factory=list)
    sent: dict[str, Points] = field(default_factory=dict)


def picture(folder: Path, sequence_length: int, path: Path) -> None:
    """Draw a run's losses over its tokens and its regions' payload bytes over time (.png, .svg or .pdf).

    folder: the run's. Raises OutputError: it holds no events, or the picture cannot be written.
    """
    told = story(folder, sequence_length)
    if not told.losses:
        raise OutputError(f"{folder}: no trained job is told of in its events; nothing to draw")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "geotrain"  # the same picture gives the same file
    figure, (learning, links) = pyplot.subplots(1, 2, figsize=(11, 4))
    for worker, points in told.losses.items():
        learning.plot(*zip(*points, strict=True), ".", markersize=4, alpha=0.6, label=f"{worker}: training, by job")
    if told.validations:
        learning.plot(*zip(*told.validations, strict=True), "k-o", markersize=4, label="global weights: validation")
    learning.set_xlabel("tokens of the run")
    learning.set_ylabel("loss, nats a token")
    for name, points in told.sent.items():
        seconds, counts = zip(*points, strict=True)
        links.step(seconds, [count / 1e6 for count in counts], where="post", label=name)
    links.set_xlabel("seconds")
    links.set_ylabel("payload between regions, MB")
    for axes in (learning, links):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.tight_layout()
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise OutputError(f"{path}: cannot be written: {error}") from None
    finally:
        pyplot.close(figure)


def story(folder: Path, sequence_length: int) -> Story:
    """Of the events of workers and of region servers that are on this machine."""
    told = Story()
    for path in sorted((folder / "events").glob("*.jsonl")):
        jobs = [e for e in events(path) if e["event"] == "JobTrained"]
        if jobs:
            told.losses[path.stem] = [(e["start"] * sequence_length + e["tokens"], e["loss"]) for e in jobs]
    servers = {p.parent.name: list(events(p)) for p in sorted((folder / "servers").glob("*/events.jsonl"))}
    begin_s = min((e["time_s"] for told_by in servers.values() for e in told_by), default=0.0)
    for site, told_by in servers.items():
        told.validations += [(e["tokens"], e["loss"]) for e in told_by if e["event"] == "ValidationDone"]
        for event, direction in (("SentUp", "up"), ("Merged", "down")):
            moved = [(e["time_s"] - begin_s, e["payload_bytes"]) for e in told_by if e["event"] == event]
            if moved:
                times = [time_s for time_s, _ in moved]
                told.sent[f"{site} {direction}"] = list(zip(times, accumulate(b for _, b in moved), strict=True))
    return told


def events(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines; the last one of a live file may be half written."""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue
