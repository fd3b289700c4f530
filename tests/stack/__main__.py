"""Pairs of a Python and its libraries: installs each beside the others, runs in it what touches the stack and a
launched run, and one of which each stack has a region; and lets trainings that this Python began go on there and come
back; prints a table, and a last line of JSON.

    make stack                                   # each Python that setup.py allows and this machine has
    make stack STACK_ARGS="3.12 3.12:2.15.0"     # these, the second with another torch; one that is not there fails
    make stack STACK_ARGS=--short                # the newest that is not this one, if any, within four minutes
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

from geotrain.launch.check import free_ports

ROOT = Path(__file__).parents[2]
OWN = "{}.{}".format(*sys.version_info)
PYTHONS = "3.11", "3.12", "3.13"
LIBRARIES = "torch", "megatron-core", "deepspeed", "triton", "transformers", "numpy"
# All that calls these libraries; the rest of the product imports none of them, or torch's plainest functions.
TESTS = [f"tests/{name}" for name in ("inner", "kernels", "staging", "families", "parameters", "worker", "own_loop")]
SHORT = ["tests/families", *(f"tests/inner/test_{name}.py" for name in ("behaviour", "families", "rotary"))]
EQUAL = 1e-5  # losses in fp32 differ by so little, relatively
# So that no file is compiled anew by each process, also where the environment says otherwise.
CLEAN = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def run(command: Sequence[Any], limit_s: float, **how: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), timeout=limit_s, text=True, **{"cwd": ROOT, "env": CLEAN, **how})


def python_of(version: str) -> Path | None:
    """Find an interpreter: pyenv's, or one of this name that starts."""
    installed = sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python"))
    found = installed[-1:] or [path for path in [which(f"python{version}")] if path]
    if not found or run([found[0], "-V"], 60, capture_output=True).returncode:
        return None
    return Path(found[0])


def environment(pair: str, python: Path) -> Path:
    """Install a pair into a folder of its own, as `make install` does; this Python's own is there."""
    if pair == OWN:
        return Path(sys.prefix)
    folder, torch = ROOT / "build/stack" / pair.replace(":", "-torch"), pair.partition(":")[2]
    settings = {"PYTHON": str(python), "TORCH_VERSION": torch}
    run(["bash", "launch/install.sh", folder], 3600, env={**os.environ, **settings}, check=True)
    return folder


def tested(environment: Path, tests: list[str], report: Path) -> dict[str, int]:
    """Run tests; returns how many passed, failed, and were skipped."""
    how = ["-n", "3", "--dist", "loadfile", "--no-loadscope-reorder", "-m", "not gpu", f"--junit-xml={report}"]
    report.unlink(missing_ok=True)
    run([environment / "bin/python", "-m", "pytest", "-q", *how, *tests], 3600)
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    count = {name: sum(int(s.get(name, 0)) for s in suites) for name in ("tests", "skipped", "failures", "errors")}
    failed = count["failures"] + count["errors"]
    return {"passed": count["tests"] - count["skipped"] - failed, "failed": failed, "skipped": count["skipped"]}


def settings(folder: Path, name: str, samples: int) -> Path:
    """Write a shortened quickstart's run file; returns its path."""
    run = json.loads((ROOT / "configs/runs/quickstart.json").read_text())
    run["data"] |= {what: str(folder / "runs/stack/data" / what) for what in ("train", "validation", "tokenizer")}
    run["data"] |= {"train_samples": samples, "validation_samples": 64}  # of 7,680
    run |= {"name": name, "model": {"config": str(ROOT / "configs/models/llama-tiny.json")}}
    (folder / f"{name}.json").write_text(json.dumps(run))
    return folder / f"{name}.json"


def launched(folder: Path, *commands: Sequence[Any]) -> int:
    """Run commands of geotrain side by side; returns an exit code that is not 0, or 0."""
    logs = [folder / f"{number}.log" for number in range(len(commands))]
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        how = {"cwd": folder, "stderr": subprocess.STDOUT}
        outputs = [stack.enter_context(log.open("w")) for log in logs]
        running = [pool.submit(run, c, 1200, stdout=o, **how) for c, o in zip(commands, outputs, strict=True)]
        codes = [each.result().returncode for each in running]
    for log in (log for code, log in zip(codes, logs, strict=True) if code):
        print(log.read_text()[-4000:])
    return max(codes, key=abs)


