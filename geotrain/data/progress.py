"""How `prepare` tells how far it is: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from geotrain.data.prepare import Progress

LINE_EVERY_S = 5.0


@contextmanager
def progress_display(console: Console) -> Iterator[Callable[[Progress], None]]:
    """Give the callback to pass as prepare's `progress`."""
    if not console.is_terminal:
        with _lines(console) as show_line:
            yield show_line
        return
    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("")

        def show(progress: Progress) -> None:
            bar.update(task, completed=progress.done_bytes, total=progress.total_bytes, description=_counts(progress))

        yield show


@contextmanager
def _lines(console: Console) -> Iterator[Callable[[Progress], None]]:
    start_s = time.monotonic()
    told_s = start_s
    latest: Progress | None = None

    def tell(progress: Progress) -> None:
        share = 100 * progress.done_bytes / max(progress.total_bytes, 1)
        elapsed_s = time.monotonic() - start_s
        console.print(f"prepare: {share:.0f} % in {elapsed_s:.0f} s, {_counts(progress)}", highlight=False)

    def show(progress: Progress) -> None:
        nonlocal told_s, latest
        latest = progress
        if time.monotonic() - told_s >= LINE_EVERY_S:
            told_s = time.monotonic()
            tell(progress)

    yield show
    if latest is not None:
        tell(latest)


def _counts(progress: Progress) -> str:
    return f"{progress.documents:,} documents, {progress.tokens:,} tokens"
