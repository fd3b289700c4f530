"""Speed of the update kernels. The last line printed is one JSON object keyed by the op's name.

vs_memcpy          speed on this CPU over a memory copy that touches the same bytes, alternating in one run
vs_torch           speed over the plain torch reference
vs_copy_bandwidth  on a GPU: over a copy on the device
triton             registers and spilled bytes a thread, compiled ahead of time for each target
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.common import alternate, command_line, ratio, report, triton_resources, units_by_ending
from geotrain.kernels import AdamStep, OuterStep, cpu, reference, triton_ops

OUTER = OuterStep(keep=0.9, gain=1 / 16, from_momentum=2.88, from_delta=0.2, moves_momentum=True)
AVERAGE = OuterStep(from_delta=0.25)
ADAM = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, step=10)
NEXT = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, step=11)

# name: (bytes touched for each element, call(ops, four fp32 tensors, gradients in bf16, weights in bf16))
ON_HOSTS = ("outer_update", "outer_update_bf16", "average", "merge")  # of servers, whose vectors are in host memory
OPS: dict[str, tuple[int, Callable]] = {
    "outer_update": (28, lambda ops, t, grad, low: ops.outer_update(t[0], t[1], t[2], t[3], OUTER, 0)),
    "outer_update_bf16": (16, lambda ops, t, grad, low: ops.outer_update(t[0], t[1], low, None, OUTER, 0)),
    "average": (12, lambda ops, t, grad, low: ops.outer_update(t[0], t[1], None, None, AVERAGE, 0)),
    "merge": (20, lambda ops, t, grad, low: ops.merge(t[0], t[1], t[2], True, 0.25)),
    "adam_step": (28, lambda ops, t, grad, low: ops.adam(t[0], t[1], t[2], grad, low, ADAM, None, True)),
    "adam_step_look_ahead": (28, lambda ops, t, grad, low: ops.adam(t[0], t[1], t[2], grad, low, ADAM, NEXT, True)),
    "adam_estimate": (16, lambda ops, t, grad, low: ops.adam(t[0], t[1], t[2], grad, low, ADAM, None, False)),
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
        times = alternate({**own, "torch": lambda: call(reference, *arguments)}, rounds)
        return ratio("vs_memcpy", times["copy"], times["own"]) | ratio("vs_torch", times["torch"], times["own"])
    times = alternate({"copy": copy, "own": lambda: call(triton_ops, *arguments)}, rounds, device)
    return ratio("vs_copy_bandwidth", times["copy"], times["own"])


def main() -> None:
    parser = command_line(__doc__, quick={"numel": 1 << 18, "rounds": 3, "targets": 1})
    parser.add_argument("--numel", type=int, default=1 << 23, help="elements of the timed tensors")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--targets", type=int, help="GPUs that the kernels are compiled for; default: all; 0: none")
    options = parser.parse_args()
    results: dict[str, dict] = {}
    for name in OPS:
        results[name] = speed(name, options.numel, options.rounds, "cpu")
        if torch.cuda.is_available() and name not in ON_HOSTS:
            results[name] |= speed(name, options.numel * 8, options.rounds, "cuda")
        if options.targets != 0 and name not in ON_HOSTS:
            small, call = tensors(1 << 14, "cpu"), OPS[name][1]
            results[name]["triton"] = triton_resources(partial(call, triton_ops, *small), options.targets)
        print(f"{name:21}", *(f"{k} {v:.3g}" for k, v in results[name].items() if k != "triton"), flush=True)
    report("kernels", results, options, units_by_ending({"registers": "registers", "spilled": "bytes"}, "ratio"))


if __name__ == "__main__":
    main()