def together(environment: Path, folder: Path) -> int:
    """Train one model by a region of this stack and one of the other, on what a quickstart in this folder has
    prepared; returns an exit code."""
    shutil.rmtree(folder / "runs/together", ignore_errors=True)
    cluster = json.loads((ROOT / "configs/clusters/local-two-regions.json").read_text())
    sites = {"global": (cluster, "global_server"), **{r["name"]: (r, "server") for r in cluster["regions"]}}
    for port, (site, key) in zip(free_ports(len(sites)), sites.values(), strict=True):
        site[key] = {"host": "127.0.0.1", "port": port}
    (folder / "cluster.json").write_text(json.dumps(cluster))
    launch = "launch", settings(folder, "together", 1920), folder / "cluster.json", "--only"
    own, other = (where / "bin/geotrain" for where in (Path(sys.prefix), environment))
    code = launched(folder, (own, *launch, "global", "--only", "eu"), (other, *launch, "us"))
    logs = [(folder / f"runs/together/events/{name}.jsonl").read_text() for name in ("eu-0", "us-0")]
    return code or int(not all("JobTrained" in log for log in logs))


def part(python: Path | str, folder: Path, first: int, last: int) -> dict[str, list[float]]:
    """Train some steps of each model, which go on from what another part left in the folder."""
    done = run([python, "-m", "tests.stack.part", folder, first, last], 600, capture_output=True)
    if done.returncode:
        raise OSError(done.stderr[-4000:])
    losses: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return losses


def furthest_apart(python: Path) -> float:
    """Begin trainings in this stack, go on in the other and again in this one; returns how far a loss is from one
    stack's, relatively."""
    with TemporaryDirectory() as folder:
        whole = part(sys.executable, Path(folder, "whole"), 0, 6)
        parts = [
            part(which, Path(folder, "parts"), first, first + 2)
            for which, first in ((sys.executable, 0), (python, 2), (sys.executable, 4))
        ]
    joined = {name: [loss for each in parts for loss in each[name]] for name in whole}
    return max(abs(a / b - 1) for name in whole for a, b in zip(joined[name], whole[name], strict=True))


def played(pair: str, tests: list[str]) -> dict[str, object]:
    """Install a pair and try it; returns its row of the table."""
    began, python = time.monotonic(), python_of(pair.partition(":")[0])
    if python is None:
        return {"run": "not there", "ok": False}
    try:
        where, folder = environment(pair, python), ROOT / "build/stack" / f"{pair.replace(':', '-torch')}-played"
        folder.mkdir(parents=True, exist_ok=True)
        ask = f"from importlib.metadata import version; print(*map(version, {LIBRARIES}))"
        versions = run([where / "bin/python", "-c", ask], 60, capture_output=True, check=True).stdout.split()
        apart = furthest_apart(where / "bin/python")
        first = where / "bin/geotrain", "quickstart", "--run", settings(folder, "stack", 960)
        code = launched(folder, first) or together(where, folder)
        count = tested(where, tests, folder / "tests.xml")
    except (OSError, subprocess.SubprocessError) as error:
        print(error)
        return {"run": str(error).splitlines()[-1], "ok": False}
    return {
        **dict(zip(LIBRARIES, versions, strict=True)),
        **count,
        "run": "ok" if code == 0 else f"exit {code}",
        "apart": apart,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "ok": code == 0 and apart < EQUAL and count["passed"] > 0 == count["failed"],
    }


def asked(arguments: list[str]) -> Iterator[tuple[str, list[str]]]:
    """List pairs, and what of the tests each plays."""
    there = [version for version in PYTHONS if python_of(version)]
    short = "--short" in arguments
    if not (pairs := [word for word in arguments if word != "--short"]):
        pairs = [version for version in there if version != OWN][-1:] if short else there
    yield from ((pair, SHORT if short else TESTS) for pair in pairs)


def main() -> int:
    """Play all pairs; 1 if one failed."""
    found = {pair: played(pair, tests) for pair, tests in asked(sys.argv[1:])}
    if not found:
        print(f"no Python here but {OWN}: no other libraries are tried")
    columns = [*LIBRARIES, "passed", "failed", "skipped", "run", "apart", "minutes"]
    print("| Python |", *(f"{name} |" for name in columns))
    print("|---" * (len(columns) + 1) + "|")
    for pair, row in found.items():
        print(f"| {pair.partition(':')[0]} |", *(f"{row.get(name, '')} |" for name in columns))
    failed = [pair for pair, row in found.items() if not row["ok"]]
    print(json.dumps({"pairs": found, "failed": failed}))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
