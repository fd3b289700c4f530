"""Find faults in compiled kernels: offsets that 32 bits cannot hold, and accesses that could be wider."""

from __future__ import annotations

import re
from collections import defaultdict

from benchmarks.triton_aot import Launch
from geotrain.kernels.payload_format import SCALE_SHIFT

LIMIT = 2**31
# Arguments of whose elements a thread has several that follow one another.
STREAMED = {"values", "anchor", "residual", "codes", "base", "out", "weights", "delta", "momentum", "accumulator"}
STREAMED |= {"incoming", "sent", "exp_avg", "exp_avg_sq", "grad", "matrices", "x", "left", "right", "added"}
# Read or written bit by bit, or where a payload says.
SCATTERED = {"dequantize_topk": {"out", "words"}, "quantize_topk": {"words"}}
SCATTERED |= {"sum_of_squares": {"x"}}  # its lanes are far apart: their order is part of the result
IN_A_ROW = 4  # elements that a thread has, at least: the kernels' own choice (`ELEMENTS` and threads)
WIDEST = 16  # bytes of one access
_BYTES = {"float64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "int16": 2, "uint8": 1}


def narrow_offsets(launch: Launch, ttir: str) -> list[str]:
    """Lines of Triton's IR that compute in 32 bits what grows with the programs' number, and overflows at this one.

    What is known of a value is how far it can grow: so many times the programs' number. A remainder does not.
    """
    growth: dict[str, int] = {}
    constants: dict[str, int] = {}
    found = []
    for line in ttir.splitlines():
        named = re.match(r"\s*(%[\w#]+)(?::\d+)? = (?:\"?)([\w.]+)", line)
        if named is None:
            continue
        name, operation = named.groups()
        operands = re.findall(r"%[\w#]+", line.split("=", 1)[1])
        if operation == "arith.constant":
            value = re.search(r"constant (?:dense<)?(-?\d+)>? ?:", line)
            if value:
                constants[name] = int(value.group(1))
            continue
        if operation == "tt.get_program_id":
            growth[name] = 1
            continue
        if not re.search(r"\bi32>?( loc.*)?$|xi32>( loc.*)?$", line.rstrip()):
            continue  # wider, or no integer
        known = [growth[o] for o in operands if o in growth]
        if not known or operation in ("arith.remsi", "arith.fptosi", "tt.load", "arith.cmpi", "scf.for"):
            continue
        times = 1
        for operand in operands:
            if operation == "arith.muli":
                times *= constants.get(operand, 1)
            elif operation == "arith.shli":
                times <<= constants.get(operand, 0)
        over = constants.get(operands[-1], 1) if operation == "arith.divsi" else 1
        growth[name] = max(known) * times // over
        if growth[name] * launch.programs >= LIMIT:
            found.append(line.strip())
    return found


def narrow_accesses(launch: Launch, code: str) -> list[str]:
    """Accesses of what is read or written in a row, by fewer bytes than a thread has of it, or than go at once.

    Not of a shorter last block, which begins anywhere.
    """
    name = launch.kernel.__name__
    if launch.arguments.get("TAIL") or launch.arguments.get("LENGTH", 0) != launch.arguments.get("BLOCK", 0) * (
        "LENGTH" in launch.arguments
    ):
        return []
    in_a_row, lanes = IN_A_ROW, 64 if "amdgcn" in code else 32
    if "matrices" not in launch.arguments and "BLOCK_K" in launch.arguments:  # a block of a product, and its threads
        down = launch.arguments.get("BLOCK_M") or launch.arguments["BLOCK"]
        across = launch.arguments.get("BLOCK_N") or launch.arguments["BLOCK"]
        inner = launch.arguments["BLOCK_K"]
        least = min(down * across, down * inner, inner * across)  # of the result, and of both factors
        in_a_row = min(IN_A_ROW, max(1, least // (lanes * launch.options["num_warps"])))
    if name == "quantize_topk":  # a small block has fewer for each thread of a warp
        in_a_row = min(IN_A_ROW, max(1, launch.arguments["BLOCK"] // (lanes * launch.options["num_warps"])))
    wanted = {
        argument: min(WIDEST, in_a_row * _BYTES[str(launch.arguments[argument].dtype).removeprefix("torch.")])
        for argument in launch.given
        if argument in STREAMED - SCATTERED.get(name, set())
    }
    if "amdgcn" not in code:
        by_argument = _of_ptx(launch, code)
        if "padding" in launch.given:  # the bytes before the codes, one by one
            by_argument["codes"].remove(1)
        return [
            f"{argument}: {width} bytes of {wanted[argument]}"
            for argument, widths in by_argument.items()
            if argument in wanted
            for width in widths
            if width < wanted[argument]
        ]
    # Here it is not told whose an access is. The narrowest that anything streamed may have is allowed, and so are
    # scales, and the angles of a token, a row that all its heads share.
    scale = 4 - SCALE_SHIFT_BYTES[launch.arguments["SCALE_SHIFT"]] if "SCALE_SHIFT" in launch.arguments else 0
    allowed = {scale, 4} if "cosine" in launch.arguments else {scale}
    least = min(wanted.values(), default=0)
    widths = [_amd_bytes(kind) for kind in re.findall(r"\b(?:global|flat|buffer)_load_(\w+)", code)]
    return (
        [f"{width} bytes" for width in widths if width < least and width not in allowed]
        if name not in SCATTERED
        else []
    )


SCALE_SHIFT_BYTES = {shift: shift // 8 + (shift == 23) for shift in SCALE_SHIFT.values()}


def _amd_bytes(kind: str) -> int:
    wide = re.match(r"(?:dword|b32|b)x?(\d+)?", kind)
    if kind.startswith("dword"):
        return 4 * int(kind.removeprefix("dwordx")) if "x" in kind else 4
    if wide and kind.startswith("b"):
        return int(kind[1:].partition("_")[0]) // 8
    return 2 if "short" in kind or "16" in kind else 1


def _of_ptx(launch: Launch, code: str) -> dict[str, list[int]]:
    """Argument → bytes of each access, from what addresses are computed."""
    of: dict[str, set[str]] = defaultdict(set)
    lines = code.splitlines()
    for _ in range(2):  # loops write registers behind where they read them
        for line in lines:
            taken = re.search(r"ld\.param\.\w+\s+(%rd\d+), \[\w+_param_(\d+)", line)
            if taken:
                index = int(taken.group(2))
                if index < len(launch.given):
                    of[taken.group(1)].add(launch.given[index])
                continue
            if "ld.global" in line or "st.global" in line:
                continue
            target, *sources = re.findall(r"%rd\d+", line) or [""]
            for source in sources:
                of[target] |= of[source]
    found: dict[str, list[int]] = defaultdict(list)
    for line in lines:
        access = re.search(r"\b(?:ld|st)\.global(?:\.[a-z]\w*?)*?(?:\.v(\d))?\.[a-z](\d+)\b", line)
        address = re.search(r"\[\s*(%rd\d+)", line)
        if access and address and "atom" not in line:
            for argument in of[address.group(1)]:
                found[argument].append(int(access.group(1) or 1) * int(access.group(2)) // 8)
    return found
