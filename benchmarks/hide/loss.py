"""Loss of each way to communicate inside a region, over ZeRO-1's: simulated ranks in one process, in plain torch.

Every rank computes its part of a batch; delay, corrections and codes are those of `geotrain.inner`, the codes by the
product's kernels. `ahead` is what the handed-out weights are: `gradient`, one step further by the same gradient;
`update`, further by the last update again (U' = U_t + λ(U_t − U_{t−1}), summed up); `none`.

    python -m benchmarks.hide.loss [--quick]
    python -m benchmarks.hide.loss --seeds 3 --steps 3000 --hidden 96 --layers 4      0.4 M parameters

Finished trainings are kept in the results file (JSON lines) and not done again; one that was ended goes on from
`--state`, which has it as it was a minute of its own time before at most.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.common import command_line, hardware, report, units_by_ending

RESULTS = ROOT / "benchmarks/data/hide_loss.jsonl"
BYTES, SEQUENCE, RANKS, HEADS = 256, 64, 4, 4
HELD_OUT = 160  # samples that loss is taken from
SYNCHRONOUS = 6  # a delayed run's start: one part of so many of its steps
KEPT_EVERY_S = 60.0  # processor time after which a training's state is kept
KEY = "optimizer", "seed", "way", "hidden", "layers", "samples", "steps", "rate"  # of a row
STATE = "masters", "m", "v", "held", "lost", "under_way"


@dataclass(frozen=True)
class Way:
    delayed: bool = False
    ahead: str = "none"
    gradients: str | None = None
    weights: str | None = None


WAYS = {
    "zero1": Way(),
    "zero1, 8 and 4 bits": Way(gradients="int8", weights="int4"),
    "delayed": Way(True, "gradient"),
    "delayed, 8 and 4 bits": Way(True, "gradient", "int8", "int4"),
    "zero1, 4 bits": Way(gradients="int4", weights="int4"),
    "delayed, 4 bits": Way(True, "gradient", "int4", "int4"),
    "delayed, update": Way(True, "update"),
    "delayed, uncorrected": Way(True),
}


class Model:
    """A small Llama over bytes. Its parameters lie in one vector, matrices of one shape side by side and first."""

    def __init__(self, hidden: int, layers: int) -> None:
        self.hidden, self.layers, ffn = hidden, layers, 2 * hidden
        square, wide = (4 * layers, hidden, hidden), (2 * layers, ffn, hidden)
        self.shapes = {"qkvo": square, "up": wide, "down": (layers, hidden, ffn)}
        self.matrices = sum(map(math.prod, self.shapes.values()))  # the elements that are Muon's
        self.shapes |= {"embedding": (BYTES, hidden), "norms": (2 * layers + 1, hidden)}
        self.numel = sum(map(math.prod, self.shapes.values()))

    def parts(self, flat: Any) -> dict[str, Any]:
        """Views of [..., numel] by name, [..., *shape] each."""
        split = flat.split([math.prod(shape) for shape in self.shapes.values()], -1)
        return {n: t.view(*flat.shape[:-1], *s) for (n, s), t in zip(self.shapes.items(), split, strict=True)}

    def drawn(self, seed: int) -> Any:
        import torch

        flat = 0.02 * torch.randn(self.numel, generator=torch.Generator().manual_seed(seed))
        self.parts(flat)["norms"].fill_(1.0)
        return flat

    def loss(self, flat: Any, tokens: Any) -> Any:
        """Mean loss of each copy. flat: [copies, numel]. tokens: [copies, samples, SEQUENCE + 1]."""
        import torch
        from torch.nn import functional

        parts, (copies, samples, _), size = self.parts(flat), tokens.shape, self.hidden // HEADS
        inputs, labels = tokens[..., :-1].reshape(copies, -1), tokens[..., 1:].reshape(copies, -1)
        angles = torch.outer(torch.arange(SEQUENCE), 1e4 ** -(torch.arange(0, size, 2) / size)).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()

        def normed(x: Any, i: int) -> Any:
            return functional.rms_norm(x, (self.hidden,), eps=1e-6) * parts["norms"][:, i, None]

        def rotated(x: Any) -> Any:
            low, high = x.chunk(2, -1)
            return x * cos + torch.cat((-high, low), -1) * sin

        def heads(x: Any) -> Any:
            return x.view(copies * samples, SEQUENCE, HEADS, size).transpose(1, 2)

        x = parts["embedding"][torch.arange(copies)[:, None], inputs]
        for i in range(self.layers):
            q, k, v, o = (parts["qkvo"][:, 4 * i + j].mT for j in range(4))
            y = normed(x, 2 * i)
            seen = functional.scaled_dot_product_attention(
                rotated(heads(y @ q)), rotated(heads(y @ k)), heads(y @ v), is_causal=True
            )
            x = x + seen.transpose(1, 2).reshape(x.shape) @ o
            y = normed(x, 2 * i + 1)
            gate, up = (parts["up"][:, 2 * i + j].mT for j in range(2))
            x = x + (functional.silu(y @ gate) * (y @ up)) @ parts["down"][:, i].mT
        logits = normed(x, 2 * self.layers) @ parts["embedding"].mT
        each = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return each.view(copies, -1).mean(1)


class Training:
    """A training of one way. The state is masters, momentum, second moment, what ranks hold, and residuals."""

    def __init__(self, way: Way, muon: bool, args: argparse.Namespace, seed: int) -> None:
        import torch

        self.way, self.args, self.steps = way, args, 0
        self.model = Model(args.hidden, args.layers)
        self.masters = self.model.drawn(seed)
        self.held = self.masters.clone()
        self.m, self.v = torch.zeros_like(self.masters), torch.zeros_like(self.masters)
        self.lost = torch.zeros(RANKS if way.gradients else 0, self.model.numel)  # a residual a rank
        self.under_way: Any = None
        self._matrices = self.model.matrices if muon else 0
        self._decay = torch.full_like(self.masters, 0.1)
        self.model.parts(self._decay)["norms"].zero_()

    def step(self, tokens: Any) -> None:
        """Make a step. tokens: [samples of all ranks, SEQUENCE + 1]."""
        number, self.steps = self.steps, self.steps + 1
        mean = self._mean_gradient(tokens)
        mean *= min(1.0, 1.0 / (float(mean.norm()) + 1e-6))
        warm = max(1, self.args.steps // 10)
        done = max(0.0, (number - warm) / max(1, self.args.steps - warm))
        rate = self.args.rate * (min(1.0, (number + 1) / warm) * (0.55 + 0.45 * math.cos(math.pi * done)))
        before = self.masters
        self.masters, self.m, self.v = self.stepped(mean, rate)
        target: Any = self.masters
        if self.way.delayed and number >= self.args.steps // SYNCHRONOUS:
            target, self.under_way = self.under_way, self.ahead(mean, rate, before)
        if target is None:
            return
        change = target - self.held
        self.held += change if self.way.weights is None else decoded(change, self.way.weights)

    def ahead(self, mean: Any, rate: float, before: Any) -> Any:
        """What a delayed step hands out."""
        if self.way.ahead == "gradient":
            return self.stepped(mean, rate)[0]
        return 2 * self.masters - before if self.way.ahead == "update" else self.masters

    def _mean_gradient(self, tokens: Any) -> Any:
        copies = len(self.lost) or 1
        flat = self.held.repeat(copies, 1).requires_grad_()
        self.model.loss(flat, tokens.unflatten(0, (copies, -1))).sum().backward()
        if self.way.gradients is None:
            return flat.grad[0]
        sent = [decoded(g, self.way.gradients, lost) for g, lost in zip(flat.grad, self.lost, strict=True)]
        return sum(sent) / RANKS

    def stepped(self, g: Any, rate: float) -> tuple[Any, Any, Any]:
        """Masters, momentum and second moment after one more step."""
        import torch

        from geotrain import kernels

        k = self._matrices
        m = torch.cat((self.m[:k].lerp(g[:k], 0.05), self.m[k:].lerp(g[k:], 0.1)))
        v = self.v.lerp(g.square(), 0.05)
        root = (v / (1 - 0.95**self.steps)).sqrt_().add_(1e-8)
        update = m / (1 - 0.9**self.steps) / root
        if k:
            nesterov = self.model.parts(g.lerp(m, 0.95))
            for name, part in self.model.parts(update).items():
                if name not in ("embedding", "norms"):
                    part.copy_(kernels.orthogonalize(nesterov[name]) * 0.2 * math.sqrt(max(part.shape[1:])))
        return self.masters * (1 - rate * self._decay) - rate * update, m, v

    def evaluate(self, tokens: Any) -> float:
        """Mean loss at the masters."""
        import torch

        with torch.no_grad():
            return statistics.mean(
                float(self.model.loss(self.masters[None], part[None])) for part in tokens.split(32)
            )

    def keep(self, path: Path) -> None:
        import torch

        kept = {"steps": self.steps, **{name: getattr(self, name) for name in STATE}}
        torch.save(kept, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def go_on_from(self, path: Path) -> None:
        import torch

        for name, value in torch.load(path).items():
            setattr(self, name, value)


def decoded(values: Any, name: str, lost: Any = None) -> Any:
    """What arrives of values that are sent in codes. lost: what codes lost before, which is sent, too."""
    import torch

    from geotrain import kernels
    from geotrain.kernels.payload_format import PayloadFormat
    from geotrain.parallelism.whole_matrices import ALIGNED

    fmt, found = PayloadFormat(name, block=ALIGNED), torch.empty_like(values)
    residual = torch.zeros_like(values) if lost is None else lost
    payload, _ = kernels.quantize(values.contiguous(), fmt, residual=residual)
    kernels.dequantize(payload, found, fmt)
    return found


def trained(args: argparse.Namespace, row: dict[str, Any]) -> float:
    """Held-out loss after the training of a row, from what is kept of it, if anything is."""
    import torch

    from geotrain.data.corpus import documents

    text = torch.frombuffer(bytearray("\n".join(documents(4_000_000)).encode()), dtype=torch.uint8)
    border = int(0.98 * len(text))

    def drawn(low: int, high: int, count: int, key: str) -> Any:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{key} {row['seed']}".encode()))
        starts = torch.randint(low, high - SEQUENCE - 1, (count,), generator=generator)
        return torch.stack([text[i : i + SEQUENCE + 1] for i in starts.tolist()]).long()

    training = Training(WAYS[row["way"]], row["optimizer"] == "muon", args, row["seed"])
    state = Path(args.state) / f"{zlib.crc32(json.dumps(row).encode())}.pt"
    state.parent.mkdir(parents=True, exist_ok=True)
    if state.exists():
        training.go_on_from(state)
    kept_s = time.process_time()
    while training.steps < args.steps:
        training.step(drawn(0, border, RANKS * args.samples, str(training.steps)))
        if time.process_time() - kept_s > KEPT_EVERY_S:
            training.keep(state)
            kept_s = time.process_time()
    loss = training.evaluate(drawn(border, len(text), HELD_OUT, "held out"))
    state.unlink(missing_ok=True)
    return loss


def kept_rows(path: Path | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path is not None and path.exists() else []


def over_zero1(path: Path) -> dict[str, dict[str, float]]:
    """By optimizer and way, the mean over seeds of the loss over ZeRO-1's, of the longest trainings that are kept; of
    these, each optimizer's at the rate with which its ZeRO-1 ends lowest."""
    rows = kept_rows(path)
    setting = [key for key in KEY if key not in ("optimizer", "seed", "way", "rate")]
    longest = max(([row[key] for key in setting] for row in rows), key=lambda s: (s[-1], s), default=None)
    zero: dict[str, dict[float, dict[int, float]]] = {}  # optimizer → rate → seed → loss
    rows = [row for row in rows if [row[key] for key in setting] == longest]
    for row in (row for row in rows if row["way"] == "zero1"):
        zero.setdefault(row["optimizer"], {}).setdefault(row["rate"], {})[row["seed"]] = row["loss"]
    best = {
        optimizer: min(rates, key=lambda rate: rates[rate][min(rates[rate])]) for optimizer, rates in zero.items()
    }
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if best.get(row["optimizer"]) == row["rate"] and (
            base := zero[row["optimizer"]][row["rate"]].get(row["seed"])
        ):
            found.setdefault(row["optimizer"], {}).setdefault(row["way"], []).append(row["loss"] / base)
    return {optimizer: {w: statistics.mean(x) for w, x in ways.items()} for optimizer, ways in found.items()}


