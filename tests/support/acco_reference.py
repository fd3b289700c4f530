"""ACCO in one process and plain torch: both forms, unequal counts, clipping, codes. Written from the algorithm alone.

Source: arXiv 2406.02613, and the delayed form that `docs/` describes. All weights live under canonical names; ranks
exist only as an index of the gradients, and as the owner of each element where codes travel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from geotrain.kernels import reference as codec
from geotrain.kernels.payload_format import PayloadFormat

Weights = dict[str, Tensor]
Gradient = Callable[[Weights, Tensor], tuple[float, Weights]]  # (weights, samples) → (mean loss, its gradient)


@dataclass(frozen=True)
class Settings:
    form: str  # exact | delayed
    clip: float  # 0: off
    betas: tuple[float, float]
    eps: float
    decay: Callable[[str], float]  # weight decay of a parameter
    synchronous_steps: int = 0
    is_matrix: Callable[[str], bool] = lambda name: False  # what Muon steps
    bits: tuple[int, int] | None = None  # of a gradient's code, and of a weight's change


@dataclass(frozen=True)
class Flat:
    """How the ranks of one model replica's slot lay the model out flat: for codes.

    order: indices into the concatenation of all canonical parameters, −1 for padding; its length is a multiple of
    `owners`, the data-parallel ranks, which own equal consecutive parts.
    """

    order: Tensor
    owners: int


def muon_step(w: Tensor, m: Tensor, g: Tensor, lr: float, decay: float, rows: bool = True) -> None:
    """One step of a matrix, in place on weights and momentum, as Jordan (https://kellerjordan.github.io/posts/muon)
    and Moonlight (arXiv 2502.16982) state it, with the usual settings. rows: whether each row of the update gets the
    root mean square of the rows' norms."""
    m.mul_(0.95).add_(0.05 * g)
    x = 0.05 * g + 0.95 * m
    x = x / x.norm()
    if len(x) > x.shape[1]:
        x = x.T
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    if x.shape != w.shape:
        x = x.T
    if rows:
        norms = x.norm(dim=1, keepdim=True)
        x = x / norms.clamp(min=1e-30) * norms.square().mean().sqrt()
    w.mul_(1 - lr * decay).sub_(lr * 0.2 * max(w.shape) ** 0.5 * x)


class Reference:
    """The state is x, m, v. `now` are the weights that the next window starts on; `landed` those that replace them
    once its first gradients are taken (None: there are none, `now` stays)."""

    def __init__(self, settings: Settings, weights: Weights, gradient: Gradient, flats: Sequence[Flat] = ()) -> None:
        self.settings, self.gradient, self.flats = settings, gradient, flats
        self.x = {name: w.clone() for name, w in weights.items()}
        self.m = {name: torch.zeros_like(w) for name, w in weights.items()}
        self.v = {name: torch.zeros_like(w) for name, w in weights.items()}
        self.steps = 0
        self.lost: list[Weights] = []  # of each replica's gradients, by their codes
        self.restart()

    def restart(self) -> None:
        """x was written from outside (or read from elsewhere): what was predicted is void."""
        self.now, self.landed = dict(self.x), None

    def step(
        self, first: Sequence[Sequence[Tensor]], second: Sequence[Sequence[Tensor]], lr: float
    ) -> tuple[float, float, int]:
        """One window. first, second: each replica's micro-batches before and after the last commit arrives; the
        second are empty for `delayed`, and in synchronous steps. Returns (loss, norm, micro-batches)."""
        losses, sums = zip(*(self._accumulate(replica, None) for replica in first), strict=True)
        counts = [len(replica) for replica in first]
        self._land()
        predicted = None
        if any(second):
            predicted = self._predict(sums, counts, lr)
            more, sums = zip(
                *(self._accumulate(replica, s) for replica, s in zip(second, sums, strict=True)), strict=True
            )
            losses = [*losses, *more]
            counts = [c + len(replica) for c, replica in zip(counts, second, strict=True)]
        if self.settings.bits:
            sums = self._coded_sums(sums)
        norm, scaled = self._clipped_mean(sums, sum(counts))
        self.x, self.m, self.v = self._stepped(scaled, lr, self.x, self.m, self.v, self.steps + 1)
        self.steps += 1
        synchronous = self.steps <= self.settings.synchronous_steps
        self.now = self.now if predicted is None else predicted
        self.landed = dict(self.x)
        if self.settings.form == "delayed" and not synchronous:
            self.landed = self._stepped(scaled, lr, self.x, self.m, self.v, self.steps + 1)[0]
        if self.settings.bits:  # what travels is a change of what ranks hold while they compute
            change = {name: self.landed[name] - self.now[name] for name in self.now}
            change = self._through_codes(change, self.settings.bits[1])
            self.landed = {name: self.now[name] + change[name] for name in change}
        if synchronous:
            self._land()
        return sum(losses) / sum(counts), norm, sum(counts)

    def _accumulate(self, micro_batches: Sequence[Tensor], onto: Weights | None) -> tuple[float, Weights]:
        """Sums over equally large micro-batches, of their mean losses and the gradients of these."""
        total = {name: torch.zeros_like(w) for name, w in self.x.items()} if onto is None else dict(onto)
        if not micro_batches:
            return 0.0, total
        loss, gradient = self.gradient(self.now, torch.cat(list(micro_batches)))
        n = len(micro_batches)
        return n * loss, {name: total[name] + n * gradient[name] for name in total}

    def _clipped_mean(self, sums: Sequence[Weights], count: int) -> tuple[float, Weights]:
        mean = {name: sum(s[name] for s in sums) / count for name in self.x}
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in mean.values()))
        scale = min(1.0, self.settings.clip / (norm + 1e-6)) if self.settings.clip else 1.0
        return norm, {name: g * scale for name, g in mean.items()}

    def _stepped(
        self, gradient: Weights, lr: float, x: Weights, m: Weights, v: Weights, step: int
    ) -> tuple[Weights, Weights, Weights]:
        (b1, b2), eps, decay = self.settings.betas, self.settings.eps, self.settings.decay
        before, momentum = x, m
        m = {n: b1 * m[n] + (1 - b1) * g for n, g in gradient.items()}
        v = {n: b2 * v[n] + (1 - b2) * g * g for n, g in gradient.items()}
        x = {
            n: w - lr * decay(n) * w - lr / (1 - b1**step) * m[n] / ((v[n] / (1 - b2**step)).sqrt() + eps)
            for n, w in x.items()
        }
        for n in filter(self.settings.is_matrix, x):
            x[n], m[n] = before[n].clone(), momentum[n].clone()
            muon_step(x[n], m[n], gradient[n], lr, decay(n))
        return x, m, v

    # ------------------------------------------------------------------------------------- predictions, codes

    def _predict(self, sums: Sequence[Weights], counts: Sequence[int], lr: float) -> Weights:
        gradient = {name: sum(s[name] for s in sums) / sum(counts) for name in self.x}
        return self._stepped(gradient, lr, self.x, self.m, self.v, self.steps + 1)[0]

    def _land(self) -> None:
        if self.landed is not None:
            self.now, self.landed = self.landed, None

    def _coded_sums(self, sums: Sequence[Weights]) -> list[Weights]:
        assert self.settings.bits
        lost = self.lost or [{name: torch.zeros_like(w) for name, w in self.x.items()} for _ in sums]
        sums = [{n: g + e[n] for n, g in s.items()} for s, e in zip(sums, lost, strict=True)]
        coded = [self._through_codes(s, self.settings.bits[0]) for s in sums]
        self.lost = [{n: g - c[n] for n, g in s.items()} for s, c in zip(sums, coded, strict=True)]
        return coded

    def _through_codes(self, values: Weights, bits: int) -> Weights:
        def code(flat: Tensor, flats: Flat) -> Tensor:
            return torch.cat([self._coded(part.float(), bits) for part in flat.chunk(flats.owners)])

        return self._by_layout([values], lambda given, flats: code(given[0], flats))

    @staticmethod
    def _coded(part: Tensor, bits: int) -> Tensor:
        fmt = PayloadFormat(f"int{bits}", block=128)
        payload, decoded = torch.empty(fmt.encoded_bytes(part.numel()), dtype=torch.uint8), torch.empty_like(part)
        codec.quantize(part, payload, fmt, None, None, 0)
        codec.dequantize(payload, decoded, fmt, None)
        return decoded

    def _by_layout(self, given: Sequence[Weights], make: Callable[[list[Tensor], Flat], Tensor]) -> Weights:
        whole = [torch.cat([w[name].reshape(-1) for name in self.x]) for w in given]
        result = torch.zeros_like(whole[0])
        for flats in self.flats:
            real = flats.order >= 0
            local = [torch.where(real, w[flats.order.clamp(min=0)], 0.0) for w in whole]
            result[flats.order[real]] = make(local, flats)[real].to(result.dtype)
        parts = result.split([w.numel() for w in self.x.values()])
        return {name: part.view_as(w) for (name, w), part in zip(self.x.items(), parts, strict=True)}
