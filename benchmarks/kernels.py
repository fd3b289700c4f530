"""Speed of the update kernels. The last line printed is one JSON object keyed by the op's name.

vs_memcpy          speed on this CPU over a memory copy that touches the same bytes, alternating in one run
vs_torch           speed over the plain torch reference
vs_copy_bandwidth  on a GPU: over a copy on the device
triton             registers and spilled bytes a thread, compiled ahead of time for each target
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch
from common import alternate, ratio, record
from torch import Tensor

from geotrain.kernels import AdamStep, OuterStep, cpu, reference_update, triton_aot, triton_ops

OUTER = OuterStep.delayed_nesterov(0.2, 0.9, 16, moves_momentum=True)
ADAM = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, step=10)
NEXT = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, step=11)

# name: (bytes touched for each element, call(ops, four fp32 tensors, gradients in bf16, weights in bf16))
OPS: dict[str, tuple[int, Callable]] = {
    "outer_update": (28, lambda ops, t, grad, low: ops.outer_update(t[0], t[1], t[2], t[3], OUTER)),
    "merge": (20, lambda ops, t, grad, low: ops.merge(t[0], t[1], t[2], t[3], 0.25)),
    "adam_step": (28, lambda ops, t, grad, low: ops.adam_step(t[0], t[1], t[2], grad, ADAM, low, None)),
    "adam_step_look_ahead": (28, lambda ops, t, grad, low: ops.adam_step(t[0], t[1], t[2], grad, ADAM, low, NEXT)),
    "adam_estimate": (16, lambda ops, t, grad, low: ops.adam_estimate(t[0], t[1], t[2], grad, ADAM, low)),
}


def tensors(numel: int, device: str) -> tuple[list[Tensor], Tensor, Tensor]:
    wide = [torch.rand(numel, device=device) for _ in range(4)]
    return wide, *(torch.rand(numel, device=device).bfloat16() for _ in range(2))


def speed(name: str, numel: int, rounds: int, device: str) -> dict[str, float]:
    size, call = OPS[name]
    source, target = (torch.ones(numel * size // 2, dtype=torch.uint8, device=device) for _ in range(2))
    arguments = tensors(numel, device)
    copy = lambda: target.copy_(source)  # noqa: E731
    if device == "cpu":
        own = {"copy": copy, "own": lambda: call(cpu, *arguments)}
        times = alternate({**own, "torch": lambda: call(reference_update, *arguments)}, rounds)
        compared = {"vs_torch": ratio(times["torch"], times["own"])}
        return {"vs_memcpy": ratio(times["copy"], times["own"]), **compared}
    timed = {"copy": copy, "own": lambda: call(triton_ops, *arguments)}
    timed = {key: (lambda work=work: (work(), torch.cuda.synchronize())) for key, work in timed.items()}
    times = alternate(timed, rounds)
    return {"vs_copy_bandwidth": ratio(times["copy"], times["own"])}


def triton_resources(name: str) -> dict[str, dict[str, int]]:
    arguments = tensors(1 << 14, "cpu")
    (launch,) = triton_aot.launches(lambda: OPS[name][1](triton_ops, *arguments))
    found = {target: triton_aot.compile_launch(launch, target) for target in triton_aot.TARGETS}
    return {target: {"registers": r.registers, "spilled": r.spilled} for target, r in found.items()}


def unit(metric: str) -> str:
    return {"registers": "registers", "spilled": "bytes"}.get(metric.rsplit(".", 1)[-1], "ratio")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=1 << 23, help="elements of the timed tensors")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-triton", action="store_true", help="do not compile the Triton kernels")
    parser.add_argument("--record", action="store_true", help="append the figures to benchmarks/results.csv")
    parser.add_argument("--note", default="", help="goes into the recorded rows")
    options = parser.parse_args()
    results: dict[str, dict] = {}
    for name in OPS:
        results[name] = speed(name, options.numel, options.rounds, "cpu")
        if torch.cuda.is_available():
            results[name] |= speed(name, options.numel * 8, options.rounds, "cuda")
        if not options.no_triton:
            results[name]["triton"] = triton_resources(name)
        print(f"{name:21}", *(f"{k} {v:.3g}" for k, v in results[name].items() if k != "triton"), flush=True)
    if options.record:
        record("kernels", results, unit, options.note)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