def main() -> None:
    quick = {"steps": 20, "seeds": 1, "hidden": 32, "layers": 1, "results": None}
    parser = command_line(__doc__, quick=quick)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=2, help="of each rank, in a step")
    parser.add_argument("--rate", type=float, default=8e-3)
    parser.add_argument("--optimizers", nargs="+", default=["muon", "adamw"], choices=("muon", "adamw"))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--results", default=str(RESULTS), help="JSON lines")
    parser.add_argument("--state", default=str(ROOT / "runs/hide_loss"), help="folder of what is not finished")
    args = parser.parse_args()
    path = None if args.results is None else Path(args.results)
    known = {tuple(row[key] for key in KEY): row["loss"] for row in kept_rows(path)}
    result: dict[str, Any] = {}
    for optimizer in args.optimizers:
        found: dict[str, list[float]] = {way: [] for way in args.ways}
        for seed in range(args.seeds):
            for way in args.ways:
                row = {key: {**vars(args), "optimizer": optimizer, "seed": seed, "way": way}[key] for key in KEY}
                if (loss := known.get(tuple(row.values()))) is None:
                    loss = trained(args, row)
                    line = json.dumps({**row, "loss": round(loss, 5)})
                    print(line, flush=True)
                    if path is not None:
                        with path.open("a") as file:
                            file.write(line + "\n")
                found[way].append(loss)
        if "zero1" in found:
            result[optimizer] = {
                way: [round(a / b, 4) for a, b in zip(losses, found["zero1"], strict=True)]
                for way, losses in found.items()
            }
    result["setting"] = {**vars(args), "hardware": hardware()}
    report("hide_loss", result, args, units_by_ending({}), left_out=("setting",))


if __name__ == "__main__":
    main()
