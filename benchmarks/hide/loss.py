"""Loss of each way to communicate inside a region, over ZeRO-1's: simulated ranks in one process, in plain torch.

Every rank computes its part of a batch; delay, corrections and codes are those of `geotrain.inner`, the codes by the
product's kernels. `ahead` is what the handed-out weights are: `gradient`, one step further by the same gradient;
`update`, further by the last update again (U' = U_t + λ(U_t − U_{t−1}), summed up); `none`.

    python -m benchmarks.hide.loss [--quick]
    python -m benchmarks.hide.loss --seeds 3 --steps 3000 --hidden 96 --layers 4      0.4 M parameters
"""

from __future__ import annotations

import argparse
import math
import statistics
import zlib
from dataclasses import dataclass
from typing import Any

from benchmarks.common import command_line, hardware, report, units_by_ending
from benchmarks.small_runs import llama

BYTES, SEQUENCE, RANKS, SAMPLES = 256, 64, 4, 2
HELD_OUT = 160  # samples that loss is taken from
SYNCHRONOUS = 6  # a delayed run's start: one part of so many of its steps


@dataclass(frozen=True)
class Way:
    delayed: bool = False
    ahead: str = "none"
    gradients: str | None = None
    weights: str | None = None


WAYS = {
    "zero1": Way(),
    "zero1, 8 and 4 bits": Way(gradients="int8", weights="int4"),
    "zero1, 4 bits": Way(gradients="int4", weights="int4"),
    "delayed, gradient": Way(True, "gradient"),
    "delayed, update": Way(True, "update"),
    "delayed, gradient, 8 and 4 bits": Way(True, "gradient", "int8", "int4"),
    "delayed, update, 8 and 4 bits": Way(True, "update", "int8", "int4"),
    "delayed, gradient, 4 bits": Way(True, "gradient", "int4", "int4"),
    "delayed, update, 4 bits": Way(True, "update", "int4", "int4"),
    "delayed, uncorrected": Way(True),
}


