"""Which parts of the canonical parameters a rank holds, under Megatron-core's names. Plain data, no tensors.

Megatron-core fuses parameters that Hugging Face keeps apart, and splits what Hugging Face keeps whole:

- `linear_qkv` holds, for each query group in turn, the group's query heads, its key head and its value head;
  tensor parallelism deals out groups.
- `linear_fc1` holds [gate; up] of the tensor rank: two runs.
- `linear_proj` and `linear_fc2` are split by columns: strided runs.
- embedding and head are split by rows; norms are whole on every tensor rank.
- with a pipeline, a tied embedding has a second copy on the last stage.
- an expert's matrices are an MLP's; expert parallelism deals out whole experts, in their order. A router is whole on
  every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from geotrain.config import Architecture, ParallelConfig
from geotrain.layout import StridedSlice


@dataclass(frozen=True)
class LocalParameter:
    """One parameter of this rank, under Megatron-core's name (local layer specification).

    runs: canonical places of its elements, read flat.
    pushes: whether this rank sends its delta. For every element exactly one tensor and pipeline rank does.
    sharded: whether tensor ranks hold different parts of it; otherwise each has a copy.
    tied_copy: whether it is the second copy of a tied embedding, on the last pipeline stage.
    sums_over_tp: whether each tensor rank computes only a part of its gradient, so that the parts must be summed.
    decays: whether weight decay applies.
    expert: whether expert parallelism gives data-parallel ranks different ones of its kind.
    """

    name: str
    runs: tuple[StridedSlice, ...]
    pushes: bool
    sharded: bool
    tied_copy: bool
    sums_over_tp: bool
    decays: bool
    expert: bool = False

    @property
    def numel(self) -> int:
        return sum(run.numel for run in self.runs)

    @property
    def is_hidden_matrix(self) -> bool:
        """Whether Muon trains it: a layer's matrix, not the embedding or the head, whose rows are words."""
        return self.decays and self.name.startswith("decoder.")


