"""Records a few inner steps of one rank with torch's profiler, when an operator asks (`geotrain profile`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torch.profiler import profile

from geotrain.outer.events import Event, Profiled


class StepProfiler:
    """Writes traces for Perfetto or chrome://tracing into a folder, one file a rank and request.

    worker, rank: whose steps they are. write_event: called when a trace is written. trouble: called when it cannot
    be; training goes on. `ask` may be called from any thread, `after_step` from the one that trains.
    """

    def __init__(
        self,
        folder: Path,
        worker: str,
        rank: int,
        write_event: Callable[[Event], None],
        trouble: Callable[[str], None],
    ) -> None:
        self.folder, self.worker, self.rank = folder, worker, rank
        self.write_event, self.trouble = write_event, trouble
        self._asked = 0  # inner steps that are to be recorded
        self._name, self._done, self._steps = "", 0, 0  # of the recording: its file, its steps, those it is to have
        self._recording: profile | None = None

    def ask(self, steps: int) -> None:
        """Record so many inner steps, from the next one on; or after those that are being recorded."""
        self._asked = steps

    def after_step(self, next_step: tuple[int, int] | None) -> None:
        """Write the trace if an inner step was its last, and begin another if that was asked for.

        next_step: job and number of the step that follows; None: there is none.
        """
        if self._recording is not None:
            self._done += 1
            if self._done == self._steps or next_step is None:
                self._write(self._recording)
                self._recording = None
        if self._asked and self._recording is None and next_step is not None:
            job, step = next_step
            self._steps, self._done, self._asked = self._asked, 0, 0
            self._name = f"{self.worker}-rank-{self.rank}-job-{job}-step-{step}.json.gz"
            self._recording = profile()
            self._recording.start()

    def _write(self, recorded: profile) -> None:
        """Write the trace, whole or not at all."""
        path, part = self.folder / self._name, self.folder / f".{self._name}"
        try:
            recorded.stop()
            self.folder.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(part))
            part.rename(path)
        except (OSError, RuntimeError) as error:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            self.trouble(f"no trace of {self._done} inner steps: {error}")
        else:
            self.write_event(Profiled(self.worker, self.rank, self._done, str(path)))
