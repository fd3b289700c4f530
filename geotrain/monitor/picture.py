"""Draws a picture of a run from its events: whether it learns, and what its links carry."""

from __future__ import annotations

from pathlib import Path

from geotrain.common.files import OutputError
from geotrain.monitor.events import Follower, JobTrained
from geotrain.outer.events import Merged, SentUp, ValidationDone

Points = list[tuple[float, float]]


def picture(folder: Path, sequence_length: int, path: Path) -> None:
    """Draw a run's losses over its tokens and its regions' payload bytes over time (.png, .svg or .pdf).

    folder: the run's. Raises OutputError if it holds no events or the picture cannot be written.
    """
    losses, validations, sent = story(folder, sequence_length)
    if not losses:
        raise OutputError(f"{folder}: its events have no trained job; nothing to draw")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "geotrain"  # the same picture gives the same file
    figure, (learning, links) = pyplot.subplots(1, 2, figsize=(11, 4))
    for worker, points in losses.items():
        learning.plot(*zip(*points, strict=True), ".", markersize=4, alpha=0.6, label=f"{worker}: training, by job")
    if validations:
        learning.plot(*zip(*validations, strict=True), "k-o", markersize=4, label="global weights: validation")
    learning.set_xlabel("tokens of the run")
    learning.set_ylabel("loss, nats a token")
    for name, points in sent.items():
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


def story(folder: Path, sequence_length: int) -> tuple[dict[str, Points], Points, dict[str, Points]]:
    """The points of the picture's curves, from the event logs of workers and servers on this machine.

    Returns three things: worker → [(tokens of the run so far, loss of a job)]; [(tokens, loss)] of validations; and
    "region up" or "region down" → [(seconds from the start, payload bytes so far)].
    """
    losses: dict[str, Points] = {}
    validations: Points = []
    sent: dict[str, Points] = {}
    for path in sorted((folder / "events").glob("*.jsonl")):
        jobs = [r.event for r in Follower(path).read() if isinstance(r.event, JobTrained)]
        if jobs:
            losses[path.stem] = [(job.start * sequence_length + job.tokens, job.loss) for job in jobs]
    servers = {p.parent.name: list(Follower(p).read()) for p in sorted((folder / "servers").glob("*/events.jsonl"))}
    begin_s = min((r.time_s for of_site in servers.values() for r in of_site), default=0.0)
    for site, of_site in servers.items():
        sums = {"up": 0, "down": 0}
        for record in of_site:
            event = record.event
            if isinstance(event, ValidationDone):
                validations.append((event.tokens, event.loss))
            elif isinstance(event, SentUp | Merged):
                way = "up" if isinstance(event, SentUp) else "down"
                sums[way] += event.payload_bytes
                sent.setdefault(f"{site} {way}", []).append((record.time_s - begin_s, sums[way]))
    return losses, validations, sent
