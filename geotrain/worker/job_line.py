"""What a worker says while it trains: a line now and then."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TextIO


def say(what: str, where: TextIO) -> None:
    """Print a line, unless it is empty."""
    with suppress(OSError):  # the log may be on a full disk
        if what:
            print(what, file=where, flush=True)


_FORMS = {
    "loss": "loss {:.4f}",
    "grad_norm": "gradient norm {:.3g}",
    "lr": "learning rate {:.3g}",
    "tokens_per_s": "{:,.0f} tokens/s",
}


class JobLine:
    """Writes a worker's training to its log: a line for a job, at most one in `every_s` seconds."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._printed_s: float | None = None

    def of(self, numbers: Mapping[str, Any], now_s: float) -> str:
        """Make the line for a job, or "". numbers: those of `JobTrained`."""
        if self._printed_s is not None and now_s < self._printed_s + self._every_s:
            return ""
        self._printed_s = now_s
        # A user's loop need not say all of them.
        shown = [form.format(numbers[key]) for key, form in _FORMS.items() if not math.isnan(numbers[key])]
        return f"job {numbers['job']}, from sample {numbers['start']:,}: {', '.join(shown)}"
