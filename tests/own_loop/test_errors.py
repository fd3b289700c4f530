"""Errors of a user's loop say what they have to say in two lines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LOOP = "def loop(): geotrain.OuterLoop('none.json', 'eu', torch.nn.Linear(1, 1))"


def test_an_error_that_says_all_ends_a_program_with_two_lines(tmp_path: Path) -> None:
    """Others keep their traceback, and who catches it gets the error as it was."""
    program = tmp_path / "mine.py"
    message = "ConfigError: none.json: cannot be read: No such file or directory"
    again = "try: loop()\nexcept ValueError as error: raise RuntimeError('own') from error"
    for end, said in ("loop()", f"{program}, line 2: {LOOP}\n{message}\n"), (again, None):
        program.write_text(f"import geotrain, torch\n{LOOP}\n{end}")
        done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120, cwd=tmp_path)
        assert done.returncode == 1 and done.stderr.replace(f"{tmp_path}/none", "none") == (said or done.stderr)
        assert ("Traceback" in done.stderr) == (said is None)
