"""FP8, the ring and equal bits, as far as they go without a GPU: what is refused, what is built, how it is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from geotrain.config import (
    AccoConfig,
    ConfigError,
    ParallelConfig,
    PrecisionConfig,
    load_cluster,
    load_run,
    parse,
)
from geotrain.inner.model.context_parallel import Parts
from geotrain.launch.check import check_worker
from geotrain.launch.host_check import hosts_of
from geotrain.parallelism.checks import check_deterministic, check_layout, check_shared_devices
from geotrain.parallelism.transformer_engine import asked_by, check_device, check_transformer_engine
from tests.support.families import DEEPSEEK, QWEN_MOE
from tests.support.inner_worlds import LLAMA, architecture, deepspeed_block, run_config, run_world, start, stop, train

FP8 = PrecisionConfig(fp8="hybrid")
WIDE = {
    **LLAMA, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 96,
}  # fmt: skip
MOE = {**QWEN_MOE, **{k: v for k, v in WIDE.items() if k != "model_type"}, "moe_intermediate_size": 24}
RING = ParallelConfig(context=2, context_exchange="ring")


def check(
    model: dict[str, Any], parallel: ParallelConfig, precision: PrecisionConfig, bf16: bool = True, tokens: int = 64,
    **data: Any,
) -> None:  # fmt: skip
    run = run_config(model, deepspeed_block(1))
    run = run.model_copy(update={"data": run.data.model_copy(update=data)})
    check_transformer_engine(run, architecture(model), parallel, precision, bf16, tokens)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((WIDE, ParallelConfig(), FP8, False), r"precision\.fp8 = 'hybrid'.* needs deepspeed\.bf16\.enabled"),
        ((WIDE, ParallelConfig(tensor=16), FP8), r"q_proj\.weight: rows on a rank, 8, must be a multiple of 16"),
        ((WIDE, ParallelConfig(), FP8, True, 24), r"tokens of a micro-batch on a rank, 24, must be a multiple of 16"),
        ((WIDE, ParallelConfig(context=8), FP8), "tokens of a micro-batch on a rank, 8, must be a multiple of 16"),
        (
            ({**WIDE, "intermediate_size": 48}, ParallelConfig(), PrecisionConfig(fp8="e4m3", fp8_recipe="mxfp8")),
            r"gate_proj\.weight: rows on a rank, 48, must be a multiple of 32, .* use 64",
        ),
        ((MOE, ParallelConfig(), FP8), r"experts\.0\.gate_proj\.weight"),
        ((DEEPSEEK, ParallelConfig(), FP8), "does not go with the latent attention of a deepseek_v3"),
        ((WIDE, RING, PrecisionConfig(), False), r"context_exchange = 'ring' needs deepspeed\.bf16\.enabled"),
        (({**WIDE, "model_type": "mistral", "sliding_window": 5}, RING, PrecisionConfig()), "sliding window of 5"),
    ],
)
def test_what_transformer_engine_cannot_do_is_refused(arguments: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(*arguments)


def test_what_it_can_do_is_not() -> None:
    check(WIDE, ParallelConfig(tensor=2, sequence=True), FP8)
    check(WIDE, RING, FP8)
    check({**WIDE, "model_type": "mistral", "sliding_window": 16}, RING, PrecisionConfig())  # as long as a sample
    with pytest.raises(ConfigError, match=r"'ring' does not go with data\.attention = 'document'"):
        check(WIDE, RING, PrecisionConfig(), attention="document")


@pytest.mark.parametrize(
    ("precision", "parallel", "installed", "capability", "words"),
    [
        (FP8, ParallelConfig(), False, None, "fp8 = 'hybrid'.* needs a GPU, and this rank computes on the CPU"),
        (FP8, ParallelConfig(), True, (8, 0), r"needs a device of compute capability 8\.9, this one has 8\.0"),
        (FP8, ParallelConfig(), False, (9, 0), "needs Transformer Engine, which is not installed here"),
        (
            PrecisionConfig(fp8="e4m3", fp8_recipe="mxfp8"), ParallelConfig(), True, (9, 0),
            r"fp8_recipe = 'mxfp8': needs .* 10\.0, this one has 9\.0",
        ),
        (PrecisionConfig(), RING, False, None, "context_exchange = 'ring': needs a GPU"),
        (PrecisionConfig(), RING, False, (9, 0), "context_exchange = 'ring': needs Transformer Engine"),
    ],
)  # fmt: skip
def test_a_rank_that_cannot_says_so(
    precision: PrecisionConfig, parallel: ParallelConfig, installed: bool, capability: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_device(precision, parallel, installed, capability)


def test_a_rank_that_can_goes_on() -> None:
    check_device(FP8, ParallelConfig(), True, (8, 9))
    check_device(PrecisionConfig(fp8="e4m3", fp8_recipe="mxfp8"), RING, True, (10, 0))
    check_device(PrecisionConfig(deterministic_mode=True), ParallelConfig(context=2), False, None)
    assert asked_by(PrecisionConfig(deterministic_mode=True), ParallelConfig(context=2)) is None


def test_settings_that_do_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="fp8_recipe = 'mxfp8' does nothing without fp8"):
        parse(PrecisionConfig, {"fp8_recipe": "mxfp8"}, "run.json")
    with pytest.raises(ConfigError, match=r"'ring' does nothing with parallel\.context = 1"):
        check_layout(architecture(WIDE), ParallelConfig(context_exchange="ring"), 1, deepspeed_block(1), 16)
    for key, layout in (("pipeline", ParallelConfig(pipeline=2)), ("context_exchange", RING)):
        check_shared_devices(layout, False)
        with pytest.raises(ConfigError, match=rf"parallel\.{key}: ranks that share GPUs"):
            check_shared_devices(layout, True)
    with pytest.raises(ConfigError, match=r"deterministic_mode does not go with acco\.balance"):
        check_deterministic(PrecisionConfig(deterministic_mode=True), AccoConfig(balance=True))


def test_more_context_ranks_than_key_value_heads_need_the_ring() -> None:
    heads, block = ParallelConfig(context=4), deepspeed_block(1)
    with pytest.raises(ConfigError, match=r"num_key_value_heads = 2 .* parallel\.context_exchange = 'ring'"):
        check_layout(architecture(WIDE), heads, 4, block, 16)
    ring = heads.model_copy(update={"context_exchange": "ring"})
    assert check_layout(architecture(WIDE), ring, 4, block, 16) == 1
    with pytest.raises(ConfigError, match=r"length = 12 is not divisible by twice parallel\.context = 8.* use 16"):
        check_layout(architecture(WIDE), ring, 4, block, 12)


def test_megatron_is_told() -> None:
    from geotrain.inner.model.model import transformer_config

    def told(parallel: ParallelConfig, precision: PrecisionConfig) -> Any:
        return transformer_config(architecture(WIDE), parallel, True, "none", precision)

    plain = told(ParallelConfig(context=2), PrecisionConfig())
    assert (plain.fp8, plain.deterministic_mode, plain.cp_comm_type) == (None, False, None)
    wanted = PrecisionConfig(fp8="e4m3", fp8_recipe="blockwise", deterministic_mode=True)
    config = told(RING, wanted)
    assert (config.fp8, config.fp8_recipe, config.fp8_param) == ("e4m3", "blockwise", False)
    assert (config.context_parallel_size, config.cp_comm_type) == (2, "p2p")
    assert config.deterministic_mode and plain.cross_entropy_loss_fusion and not config.cross_entropy_loss_fusion
    assert config.tp_only_amax_red  # replicas need not be at the same micro-batch


# ------------------------------------------------------------------------------------------------------- the ring


@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_are_all_there_is_once_and_labels_are_one_ahead(size: int) -> None:
    samples = torch.arange(34).view(2, 17)
    for exchange in ("heads", "ring"):
        seen = []
        for rank in range(size):
            inputs, labels = Parts(rank, size, exchange).inputs_and_labels(samples)
            assert inputs.shape == (2, 16 // size) and torch.equal(labels, inputs + 1)
            seen.append(inputs)
        assert torch.equal(torch.cat(seen, 1).sort(1).values, samples[:, :-1])
    # Causal work of a rank: a token meets all before it. In a ring all ranks have equally much.
    assert len({int((Parts(r, size, "ring").of(samples[0, :-1], 0) + 1).sum()) for r in range(size)}) == 1


@pytest.mark.parametrize("size", [1, 2, 4])
def test_positions_are_those_that_megatron_gives_a_ring(size: int) -> None:
    """Its function wants pinned memory and a GPU for two numbers; both are taken from it here."""
    from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank

    positions, real = torch.randn(16, 1, 1, 4), torch.tensor
    for rank in range(size):
        group = mock.Mock(size=lambda: size, rank=lambda rank=rank: rank)
        with (
            mock.patch.object(torch, "tensor", lambda data, **_: real(data)),
            mock.patch.object(torch.Tensor, "cuda", lambda tensor, **_: tensor),
        ):
            theirs = get_pos_emb_on_this_cp_rank(positions, 0, group)
        assert torch.equal(Parts(rank, size, "ring").of(positions, 0), theirs)


class _Gathered(torch.autograd.Function):
    """All ranks' parts, one after another."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
        torch.distributed.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        whole = gradients[0].contiguous()
        torch.distributed.all_reduce(whole, group=ctx.group)
        return whole.chunk(ctx.group.size())[ctx.group.rank()], None