def local_parameters(
    a: Architecture, parallel: ParallelConfig, tp_rank: int, pp_rank: int, ep_rank: int = 0
) -> list[LocalParameter]:
    """Every parameter of the rank at (tp_rank, pp_rank, ep_rank), in canonical order."""
    tp, h = parallel.tensor, a.hidden_size
    first, last = pp_rank == 0, pp_rank == parallel.pipeline - 1

    def rows(name: str, count: int) -> StridedSlice:
        """This rank's rows of [count, hidden_size]."""
        length = count // tp * h
        return StridedSlice(tp_rank * length, length, parameter=name)

    def columns(name: str, count: int) -> StridedSlice:
        """This rank's columns of [hidden_size, count]."""
        if tp == 1:
            return StridedSlice(0, h * count, parameter=name)
        return StridedSlice(tp_rank * (count // tp), count // tp, count, h, parameter=name)

    def matrix(name: str, *runs: StridedSlice, tied_copy: bool = False, expert: bool = False) -> LocalParameter:
        return LocalParameter(name, runs, not tied_copy, tp > 1, tied_copy, False, True, expert)

    def norm(name: str, canonical: str, size: int, per_head: bool = False) -> LocalParameter:
        # Every tensor rank has a copy of a norm. With sequence parallelism it sees a part of the tokens only, and a
        # norm of q or k always sees only the rank's own heads: then its gradient is a part, too.
        partial = tp > 1 and (parallel.sequence or per_head)
        runs = (StridedSlice(0, size, parameter=canonical),)
        return LocalParameter(name, runs, tp_rank == 0, False, False, partial, False)

    def layer(local: str, canonical: str) -> Iterator[LocalParameter]:
        attention = canonical + "self_attn."
        # A group is a key-value head with the query heads that share it; sizes are rows of one group.
        groups = range(tp_rank * (a.kv_heads // tp), (tp_rank + 1) * (a.kv_heads // tp))
        sizes = {"q": a.heads // a.kv_heads * a.head_dim, "k": a.head_dim, "v": a.head_dim}

        def qkv(kind: str, row: int) -> list[StridedSlice]:
            """Of weights or biases, whose rows have `row` elements."""
            return [
                StridedSlice(group * size * row, size * row, parameter=f"{attention}{part}_proj.{kind}")
                for group in groups
                for part, size in sizes.items()
            ]

        yield norm(local + "input_layernorm.weight", canonical + "input_layernorm.weight", h)
        yield matrix(local + "self_attention.linear_qkv.weight", *qkv("weight", h))
        if a.qkv_bias:
            name = local + "self_attention.linear_qkv.bias"
            yield LocalParameter(name, tuple(qkv("bias", 1)), True, tp > 1, False, False, False)
        proj = columns(attention + "o_proj.weight", a.heads * a.head_dim)
        yield matrix(local + "self_attention.linear_proj.weight", proj)
        for kind in "qk" if a.qk_norm else "":
            name = f"{local}self_attention.{kind}_layernorm.weight"
            yield norm(name, f"{attention}{kind}_norm.weight", a.head_dim, per_head=True)
        yield norm(local + "pre_mlp_layernorm.weight", canonical + "post_attention_layernorm.weight", h)
        if a.router is not None:
            # Tensor ranks route different tokens, as sequence parallelism deals them out: their gradients are parts.
            routes = (StridedSlice(0, len(a.mlps) * h, parameter=canonical + a.router),)
            name = local + "mlp.router.weight"
            yield LocalParameter(name, routes, tp_rank == 0, False, False, tp > 1 and parallel.sequence, True)
        mine = len(a.mlps) // parallel.expert  # of this rank; all where there is only one
        for i, (gate, up, down) in enumerate(a.mlps[ep_rank * mine : (ep_rank + 1) * mine]):
            mlp = f"{local}mlp.experts.local_experts.{i}." if a.experts else local + "mlp."
            fc1 = rows(canonical + gate, a.ffn_size), rows(canonical + up, a.ffn_size)
            fc2 = columns(canonical + down, a.ffn_size)
            yield matrix(mlp + "linear_fc1.weight", *fc1, expert=parallel.expert > 1)
            yield matrix(mlp + "linear_fc2.weight", fc2, expert=parallel.expert > 1)

    embedding, layers = rows("model.embed_tokens.weight", a.vocab_size), a.layers // parallel.pipeline
    found = [matrix("embedding.word_embeddings.weight", embedding)] if first else []
    for i in range(layers):
        found += layer(f"decoder.layers.{i}.", f"model.layers.{pp_rank * layers + i}.")
    if last:
        found.append(norm("decoder.final_layernorm.weight", "model.norm.weight", h))
    if last and not a.tied_embeddings:
        found.append(matrix("output_layer.weight", rows("lm_head.weight", a.vocab_size)))
    if last and a.tied_embeddings and not first:  # without a pipeline, the head uses the embedding's own tensor
        found.append(matrix("output_layer.weight", embedding, tied_copy=True))
    return found


@lru_cache(maxsize=64)  # the planner asks for the same stages again and again
def any_of_stage(a: Architecture, parallel: ParallelConfig, stage: int) -> tuple[LocalParameter, ...]:
    """The parameters of one rank of a pipeline stage: those of its other tensor and expert ranks are as large."""
    return tuple(local_parameters(a, parallel, 0, stage))


@lru_cache(maxsize=1024)  # the planner asks for the same stages again and again
def stage_parameters(a: Architecture, parallel: ParallelConfig, stage: int) -> int:
    """Parameters of any rank of a pipeline stage: tensor and expert ranks hold equally many."""
    return sum(p.numel for p in any_of_stage(a, parallel, stage))


def tied_copies(architecture: Architecture, stages: int) -> tuple[str, ...]:
    """The names of an embedding that first and last pipeline stage each have a copy of, if they do."""
    tied = stages > 1 and architecture.tied_embeddings
    return ("embedding.word_embeddings.weight", "output_layer.weight") if tied else ()
