"""Runs the tests that execute what has changed since a commit, those that look closest first: `python -m
tests.contexts [--since COMMIT]`. With `--renew` it records anew those of which nothing is kept, or that have changed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import defaultdict

from tests.contexts.kept import ROOT, Contexts, file_of

PYTEST = (sys.executable, "-m", "pytest", "--contexts", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")


def git(*words: str) -> str:
    return subprocess.run(("git", *words), cwd=ROOT, check=True, capture_output=True, text=True).stdout


def base() -> str:
    """Where this branch left main; on main itself, its newest commit."""
    known = git("for-each-ref", "--format=%(refname:short)", "refs/remotes/origin/main", "refs/heads/main").split()
    return git("merge-base", "HEAD", known[-1]).strip() if known else "HEAD"


def changed_lines(commit: str) -> dict[str, set[int]]:
    """File → its lines that differ from the commit; of what was taken away, those beside it."""
    found, file = defaultdict[str, set[int]](set), ""
    for line in git("diff", "--unified=0", "--no-ext-diff", commit, "--", "*.py").splitlines():
        if line.startswith("+++ "):
            file = line.removeprefix("+++ ").removeprefix("b/")
        elif (hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line)) and file != "/dev/null":
            begin, many = int(hunk[1]), int(hunk[2] or 1)
            found[file] |= set(range(begin, begin + many)) or {begin, begin + 1}
    for file in git("ls-files", "--others", "--exclude-standard", "--", "*.py").splitlines():
        found[file] = set(range(1, len((ROOT / file).read_text().splitlines()) + 1))
    return found


def run(words: list[str]) -> int:
    return subprocess.run((*PYTEST, *words), cwd=ROOT).returncode


def quick(commit: str, seconds: float) -> int:
    """Run what executes the changed lines, for about so long. Returns pytest's exit code."""
    changed, contexts = changed_lines(commit), Contexts()
    tests = {test for file, lines in changed.items() for test in contexts.testing(file, lines)}
    chosen, left_out = contexts.within(tests, seconds, changed)
    if not contexts.seconds:
        print("nothing is recorded: tests of the same name run. `make quick RENEW=--renew` records all, once")
    for file, lines in changed.items():
        print(f"{file}: {len(lines)} lines changed")
    print(
        f"{len(chosen)} tests execute them{f'; {left_out} more, which `make test` runs' if left_out else ''}",
        flush=True,
    )
    if not chosen:
        return 0
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as only:
        only.write("\n".join(chosen))
        only.flush()
        return run([f"--only={only.name}", *dict.fromkeys(map(file_of, chosen))])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.contexts", description=__doc__)
    parser.add_argument("--since", metavar="COMMIT", help="default: where this branch left main")
    parser.add_argument("--seconds", type=float, default=60.0, help="of tests, at most")
    parser.add_argument("--renew", action="store_true", help="record what nothing is kept of, or has changed")
    asked = parser.parse_args()
    if asked.renew:
        return run(stale) if (stale := Contexts().stale()) else 0
    return quick(asked.since or base(), asked.seconds)


if __name__ == "__main__":
    sys.exit(main())