class Training:
    """A training of one way. The state is masters, momentum (and second moment), what ranks hold, and residuals."""

    def __init__(self, way: Way, muon: bool, args: argparse.Namespace, seed: int) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(seed)
        shape = llama(args.hidden, args.layers, 4, 2 * args.hidden, BYTES, SEQUENCE)
        self.model = LlamaForCausalLM(LlamaConfig(**shape))
        self.way, self.muon, self.args, self.steps = way, muon, args, 0
        self.named = dict(self.model.named_parameters())
        self.masters = {n: p.detach().clone() for n, p in self.named.items()}
        self.m = {n: torch.zeros_like(p) for n, p in self.masters.items()}
        self.v = {n: torch.zeros_like(p) for n, p in self.masters.items()}
        self.lost: list[dict[str, Any]] = [{n: torch.zeros_like(p) for n, p in self.m.items()} for _ in range(RANKS)]
        self.under_way: dict[str, Any] | None = None

    def step(self, batches: list[Any], number: int) -> None:
        import torch

        sums = [self._gradient(tokens) for tokens in batches]
        if self.way.gradients:
            sums = [self._through(s, self.way.gradients, lost) for s, lost in zip(sums, self.lost, strict=True)]
        mean = {n: sum(s[n] for s in sums) / RANKS for n in self.m}
        norm = math.sqrt(sum(float(g.square().sum()) for g in mean.values()))
        mean = {n: g * min(1.0, 1.0 / (norm + 1e-6)) for n, g in mean.items()}
        warm = max(1, self.args.steps // 10)
        done = max(0.0, (number - warm) / max(1, self.args.steps - warm))
        rate = self.args.rate * (min(1.0, (number + 1) / warm) * (0.55 + 0.45 * math.cos(math.pi * done)))
        synchronous = number < self.args.steps // SYNCHRONOUS
        before = self.masters
        self.steps += 1
        self.masters, self.m, self.v = self._stepped(mean, rate, self.masters, self.m, self.v)
        target = self.masters
        if self.way.delayed and not synchronous and self.way.ahead == "gradient":
            target = self._stepped(mean, rate, self.masters, self.m, self.v)[0]
        elif self.way.delayed and not synchronous and self.way.ahead == "update":
            target = {n: 2 * w - before[n] for n, w in self.masters.items()}
        with torch.no_grad():
            if self.way.delayed and not synchronous:
                target, self.under_way = self.under_way, target
            if target is None:
                return
            held = {n: p.detach() for n, p in self.named.items()}
            change = {n: target[n] - held[n] for n in held}
            if self.way.weights:
                change = self._through(change, self.way.weights, None)
            for n, p in self.named.items():
                p.add_(change[n])

    def _gradient(self, tokens: Any) -> dict[str, Any]:
        self.model.zero_grad()
        self._loss(tokens).backward()
        return {n: p.grad.clone() for n, p in self.named.items()}

    def _loss(self, tokens: Any) -> Any:
        import torch

        logits = self.model(tokens[:, :-1]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def _stepped(self, g: dict[str, Any], rate: float, x: Any, m: Any, v: Any) -> tuple[Any, Any, Any]:
        from geotrain import kernels

        new_x, new_m, new_v = {}, {}, {}
        for n, w in x.items():
            if self.muon and n.endswith("_proj.weight"):
                new_m[n], new_v[n] = m[n].lerp(g[n], 0.05), v[n]
                direction = kernels.orthogonalize(g[n].lerp(new_m[n], 0.95)[None])[0]
                new_x[n] = w * (1 - 0.1 * rate) - rate * 0.2 * math.sqrt(max(w.shape)) * direction
                continue
            new_m[n], new_v[n] = m[n].lerp(g[n], 0.1), v[n].lerp(g[n].square(), 0.05)
            root = (new_v[n] / (1 - 0.95**self.steps)).sqrt()
            decay = 0.1 * rate * (w.dim() > 1)
            new_x[n] = w * (1 - decay) - rate / (1 - 0.9**self.steps) * new_m[n] / (root + 1e-8)
        return new_x, new_m, new_v

    def _through(self, values: dict[str, Any], name: str, lost: dict[str, Any] | None) -> dict[str, Any]:
        import torch

        from geotrain import kernels
        from geotrain.kernels.payload_format import PayloadFormat

        fmt, found = PayloadFormat(name), {}
        for n, value in values.items():
            residual = torch.zeros_like(value) if lost is None else lost[n]
            payload, _ = kernels.quantize(value.contiguous(), fmt, residual=residual)
            found[n] = torch.empty_like(value)
            kernels.dequantize(payload, found[n], fmt)
        return found

    def evaluate(self, tokens: Any) -> float:
        """Mean loss at the masters."""
        import torch

        with torch.no_grad():
            for n, p in self.named.items():
                p.copy_(self.masters[n])
            return statistics.mean(float(self._loss(part)) for part in tokens.split(32))


def losses(args: argparse.Namespace, optimizer: str, seed: int) -> dict[str, float]:
    """Held-out loss of each way, after the same batches."""
    import torch

    from geotrain.data.corpus import documents

    text = torch.frombuffer(bytearray("\n".join(documents(4_000_000)).encode()), dtype=torch.uint8)
    border = int(0.98 * len(text))

    def drawn(low: int, high: int, count: int, key: str) -> Any:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{key} {seed}".encode()))
        starts = torch.randint(low, high - SEQUENCE - 1, (count,), generator=generator)
        return torch.stack([text[i : i + SEQUENCE + 1] for i in starts.tolist()]).long()

    found = {}
    for name in args.ways or WAYS:
        training = Training(WAYS[name], optimizer == "muon", args, seed)
        for number in range(args.steps):
            training.step(list(drawn(0, border, RANKS * SAMPLES, str(number)).chunk(RANKS)), number)
        found[name] = training.evaluate(drawn(border, len(text), HELD_OUT, "held out"))
        print(f"{optimizer}, seed {seed}: {name}: {found[name]:.4f}", flush=True)
    return found


def main() -> None:
    parser = command_line(__doc__, quick={"steps": 20, "seeds": 1, "hidden": 32, "layers": 1})
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rate", type=float, default=8e-3)
    parser.add_argument("--optimizers", nargs="+", default=["muon", "adamw"], choices=("muon", "adamw"))
    parser.add_argument("--ways", nargs="+", choices=WAYS)
    args = parser.parse_args()
    result: dict[str, Any] = {}
    for optimizer in args.optimizers:
        seen = [losses(args, optimizer, seed) for seed in range(args.seeds)]
        result[optimizer] = {
            name: [one[name] / one["zero1"] for one in seen] for name in seen[0] if "zero1" in seen[0]
        }
    result["setting"] = {**vars(args), "hardware": hardware()}
    report("hide_loss", result, args, units_by_ending({}), left_out=("setting",))


if __name__ == "__main__":
    main()
