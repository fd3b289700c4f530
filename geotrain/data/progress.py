"""The progress display of `prepare`: a bar on a terminal, plain lines elsewhere."""

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
    """Give the callback to pass as `progress` to `prepare`, inside a context."""

    def counts(progress: Progress) -> str:
        return f"{progress.documents:,} documents, {progress.tokens:,} tokens"

    if console.is_terminal:
        columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        with Bar(*columns, console=console) as bar:
            task = bar.add_task("")
            yield lambda p: bar.update(task, completed=p.done_bytes, total=p.total_bytes, description=counts(p))
        return

    start_s = shown_s = time.monotonic()
    latest: Progress | None = None

    def show(progress: Progress, last: bool = False) -> None:
        nonlocal shown_s, latest
        latest, now_s = progress, time.monotonic()
        if last or now_s - shown_s >= LINE_EVERY_S:
            shown_s = now_s
            share = 100 * progress.done_bytes / max(progress.total_bytes, 1)
            console.print(f"prepare: {share:.0f} % in {now_s - start_s:.0f} s, {counts(progress)}", highlight=False)

    yield show
    # The last line may have been held back for LINE_EVERY_S; show how it ended.
    if latest is not None:
        show(latest, last=True)
