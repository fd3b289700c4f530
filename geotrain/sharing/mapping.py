"""Where a rank's local parameters lie in the canonical address space. Plain data; no tensor, no process group.

Megatron-core fuses and splits what Hugging Face keeps apart and whole:

- `linear_qkv` holds, for each query group in turn, the group's query heads, its key head and its value head;
  tensor parallelism deals out groups.
- `linear_fc1` holds [gate; up] of the tensor rank: two runs.
- `linear_proj` and `linear_fc2` are split by columns: strided runs.
- embedding and head are split by rows; norms are whole on every tensor rank.
- with a pipeline, a tied embedding has a second copy on the last stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from geotrain.canonical import Architecture, Run
from geotrain.config import ParallelConfig


@dataclass(frozen=True)
class LocalParameter:
    """One parameter of this rank, under Megatron-core's name (local layer specification).

    runs: where its elements, read flat, lie.
    pushes: whether this rank speaks for it. Exactly one tensor and pipeline rank does, for every element.
    sharded: whether tensor ranks hold different parts of it.
    tied_copy: whether it is the second copy of a tied embedding, on the last pipeline stage.
    sums_over_tp: whether each tensor rank computes only a part of its gradient.
    decays: whether weight decay applies.
    """

    name: str
    runs: tuple[Run, ...]
    pushes: bool
    sharded: bool
    tied_copy: bool
    sums_over_tp: bool
    decays: bool

    @property
    def numel(self) -> int:
        return sum(run.numel for run in self.runs)


def local_parameters(a: Architecture, parallel: ParallelConfig, tp_rank: int, pp_rank: int) -> list[LocalParameter]:
    """Every parameter of the rank at (tp_rank, pp_rank), in canonical order."""
    return list(_Stage(a, parallel, tp_rank, pp_rank).parameters())


@lru_cache(maxsize=1024)
def stage_parameters(a: Architecture, parallel: ParallelConfig, stage: int) -> int:
    """Parameters of any rank of a pipeline stage: tensor ranks hold equally many."""
    return sum(p.numel for p in local_parameters(a, parallel, 0, stage))


class _Stage:
    def __init__(self, a: Architecture, parallel: ParallelConfig, tp_rank: int, pp_rank: int) -> None:
        self.a, self.parallel, self.rank = a, parallel, tp_rank
        self.first, self.last = pp_rank == 0, pp_rank == parallel.pipeline - 1
        self.layers = a.layers // parallel.pipeline
        self.offset = pp_rank * self.layers

    def parameters(self) -> Iterator[LocalParameter]:
        a = self.a
        if self.first:
            runs = self._rows("model.embed_tokens.weight", a.vocab_size, a.hidden_size)
            yield self._matrix("embedding.word_embeddings.weight", *runs)
        for i in range(self.layers):
            yield from self._layer(f"decoder.layers.{i}.", f"model.layers.{self.offset + i}.")
        if self.last:
            yield self._norm("decoder.final_layernorm.weight", "model.norm.weight", a.hidden_size)
            tied = a.tied_embeddings
            if not tied or not self.first:
                source = "model.embed_tokens.weight" if tied else "lm_head.weight"
                runs = self._rows(source, a.vocab_size, a.hidden_size)
                yield self._matrix("output_layer.weight", *runs, tied_copy=tied)

    def _layer(self, local: str, canonical: str) -> Iterator[LocalParameter]:
        a, h = self.a, self.a.hidden_size
        attention, mlp = canonical + "self_attn.", canonical + "mlp."
        yield self._norm(local + "input_layernorm.weight", canonical + "input_layernorm.weight", h)
        yield self._matrix(local + "self_attention.linear_qkv.weight", *self._qkv(attention))
        proj = self._columns(attention + "o_proj.weight", h, a.heads * a.head_dim)
        yield self._matrix(local + "self_attention.linear_proj.weight", proj)
        if a.qk_norm:
            for kind in "qk":
                name = f"self_attention.{kind}_layernorm.weight"
                yield self._norm(local + name, f"{attention}{kind}_norm.weight", a.head_dim, per_head=True)
        yield self._norm(local + "pre_mlp_layernorm.weight", canonical + "post_attention_layernorm.weight", h)
        gate = self._rows(mlp + "gate_proj.weight", a.ffn_size, h)
        up = self._rows(mlp + "up_proj.weight", a.ffn_size, h)
        yield self._matrix(local + "mlp.linear_fc1.weight", *gate, *up)
        yield self._matrix(local + "mlp.linear_fc2.weight", self._columns(mlp + "down_proj.weight", h, a.ffn_size))

    def _qkv(self, attention: str) -> Iterator[Run]:
        a = self.a
        head = a.head_dim * a.hidden_size
        per_group = a.heads // a.kv_heads * head
        groups = a.kv_heads // self.parallel.tensor
        for group in range(self.rank * groups, (self.rank + 1) * groups):
            yield Run(attention + "q_proj.weight", group * per_group, per_group)
            yield Run(attention + "k_proj.weight", group * head, head)
            yield Run(attention + "v_proj.weight", group * head, head)

    def _rows(self, name: str, rows: int, columns: int) -> tuple[Run, ...]:
        length = rows // self.parallel.tensor * columns
        return (Run(name, self.rank * length, length),)

    def _columns(self, name: str, rows: int, columns: int) -> Run:
        if self.parallel.tensor == 1:
            return Run(name, 0, rows * columns)
        length = columns // self.parallel.tensor
        return Run(name, self.rank * length, length, columns, rows)

    def _matrix(self, name: str, *runs: Run, tied_copy: bool = False) -> LocalParameter:
        return LocalParameter(name, runs, not tied_copy, self.parallel.tensor > 1, tied_copy, False, True)

    def _norm(self, name: str, canonical: str, size: int, per_head: bool = False) -> LocalParameter:
        # With sequence parallelism a tensor rank sees a part of the tokens; of q and k, always a part of the heads.
        partial = self.parallel.tensor > 1 and (self.parallel.sequence or per_head)
        return LocalParameter(name, (Run(canonical, 0, size),), self.rank == 0, False, False, partial, False)
