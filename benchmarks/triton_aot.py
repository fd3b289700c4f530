"""Compiles the Triton kernels ahead of time for machines that are not here, and looks at what comes out.

What is compiled is what the launchers really launch, with each codec's own settings: they are run with a recorder in
place of the device. Triton's cache is not used. Counted over all compiled kernels:

spilled          those of which a register was spilled
shared           those that take more shared memory than the target's smallest kin has
compile_s        processor seconds of a compilation, the median

    python -m benchmarks.triton_aot [--quick]
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from benchmarks.common import command_line, report, units_by_ending
from geotrain.kernels import AdamStep, triton_ops
from geotrain.kernels.payload_format import FORMATS, PayloadFormat

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
# Bytes of shared memory that one block of threads may take. For sm_80, what its smaller kin (sm_86, sm_89) has.
SHARED = {"sm_80": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "sm_120": 99 << 10, "gfx942": 64 << 10}
SHARED["gfx950"] = 160 << 10
# Of the product: each codec as it is by default, the sparse one as run files have it, and blocks of both ends.
PAYLOADS = [*map(PayloadFormat, FORMATS), PayloadFormat("topk2", 1024), PayloadFormat("topk2", 4096, 0.25)]
PAYLOADS += [PayloadFormat("int4", 32), PayloadFormat("int8", 4096)]
POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint8: "*u8",
}


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: its arguments by name, and the compiler's options."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]
    programs: int

    @property
    def constants(self) -> list[str]:
        """Names of the arguments that are compiled in."""
        return [parameter.name for parameter in self.kernel.params if parameter.is_constexpr]

    @property
    def signature(self) -> dict[str, str]:
        """Triton's type of each argument: as its annotation says, or else by its value."""
        return {
            p.name: "constexpr" if p.is_constexpr or value is None else p.annotation_type or _kind(value)
            for p in self.kernel.params
            for value in [self.arguments[p.name]]
        }

    @property
    def given(self) -> list[str]:
        """Names of the arguments that the compiled kernel takes, in order."""
        return [p.name for p in self.kernel.params if not p.is_constexpr and self.arguments[p.name] is not None]


@dataclass(frozen=True)
class Resources:
    """Resources that one thread (on AMD: one lane) of a compiled kernel takes."""

    kernel: str
    registers: int
    spilled: int  # bytes; on AMD registers
    shared: int  # bytes of a block of threads


@dataclass(frozen=True)
class Compiled:
    """ttir: Triton's own form, before it is made for a target. code: PTX or AMDGCN."""

    resources: Resources
    ttir: str
    code: str


def launches(call: Callable[[], object], target: str = "") -> list[Launch]:
    """Run a launcher and list what it would have launched. Its tensors may be on the CPU or "meta"; nothing is
    computed. target: some launchers ask which maker's GPU it is."""
    found: list[Launch] = []

    def record(kernel: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
        named = dict(zip(kernel.arg_names, args, strict=False))
        options = {key: value for key, value in kwargs.items() if key not in kernel.arg_names}
        named.update({key: value for key, value in kwargs.items() if key in kernel.arg_names})
        found.append(Launch(kernel, named, options, grid[0]))

    with _replaced(JITFunction, "run", record), _replaced(torch.version, "hip", "gfx" in target or None):
        call()
    return found


def product_launches(target: str) -> list[Launch]:
    """List what the product launches: of every codec on whole blocks and on a shorter last one, of AdamW, and of the
    rotary embedding."""
    found: list[Launch] = []

    def note(call: Callable[[], object]) -> None:
        found.extend(launches(call, target))

    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    for fmt in PAYLOADS:
        numel = 16 * fmt.block + 19
        wide, payload = meta(numel), meta(fmt.encoded_bytes(numel), dtype=torch.uint8)
        for values, other in ((meta(numel, dtype=torch.bfloat16), wide), (wide, None)):
            note(lambda v=values, o=other: triton_ops.quantize(v, payload, fmt, o, o, 0))  # noqa: B023
            note(lambda w=None if other is None else 0.5: triton_ops.dequantize(payload, wide, fmt, w))  # noqa: B023
    for dtype in (torch.float32, torch.bfloat16):
        x, out, step = meta(1 << 16), meta(1 << 16, dtype=dtype), AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, step=7)
        note(lambda: triton_ops.adam(x, x, x, out, out, step, step, True))  # noqa: B023
        states, angles = meta(64, 2, 8, 128, dtype=dtype), meta(64, 64)
        note(lambda: triton_ops.rotate(states, states, angles, angles, False))  # noqa: B023
    return found


