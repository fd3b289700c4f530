"""The command line, in this process: what it needs is slow to import."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest

from geotrain.commands import cli

ROOT = Path(__file__).parents[2]


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str

    @property
    def text(self) -> str:
        """All that was said, with its line ends as spaces."""
        return " ".join((self.stdout + self.stderr).split())


Run = Callable[..., Done]  # of a command's words, and the folder that it is said in


def say(*words: str | Path, cwd: Path = ROOT) -> Done:
    """Run a command of GeoTrain's in this process."""
    out, err = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["geotrain", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return Done(int(ended.value.code or 0), out.getvalue(), err.getvalue())
