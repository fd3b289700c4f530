"""The parts of the canonical parameters that a rank holds, under Megatron-core's names. Plain data, no tensors.

Megatron-core fuses parameters that Hugging Face keeps apart, and splits what Hugging Face keeps whole; how, each
family says (`geotrain.families`). A matrix that is split by rows is a run, or several where it alternates with
others; one that is split by columns is a strided run. With a pipeline, an embedding that is tied, or looked up by
layers that predict further tokens, has a second copy on the last stage. Expert parallelism deals out whole experts,
in their order. A vocabulary that tensor ranks do not divide is padded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from geotrain.config import Architecture, ParallelConfig
from geotrain.families import family_of, layer_weights
from geotrain.families.weights import Weight
from geotrain.parameters.parameter_map import StridedSlice, numel

VOCABULARY_ROWS = 128  # at whose multiples padding ends, as Megatron-LM's: matrix units are slow on odd numbers


@dataclass(frozen=True)
class LocalParameter:
    """One parameter of this rank, under Megatron-core's name (local layer specification).

    runs: canonical places of its elements, read flat.
    padding: elements behind those, which have no canonical place and stay 0: rows of an embedding or a head beyond
        the vocabulary. No shard has them, so that they are in no message, checkpoint or export.
    pushes: whether this rank sends its delta. For every element exactly one tensor and pipeline rank does.
    sharded: whether tensor ranks hold different parts of it; otherwise each has a copy.
    tied_copy: whether it is the second copy of the embedding, on the last pipeline stage.
    sums_over_tp: whether each tensor rank computes only a part of its gradient, so that the parts must be summed.
    decays: whether weight decay applies.
    is_hidden_matrix: whether Muon trains it: a layer's matrix, not the embedding or the head, whose rows are words.
    expert: whether expert parallelism gives data-parallel ranks different ones of its kind.
    untrained: whether counts change it and no gradient does; every data-parallel rank then has a copy, in fp32.
    """

    name: str
    runs: tuple[StridedSlice, ...]
    padding: int
    pushes: bool
    sharded: bool
    tied_copy: bool
    sums_over_tp: bool
    decays: bool
    is_hidden_matrix: bool
    expert: bool
    untrained: bool

    @property
    def numel(self) -> int:
        return sum(run.numel for run in self.runs) + self.padding


def vocabulary_rows(size: int, tensor: int) -> int:
    """Count a tensor rank's rows of the embedding and the head. Ranks that do not divide a vocabulary of this size
    have VOCABULARY_ROWS, or a multiple, each; rows beyond its end are padding."""
    return -(-size // (tensor * VOCABULARY_ROWS)) * VOCABULARY_ROWS if size % tensor else size // tensor


def local_parameters(
    a: Architecture, parallel: ParallelConfig, tp_rank: int, pp_rank: int, ep_rank: int = 0
) -> list[LocalParameter]:
    """List the parameters of the rank at (tp_rank, pp_rank, ep_rank), in canonical order."""
    family = family_of(a.model_type)
    first, last = pp_rank == 0, pp_rank == parallel.pipeline - 1

    def held(weights: Iterable[Weight]) -> list[LocalParameter]:
        parts: dict[str, list[Weight]] = {}
        for weight in weights:
            parts.setdefault(weight.within, []).append(weight)
        return [_local(name, members, parallel, tp_rank) for name, members in parts.items()]

    embedding, head = family.embedding(a), family.head(a)
    found = held([embedding]) if first else []
    for i, layer in enumerate(parallel.layers_of(pp_rank, a.layers)):
        mine = _of_expert_rank(layer_weights(a, layer), a, parallel.expert, ep_rank)
        found += held(weight.of_layer(layer, i, family.trunk) for weight in mine)
    if last:
        found += held([family.final_norm(a)])
    if last and not a.tied_embeddings:
        found += held([head])
    if last and not first and (names := tied_copies(a, parallel.pipeline)):  # else there is one tensor of it
        (copy,) = held([replace(embedding, within=names[-1])])
        found.append(replace(copy, pushes=False, tied_copy=True))
    return found


def _of_expert_rank(weights: Iterable[Weight], a: Architecture, expert_ranks: int, ep_rank: int) -> Iterator[Weight]:
    """Leave out the experts of other ranks; its own are counted from 0."""
    count = a.experts.count // expert_ranks if a.experts else 0
    for weight in weights:
        if weight.expert is None:
            yield weight
        elif 0 <= (local := weight.expert - ep_rank * count) < count:
            yield replace(weight, within=weight.within.format(expert=local))


def _local(name: str, parts: Sequence[Weight], parallel: ParallelConfig, tp_rank: int) -> LocalParameter:
    """Describe a tensor rank's part of the Megatron-core parameter in which these weights lie; they are cut alike."""
    tp, one, runs = parallel.tensor, parts[0], tuple(_runs(parts, parallel.tensor, tp_rank))
    copied = one.cut == "whole"
    wanted = sum(_dealt(weight, tp) for weight in parts) if one.cut == "rows" else numel(runs)
    return LocalParameter(
        name,
        runs,
        padding=wanted - numel(runs),
        pushes=tp_rank == 0 or not copied,
        sharded=tp > 1 and not copied,
        tied_copy=False,
        sums_over_tp=tp > 1 and (one.summed == "always" or (one.summed == "sequence" and parallel.sequence)),
        decays=one.decays,
        is_hidden_matrix=one.decays and min(one.shape) > 1 and name.startswith("decoder."),
        expert=one.expert is not None and parallel.expert > 1,
        untrained=one.untrained,
    )


