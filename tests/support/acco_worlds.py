"""Runs of ACCO for tests: what each rank computed and held after every step, and the reference's view of the same."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from geotrain.config import AccoConfig
from geotrain.inner.acco import communication_thread
from geotrain.inner.acco.flat_buffer import FlatBuffer
from geotrain.inner.zero import codes
from geotrain.parallelism.acco_forms import CODE_BLOCK, first_part
from geotrain.parallelism.local_parameters import local_parameters
from geotrain.parallelism.whole_matrices import pack
from geotrain.parameters.parameter_map import canonical_parameters
from tests.support.acco_reference import Flat, Gradient, Reference, Settings
from tests.support.families import loss_of, transformers_model
from tests.support.inner_worlds import (
    BATCH,
    architecture,
    assemble,
    batch,
    canonical_weights,
    micro_batches,
    pushed,
    start,
    stop,
)
from tests.support.layouts import MODELS, Layout

SYNCHRONOUS, STEPS = 2, 6
OUTWAITED_S = 60.0


@dataclass(frozen=True)
class Case(Layout):
    """A layout with a form of ACCO, in micro-batches of a sequence. Balanced, replicas do unequal parts of a step."""

    clip: float = 0.5
    chunks: bool = False  # what is coded, or sent over gloo, at once is a small part of a shard

    @property
    def form(self) -> str:
        return self.acco.partition(",")[0]

    @property
    def bits(self) -> tuple[int, int] | None:
        return (8, 4) if "coded" in self.precision and self.replicas > 1 else None

    @property
    def unequal(self) -> bool:
        return "balanced" in self.acco

    @property
    def settings(self) -> AccoConfig:
        return AccoConfig(form=self.form, synchronous_steps=SYNCHRONOUS, balance=self.unequal)  # type: ignore[arg-type]

    def part_sizes(self, step: int) -> tuple[int, int]:
        """The worker's micro-batches before and after the last commit arrives."""
        first = BATCH if step < SYNCHRONOUS else self.replicas * first_part(self.settings, BATCH // self.replicas)
        return first, BATCH - first

    def held_back(self, step: int, part: int) -> bool:
        """Whether the slow replica begins only when all that was free is taken."""
        return self.unequal and step % 4 == 1 and self.part_sizes(step)[part] > self.replicas * self.pipeline


@dataclass(frozen=True)
class Step:
    """A step of one rank. parts: its replica's micro-batches before and after the last commit arrived. now: the flat
    weights that the next step starts on. masters: what this rank pushes; None where the run was not held up to read
    them."""

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    parts: tuple[list[Tensor], list[Tensor]]
    masters: list[Any] | None
    now: Tensor


def run_cases(cases: list[Case], folder: Path) -> list[list[Step]]:
    """folder: where the ranks tell each other how far they are."""
    return [_run(case, folder / str(i)) for i, case in enumerate(cases)]


def _run(case: Case, folder: Path) -> list[Step]:
    if not case.chunks:
        return _run_whole(case, folder)
    with (
        mock.patch.object(codes, "CODED_AT_ONCE", 2 * CODE_BLOCK),
        mock.patch.object(communication_thread, "_EXCHANGE_BYTES", 4096),
    ):
        return _run_whole(case, folder)


def _run_whole(case: Case, folder: Path) -> list[Step]:
    folder.mkdir(exist_ok=True)
    block = {**case.block, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": case.clip}
    engine = start(MODELS[case.model], case.parallel, block, case.recompute, case.settings)
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    schedule, optimizer = engine._run_schedule, engine.optimizer
    assert optimizer._flat.shard_numel > 2 * CODE_BLOCK

    def watched(batches: list[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        part = int(optimizer._predicting is not None)
        if engine.dp_rank and not parts[part] and case.held_back(len(steps), part):
            outwaited(folder / f"{len(steps)}-{part}")
        parts[part].extend(batches)
        return schedule(batches, *args, **kwargs)

    engine._run_schedule = watched
    steps: list[Any] = []
    for step in range(STEPS):
        given = Shared(case, folder, step) if case.unequal else micro_batches(engine, step)
        result = engine.train_step(given, step)
        now, held_up = optimizer._buffers.weights.clone(), step % 4 == 3 or not case.unequal
        if held_up:
            engine.settle()
        done = (list(parts[0]), list(parts[1]))
        steps.append((result, done, pushed(engine) if held_up else None, now))
        parts[0].clear()
        parts[1].clear()
    engine.settle()
    stop(engine)
    return [Step(r.loss, r.grad_norm, r.lr, r.tokens, *rest) for r, *rest in steps]


@dataclass(frozen=True)
class Shared:
    """A step reader that tells the slow replica when the fast one has come to the last micro-batch of a part."""

    case: Case
    folder: Path
    step: int

    def micro_batch(self, i: int) -> Tensor:
        first = self.case.part_sizes(self.step)[0]
        if i in (first - 1, BATCH - 1):
            (self.folder / f"{self.step}-{int(i >= first)}").touch()
        return batch(self.step)[i : i + 1]


def outwaited(marker: Path) -> None:
    """Wait, in a slow replica, until the fast one has taken all that was free."""
    until_s = time.monotonic() + OUTWAITED_S
    while not marker.exists():
        assert time.monotonic() < until_s, f"{marker}: the fast replica did not take what was free"
        time.sleep(0.005)


def oracle(model: dict[str, Any]) -> Gradient:
    """Gradients of transformers' model, in double precision."""
    net = transformers_model(model, canonical_weights(architecture(model))).double()
    named = dict(net.named_parameters())

    def gradient(weights: dict[str, Tensor], tokens: Tensor) -> tuple[float, dict[str, Tensor]]:
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(weights[name])
        net.zero_grad()
        loss = loss_of(net, tokens)
        loss.backward()
        return loss.item(), {name: p.grad.clone() for name, p in named.items()}  # type: ignore[union-attr]

    return gradient


def flats(case: Case) -> list[Flat]:
    """By tensor rank, then pipeline stage."""
    a = architecture(MODELS[case.model])
    numels = [p.numel for p in canonical_parameters(a)]
    begins = {p.name: sum(numels[:i]) for i, p in enumerate(canonical_parameters(a))}
    result = []
    for tp_rank, stage in itertools.product(range(case.parallel.tensor), range(case.pipeline)):
        places = local_parameters(a, case.parallel, tp_rank, stage)
        kinds = [[p for p in places if (not p.decays) + p.sums_over_tp == kind] for kind in range(3)]
        groups: list[list[Any]] = [kind for kind in kinds if kind]
        sizes = [[p.numel for p in group] for group in groups]
        if case.optimizer == "Muon":
            decaying, *norms = groups
            matrices = [p for p in decaying if p.is_hidden_matrix]
            groups = [[p for p in decaying if not p.is_hidden_matrix], *norms]
            groups = [group for group in groups if group]
            sizes = [[p.numel for p in group] for group in groups]
            head = FlatBuffer(sizes, 1).numel
            sequence = pack([p.numel for p in matrices], case.replicas, head, CODE_BLOCK).sequence
            groups.append([matrices[i] if i >= 0 else None for i in sequence])
            sizes.append([matrices[i].numel if i >= 0 else -i for i in sequence])
        layout = FlatBuffer(sizes, case.replicas)
        order = torch.full((layout.numel,), -1)
        for place, offset in zip(itertools.chain(*groups), itertools.chain(*layout.offsets), strict=True):
            if place is None:
                continue
            rows = [
                begins[run.parameter]
                + run.start
                + (torch.arange(run.count)[:, None] * (run.stride or run.length) + torch.arange(run.length)).view(-1)
                for run in place.runs
            ]
            order[offset : offset + place.numel - place.padding] = torch.cat(rows)
        result.append(Flat(order, case.replicas))
    return result


def canonical(case: Case, ranks: list[Tensor]) -> dict[str, Tensor]:
    """From the flat weights of all ranks."""
    parameters = canonical_parameters(architecture(MODELS[case.model]))
    whole = torch.zeros(sum(p.numel for p in parameters), dtype=torch.float64)
    layouts = flats(case)
    for rank, flat in enumerate(ranks):  # ranks are ordered tensor, data, pipeline
        tp_rank, stage = rank % case.parallel.tensor, rank // (case.parallel.tensor * case.replicas)
        order = layouts[tp_rank * case.pipeline + stage].order
        whole[order[order >= 0]] = flat[order >= 0].double()
    parts = whole.split([p.numel for p in parameters])
    return {p.name: part.view(p.shape) for p, part in zip(parameters, parts, strict=True)}


def reference(case: Case, gradient: Gradient) -> Reference:
    a = architecture(MODELS[case.model])
    decays = {p.name: p.decays for p in canonical_parameters(a)}
    settings = Settings(
        case.form,
        case.clip,
        (0.9, 0.95),
        1e-8,
        lambda name: 0.1 * decays[name],
        SYNCHRONOUS,
        lambda name: case.optimizer == "Muon" and name.endswith("_proj.weight"),
        case.bits,
    )
    weights = {name: w.double() for name, w in canonical_weights(a).items()}
    return Reference(settings, weights, gradient, flats(case))


def masters(case: Case, ranks: list[Step]) -> dict[str, Tensor]:
    a = architecture(MODELS[case.model])
    flat = assemble(a, [step.masters or [] for step in ranks])
    return {p.name: flat[p.name].view(p.shape).double() for p in canonical_parameters(a)}


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor], spared: int = 0) -> float:
    """|ours − theirs| / |theirs|, without the `spared` elements that are farthest apart."""
    squares = torch.cat([(ours[n] - t).square().view(-1) for n, t in theirs.items()]).sort().values
    return math.sqrt(squares[: len(squares) - spared].sum() / sum(t.square().sum() for t in theirs.values()))
