"""Compiles the Triton kernels ahead of time for machines that are not here, and looks at what comes out.

Of each kernel as many calls as it takes that each two settings meet (block and density, dtype and target, …): some
800 compilations, each done once. `--whole` takes every combination, for each target: hours; `--part 3/8` an eighth of
them. Triton's cache is not used. Counted over all compiled kernels:

spilled          those of which a register was spilled
shared           those that take more shared memory than the target's smallest kin has
scalar_loads     those with accesses narrower than what a thread has in a row (`benchmarks.compiled_code`)
offsets_32bit    those that compute in 32 bits what overflows at 2^35 elements
failed           those that did not compile
compile_s        processor seconds of a compilation, the median
all_s            processor seconds of all

    python -m benchmarks.aot [--quick] [--whole] [--part 1/1] [--only KERNEL_OP …]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import Any

from benchmarks.common import command_line, report, units_by_ending

# Bytes of shared memory that one block of threads may take. For sm_80, what its smaller kin (sm_86, sm_89) has.
SHARED = {"sm_80": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "sm_120": 99 << 10, "gfx942": 64 << 10}
SHARED["gfx950"] = 160 << 10
COUNTED = ("compiled", "spilled", "shared", "scalar_loads", "offsets_32bit", "failed")


@dataclass(frozen=True)
class Finding:
    """Faults of a compiled kernel, by what `COUNTED` calls it. seconds: of this process, to compile it."""

    kernel: str
    target: str
    seconds: float
    wrong: dict[str, str]


def used_s() -> float:
    """Processor time of this process and of the assemblers that it has waited for."""
    return sum(os.times()[:4])


def look(launch: Any, target: str) -> Finding:
    from benchmarks import compiled_code, triton_aot

    name, began = launch.kernel.__name__, used_s()
    try:
        compiled = triton_aot.compile_launch(launch, target)
    except Exception as error:
        return Finding(name, target, used_s() - began, {"failed": repr(error)})
    seconds, taken, wrong = used_s() - began, compiled.resources, {}
    if taken.spilled or not 0 < taken.registers <= 512:
        wrong["spilled"] = f"{taken.spilled} spilled, {taken.registers} registers"
    if taken.shared > SHARED[target]:
        wrong["shared"] = f"{taken.shared} bytes of shared memory"
    if narrow := compiled_code.narrow_accesses(launch, compiled.code):
        wrong["scalar_loads"] = ", ".join(sorted(set(narrow)))
    if offsets := compiled_code.narrow_offsets(launch, compiled.ttir):
        wrong["offsets_32bit"] = offsets[0]
    return Finding(name, target, seconds, wrong)


def look_at(case: Any, target: str, places: Sequence[int]) -> list[Finding]:
    """Check the launches of a case at these places."""
    launches = case.launches(target)
    return [look(launches[place], target) for place in places]


def units(cases: Iterable[tuple[Any, str]]) -> Iterator[tuple[Any, str, list[int]]]:
    """Cases, each for one target, with the places of those of its launches of which the compiler is told something
    that no earlier one told it."""
    from benchmarks import kernel_space

    seen = set()
    for case, target in cases:
        fresh = []
        for place, launch in enumerate(case.launches(target)):
            if (unit := (kernel_space.key(launch), target)) not in seen:
                seen.add(unit)
                fresh.append(place)
        if fresh:
            yield case, target, fresh


def by_pairs(op: str) -> Iterator[tuple[Any, str]]:
    """Cases, each for one target, which is a factor like the others."""
    from benchmarks import kernel_space, triton_aot

    for row in kernel_space.pairs({**kernel_space.factors()[op], "target": tuple(triton_aot.TARGETS)}):
        target = row.pop("target")
        yield kernel_space.Case(op, tuple(row.items())), target


def every(op: str) -> Iterator[tuple[Any, str]]:
    from benchmarks import kernel_space, triton_aot

    return ((case, target) for case in kernel_space.whole(op) for target in triton_aot.TARGETS)


def main() -> int:
    from benchmarks import kernel_space

    ops = tuple(kernel_space.factors())
    parser = command_line(__doc__, quick={"only": ["add_decoded"]})
    parser.add_argument("--whole", action="store_true", help="every combination, not each two settings: hours")
    parser.add_argument("--part", default="1/1", help="of what is compiled, such as 3/8")
    parser.add_argument("--only", nargs="+", choices=ops, default=ops, help="ops")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    cases = (case for op in options.only for case in (every(op) if options.whole else by_pairs(op)))
    chosen = list(units(islice(cases, part - 1, None, parts)))
    counts: dict[str, Any] = dict.fromkeys(COUNTED, 0)
    seconds = []
    with ProcessPoolExecutor(options.processes) as pool:
        for (case, target, _), found in zip(chosen, pool.map(look_at, *zip(*chosen, strict=True)), strict=True):
            for finding in found:
                counts["compiled"] += 1
                seconds.append(finding.seconds)
                for what, told in finding.wrong.items():
                    counts[what] += 1
                    print(f"{finding.kernel} for {target}: {what}: {told}\n    {case}", flush=True)
    counts |= {"compile_s": median(seconds), "all_s": sum(seconds)}
    report("aot", counts, options, units_by_ending({"_s": "s"}, "count"), timed=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
