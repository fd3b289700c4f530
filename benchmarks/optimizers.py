"""Measure what Muon's step costs more than AdamW's. The last line printed is one JSON object keyed by the model's
name.

Both steps are timed in turn on this machine, for the parameters of a model file: AdamW in one pass over all of them;
Muon as momentum, `kernels.orthogonalize` and the change of the weights for the matrices of the layers, and AdamW for
the rest. A figure with `_low` and `_high` is the median over the rounds, they the 95 % interval of that median.

muon_over_adamw     the time of Muon's step over that of AdamW's
extra_ms            the difference, of an optimizer step
orthogonalize_share the part of Muon's step that is `orthogonalize`
vs_bmm              speed of `orthogonalize` over torch.bmm of the same products and nothing else: 1 is that matmul
                    rate
tflop_s             products counted in whole over the time of `orthogonalize`
flops               of Newton–Schulz in a step of the whole model: 4·m²·n + 2·m³ an iteration of m × n, m ≤ n
share_of_training   flops over 6·N·tokens, those of a training step of N parameters
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.common import alternate, command_line, report, spread, units_by_ending
from geotrain import kernels
from geotrain.config import architecture_from_hf, read_json
from geotrain.kernels import QUINTIC, AdamStep
from geotrain.parameters.parameter_map import Parameter, canonical_parameters

MODELS = ROOT / "configs" / "models"
ON_HOST = ("llama-tiny", "llama-70m:1")  # what takes less than a minute or two
ON_GPU = ("llama-tiny", "llama-125m", "llama-1b")
STEP = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, step=10)
MOMENTUM, LR = 0.95, 0.02
Shapes = Counter[tuple[int, int]]


class Adam:
    """AdamW as an engine runs it: fp32 state in one vector, gradients and new weights in bf16."""

    def __init__(self, numel: int, device: str) -> None:
        self.state = [torch.rand(numel, device=device) for _ in range(3)]
        self.grad, self.out = (torch.rand(numel, device=device).bfloat16() for _ in range(2))

    def step(self) -> None:
        kernels.adam_step(*self.state, self.grad, STEP, out=self.out)  # type: ignore[call-arg]


class Group:
    """The matrices of one shape, as a batch."""

    def __init__(self, shape: tuple[int, int], count: int, device: str) -> None:
        size = (count, *shape)
        self.weights, self.momentum = (torch.randn(size, device=device) for _ in range(2))
        self.grad = torch.randn(size, device=device).bfloat16()
        self.out = torch.empty_like(self.grad)

    def step(self) -> None:
        grad = self.grad.float()
        self.momentum.lerp_(grad, 1 - MOMENTUM)
        direction = kernels.orthogonalize(grad.lerp_(self.momentum, MOMENTUM))  # Nesterov's
        self.weights.mul_(1 - LR * STEP.weight_decay).add_(direction, alpha=-LR)
        self.out.copy_(self.weights)

    def products(self) -> Callable[[], None]:
        """Multiply what `orthogonalize` multiplies, by plain bmm in the type that it multiplies in."""
        x = self.momentum if self.momentum.device.type == "cpu" else self.grad
        x = x.mT if x.shape[1] > x.shape[2] else x
        gram = torch.bmm(x, x.mT)
        square, out = torch.empty_like(gram), torch.empty_like(x)

        def run() -> None:
            for _ in QUINTIC:
                torch.bmm(x, x.mT, out=gram)
                torch.bmm(gram, gram, out=square)
                torch.bmm(gram, x, out=out)

        return run


def flops(shapes: Shapes) -> float:
    """FLOPs of `orthogonalize` with the default coefficients on `count` matrices of each shape."""
    total = 0
    for (rows, columns), count in shapes.items():
        m, n = min(rows, columns), max(rows, columns)
        total += count * (4 * m * m * n + 2 * m**3)
    return float(total * len(QUINTIC))


def split(parameters: Iterable[Parameter]) -> tuple[Shapes, int]:
    """The matrices inside layers, which Muon takes, by shape; and how many elements are left for AdamW."""
    shapes: Shapes = Counter()
    rest = 0
    for p in parameters:
        if p.layer is not None and len(p.shape) == 2:
            shapes[p.shape[0], p.shape[1]] += 1
        else:
            rest += p.numel
    return shapes, rest


def measure(parameters: Sequence[Parameter], rounds: int, device: str) -> dict[str, Any]:
    shapes, rest = split(parameters)
    numel = sum(p.numel for p in parameters)
    adam, others = Adam(numel, device), Adam(rest, device)
    groups = [Group(shape, count, device) for shape, count in sorted(shapes.items())]
    plain = [group.products() for group in groups]
    times = alternate(
        {
            "adamw": adam.step,
            "muon": lambda: _all([others.step, *(group.step for group in groups)]),
            "orthogonalize": lambda: [kernels.orthogonalize(group.momentum) for group in groups],
            "bmm": lambda: _all(plain),
        },
        rounds,
        device,
    )

    def over(a: str, b: str) -> list[float]:
        return [x / y for x, y in zip(times[a], times[b], strict=True)]

    return {
        "timed_parameters": numel,
        "timed_muon_parameters": numel - rest,
        **spread("muon_over_adamw", over("muon", "adamw")),
        **spread("extra_ms", [(m - a) * 1e3 for m, a in zip(times["muon"], times["adamw"], strict=True)]),
        **spread("orthogonalize_share", over("orthogonalize", "muon")),
        **spread("vs_bmm", over("bmm", "orthogonalize")),
        "tflop_s": flops(shapes) / median(times["orthogonalize"]) / 1e12,
    }


def counted(parameters: Sequence[Parameter], tokens: int) -> dict[str, float]:
    """FLOPs of a model's Newton–Schulz, and what they are beside a training step of so many tokens."""
    shapes, _ = split(parameters)
    work = flops(shapes)
    return {
        "flops": work,
        "share_of_training": work / (6 * sum(p.numel for p in parameters) * tokens),
    }


def _all(calls: Iterable[Callable[[], object]]) -> None:
    for call in calls:
        call()


def load(name: str) -> list[Parameter]:
    return canonical_parameters(architecture_from_hf(read_json(MODELS / f"{name}.json")))


def main() -> None:
    parser = command_line(__doc__, quick={"rounds": 2})
    parser.add_argument(
        "models",
        nargs="*",
        help="names in configs/models; NAME:LAYERS times only so many of its layers, and its embedding",
    )
    parser.add_argument("--tokens", type=int, default=1 << 19, help="of a training step, for share_of_training")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    on_host = options.device == "cpu"
    results: dict[str, Any] = {}
    for model in options.models or (ON_HOST if on_host else ON_GPU):
        name, _, layers = model.partition(":")
        whole = load(name)
        timed = [p for p in whole if not layers or p.layer is None or p.layer < int(layers)]
        result = measure(timed, options.rounds, options.device) | counted(whole, options.tokens)
        results[model] = result
        shown = ("muon_over_adamw", "extra_ms", "vs_bmm", "tflop_s", "share_of_training")
        print(f"{model:12}", *(f"{key} {result[key]:.3g}" for key in shown), flush=True)
    endings = {"_ms": "ms", "_ms_low": "ms", "_ms_high": "ms", "parameters": "parameters"}
    endings |= {"flops": "FLOP", "tflop_s": "TFLOP/s"}
    note = f"{options.tokens} tokens a step"
    report("optimizers", results, options, units_by_ending(endings, "ratio"), note)


if __name__ == "__main__":
    main()