def _runs(parts: Sequence[Weight], tp: int, tp_rank: int) -> Iterator[StridedSlice]:
    one = parts[0]
    if one.cut == "whole" or (one.cut == "columns" and tp == 1):
        yield from (StridedSlice(weight.offset, weight.numel, parameter=weight.name) for weight in parts)
    elif one.cut == "columns":
        for weight in parts:
            rows, columns = weight.shape
            begin = weight.offset + tp_rank * (columns // tp)
            yield StridedSlice(begin, columns // tp, columns, rows, weight.name)
    else:
        interleaved = one.interleaved or tp
        for part in range(tp_rank * interleaved // tp, (tp_rank + 1) * interleaved // tp):
            for weight in parts:
                length = _dealt(weight, interleaved)
                begin = min(part * length, weight.numel)
                if held := min(length, weight.numel - begin):
                    yield StridedSlice(weight.offset + begin, held, parameter=weight.name)


def _dealt(weight: Weight, parts: int) -> int:
    """Count the elements of each part of a weight whose rows are dealt out; `checks` lets no other than a
    vocabulary's be padded."""
    rows = weight.shape[0]
    return vocabulary_rows(rows, parts) * (weight.numel // rows)


@lru_cache(maxsize=256)
def first_like(a: Architecture, parallel: ParallelConfig) -> tuple[int, ...]:
    """List, for each pipeline stage, the first one that holds parameters of the same shapes."""
    stages, shapes = parallel.pipeline, _layer_shapes(a)
    held = [parallel.layers_of(s, a.layers) for s in range(stages)]
    kinds = [(s == 0, s == stages - 1, shapes[of.start : of.stop]) for s, of in enumerate(held)]
    return tuple(kinds.index(kind) for kind in kinds)


@lru_cache(maxsize=16)
def _layer_shapes(a: Architecture) -> tuple[int, ...]:
    """List, for each layer, the first one with the same weights."""
    every = [layer_weights(a, layer) for layer in range(a.layers)]
    return tuple(every.index(weights) for weights in every)


def any_of_stage(a: Architecture, parallel: ParallelConfig, stage: int) -> tuple[LocalParameter, ...]:
    """List the parameters of one rank of a pipeline stage, under the names of the first stage like it: the stage's
    other tensor and expert ranks hold as many."""
    return _of_first(a, parallel, first_like(a, parallel)[stage])


@lru_cache(maxsize=256)  # the planner asks for the same stages again and again
def _of_first(a: Architecture, parallel: ParallelConfig, stage: int) -> tuple[LocalParameter, ...]:
    return tuple(local_parameters(a, parallel, 0, stage))


@lru_cache(maxsize=1024)  # the planner asks for the same stages again and again
def stage_parameters(a: Architecture, parallel: ParallelConfig, stage: int) -> int:
    """Count the parameters of any rank of a pipeline stage: tensor and expert ranks hold equally many."""
    return sum(p.numel for p in any_of_stage(a, parallel, stage))


@lru_cache(maxsize=1024)
def expert_parameters(a: Architecture, parallel: ParallelConfig, stage: int) -> int:
    """Count the parameters of such a rank in experts that expert parallelism divides."""
    return sum(p.numel for p in any_of_stage(a, parallel, stage) if p.expert)


def tied_copies(architecture: Architecture, stages: int) -> tuple[str, ...]:
    """Name the copies of an embedding on the first and the last pipeline stage, if they each have one."""
    embedding, tied = "embedding.word_embeddings.weight", architecture.tied_embeddings
    copied = stages > 1 and (tied or architecture.predicting)
    return (embedding, "output_layer.weight" if tied else embedding) if copied else ()