def compile_launch(launch: Launch, target: str) -> Compiled:
    """Compile for a name in TARGETS, without Triton's cache; raises what Triton raises."""
    constants, attributes = {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if launch.signature[parameter.name] == "constexpr":
            constants[(index,)] = value
        elif _divisible(value) and not parameter.do_not_specialize:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, launch.signature, constants, attributes)
    # ptxas would run twice: Triton does not keep what it says.
    always, binary = _replaced(knobs.compilation, "always_compile", True), _replaced(CUDABackend, "make_cubin", _none)
    with always, binary:
        compiled = triton.compile(source, target=TARGETS[target], options=launch.options)
    code = compiled.asm["amdgcn" if "amdgcn" in compiled.asm else "ptx"]
    return Compiled(_resources(launch.kernel.__name__, compiled), compiled.asm["ttir"], code)


def _none(*_: Any) -> bytes:
    return b""


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    if value < 2**31:
        return "i32"
    return "i64"


def _divisible(value: Any) -> bool:
    return value.data_ptr() % 16 == 0 if isinstance(value, Tensor) else isinstance(value, int) and value % 16 == 0


def _resources(name: str, compiled: Any) -> Resources:
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        found = [int(re.findall(rf"\.{key}:\s+(\d+)", text)[0]) for key in ("vgpr_count", "vgpr_spill_count")]
        return Resources(name, *found, compiled.metadata.shared)  # type: ignore[call-arg]
    report = _assembler_report(compiled.asm["ptx"])
    found = [
        int(re.findall(pattern, report)[0]) for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
    ]
    return Resources(name, *found, compiled.metadata.shared)  # type: ignore[call-arg]


def _assembler_report(ptx: str) -> str:
    """Read what ptxas says of this code. Triton brings two, and which takes the PTX depends on Triton's version."""
    architecture = re.findall(r"\.target (sm_\d+\w*)", ptx)[0]
    errors = ""
    for path in sorted((Path(triton.__file__).parent / "backends/nvidia/bin").glob("ptxas*")):
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(ptx)
            file.flush()
            command = [str(path), "-v", "--fmad=false", f"--gpu-name={architecture}", file.name, "-o", "/dev/null"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode == 0:
            return done.stderr
        errors += done.stderr
    raise RuntimeError(f"no ptxas takes this PTX for {architecture}: {errors}")


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def look(place: int, target: str) -> tuple[str, Resources, float]:
    """Compile one of `product_launches`: (the launch in words, what it takes, processor seconds)."""
    launch, began = product_launches(target)[place], sum(os.times()[:4])
    resources = compile_launch(launch, target).resources
    constants = ", ".join(f"{name} {launch.arguments[name]}" for name in launch.constants)
    return f"{resources.kernel} for {target}: {constants}", resources, sum(os.times()[:4]) - began


def main() -> int:
    parser = command_line(__doc__, quick={"targets": ["sm_90"]})
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    options = parser.parse_args()
    work = [(place, target) for target in options.targets for place in range(len(product_launches(target)))]
    counts, seconds = {"compiled": 0, "spilled": 0, "shared": 0}, []
    with ProcessPoolExecutor(options.processes) as pool:
        for (_, target), (words, taken, took) in zip(work, pool.map(look, *zip(*work, strict=True)), strict=True):
            wrong = {"spilled": taken.spilled > 0, "shared": taken.shared > SHARED[target]}
            seconds.append(took)
            counts["compiled"] += 1
            for what in (what for what, found in wrong.items() if found):
                counts[what] += 1
                print(f"{what}: {words}; {taken}", flush=True)
    found = {**counts, "compile_s": median(seconds)}
    report("triton_aot", found, options, units_by_ending({"_s": "s"}, "count"), timed=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