class GatheredAttention(nn.Module):
    """Attention as a ring computes it, in the plainest way: all keys and values are gathered, and a token sees those
    before it. It takes the place of Transformer Engine's, which needs a GPU: this tests what is around it."""

    def __init__(self, config: Any, pg_collection: Any, **_: Any) -> None:
        super().__init__()
        self.group, self.size = pg_collection.cp, config.context_parallel_size

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **more: Any) -> Tensor:
        length = len(query) * self.size
        places = torch.cat([Parts(r, self.size, "ring").of(torch.arange(length), 0) for r in range(self.size)])
        own = Parts(self.group.rank(), self.size, "ring").of(torch.arange(length), 0)
        k, v = (_Gathered.apply(x, self.group) for x in (key, value))
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, k, v))
        mask = places[None] <= own[:, None]
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


def ring_and_one() -> list[Any]:
    from geotrain.inner import build
    from geotrain.inner.model import model

    allowed = mock.Mock()
    curves = []
    for parallel, attention in ((ParallelConfig(), model.CausalAttention), (RING, GatheredAttention)):
        with (
            mock.patch.object(model, "CausalAttention", attention),
            mock.patch.object(build, "check_device", allowed),
            mock.patch.object(build, "check_transformer_engine", allowed),
        ):
            engine = start(WIDE, parallel, deepspeed_block(1))
        curves.append(train(engine, range(8)))
        stop(engine)
    return curves


def test_a_ring_trains_as_one_rank_does() -> None:
    for one, ring in run_world(2, ring_and_one):
        for mine, theirs in zip(one, ring, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)


# ------------------------------------------------------------------------------------------------------ equal bits


def refused_and_repeated() -> list[Any]:
    """Ask a rank on a CPU for FP8; returns what it says, and two trainings with `deterministic_mode`."""
    from geotrain.inner.build import build_engine

    block = deepspeed_block(1, bf16={"enabled": True})
    run = run_config(WIDE, block)
    with pytest.raises(ConfigError, match="needs a GPU, and this rank computes on the CPU"):
        build_engine(run, ParallelConfig(), block, precision=FP8)
    curves = []
    for _ in range(2):
        engine = start(WIDE, ParallelConfig(), block, precision=PrecisionConfig(deterministic_mode=True))
        assert torch.are_deterministic_algorithms_enabled() and engine.module.config.deterministic_mode
        curves.append(train(engine, range(3)))
        stop(engine)
    return curves


def test_without_a_gpu_fp8_is_refused_and_runs_repeat() -> None:
    for first, second in run_world(2, refused_and_repeated):
        assert first == second


# ------------------------------------------------------------------------------------------------------- a launch


CONFIGS = Path(__file__).parents[2] / "configs"


def test_a_launch_refuses_what_a_worker_cannot_do_and_tells_hosts_what_to_have() -> None:
    """A worker's own precision counts, since regions have different GPUs."""
    cluster = load_cluster(CONFIGS / "clusters/four-regions-ssh.json")
    worker = cluster.regions[0].workers[0]
    run = load_run(CONFIGS / "runs/1b.json", ["precision.fp8=hybrid"])
    check_worker(run, worker)
    blackwell = worker.model_copy(update={"precision": PrecisionConfig(fp8="e4m3", fp8_recipe="mxfp8")})
    check_worker(run, blackwell)
    fp32 = blackwell.model_copy(update={"deepspeed": {"bf16": {"enabled": False}}})
    with pytest.raises(
        ConfigError, match=rf"worker '{worker.name}': precision\.fp8 = 'e4m3'.* needs deepspeed\.bf16"
    ):
        check_worker(run, fp32)
    mixed = cluster.regions[0].model_copy(update={"workers": (blackwell,)})
    cluster = cluster.model_copy(update={"regions": (mixed, *cluster.regions[1:])})
    sites = tuple(region.name for region in cluster.regions)
    needs = [each for found in hosts_of(run, cluster, sites).values() for each in found]
    asked = {each.worker: (each.asks, each.capability) for each in needs}
    assert asked.pop(worker.name) == ("precision.fp8 = 'e4m3', precision.fp8_recipe = 'mxfp8'", (10, 0))
    assert set(asked.values()) == {("precision.fp8 = 'hybrid', precision.fp8_recipe = 'delayed'", (8, 9))}
