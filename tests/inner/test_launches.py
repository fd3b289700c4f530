"""Kernels that ACCO launches to commit a step of a large model, counted without a GPU."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.trace.recorder import recorded
from geotrain.config import AccoConfig, ParallelConfig, architecture_from_hf
from geotrain.parallelism.local_parameters import local_parameters
from tests.support.executors import AtOnce
from tests.support.inner_worlds import run_world

ROOT = Path(__file__).parents[2]
RANKS = 8


def windows(*bits: tuple[int, int] | None) -> list[tuple[int, Counter[str]]]:
    """Count, with codes of so many bits or with values, elements of a rank's flat buffer and launches of a commit,
    from gradients to the weights of the next window, but for collectives."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from geotrain.inner.runtime import parallel

    os.environ.update(RANK="0", WORLD_SIZE=str(RANKS))
    start, new_group = dist.init_process_group, dist.new_group
    fake = {"rank": 0, "world_size": RANKS, "store": FakeStore()}

    def made(ranks: Any = None, timeout: Any = None, backend: Any = None, **options: Any) -> Any:
        return new_group(ranks, timeout, "fake", **options)

    with (
        mock.patch.object(dist, "init_process_group", lambda *args, **options: start("fake", **fake)),
        mock.patch.object(dist, "new_group", made),
    ):
        parallel.join(60)
        mesh = parallel.initialize(ParallelConfig(), 60)
        return [window(each, mesh) for each in bits]


def window(bits: tuple[int, int] | None, mesh: Any) -> tuple[int, Counter[str]]:
    from geotrain.inner.acco.optimizer import AccoOptimizer
    from geotrain.inner.runtime.parallel import EXPERTS
    from geotrain.optimizers.groups import parameter_groups
    from geotrain.optimizers.inner_optimizer import InnerOptimizer
    from geotrain.parallelism.optimizer_settings import AdamWSettings

    architecture = architecture_from_hf(json.loads((ROOT / "configs/models/llama-8b.json").read_text()))
    places = local_parameters(architecture, ParallelConfig(), 0, 0)
    meta: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}
    placed = [(torch.nn.Parameter(torch.empty(place.numel, **meta)), place) for place in places]
    settings = AdamWSettings()
    adamw = InnerOptimizer(parameter_groups(placed, settings, EXPERTS), settings)
    acco = AccoConfig(synchronous_steps=0)
    optimizer = AccoOptimizer(adamw, placed, mesh, acco, 1.0, torch.float32, bits, lambda outcome: None)
    optimizer.communication._thread = AtOnce()  # type: ignore[assignment]  # a mode of torch's dispatcher belongs to one thread
    optimizer.count(torch.zeros((), device="meta"), 4)
    ours = mock.patch.object(optimizer.communication, "reduce_scatter")  # over gloo it copies through the host
    numbers = mock.patch.object(torch.Tensor, "tolist", lambda tensor: [1.0] * len(tensor))
    with recorded() as commit, ours, numbers:
        optimizer.step()
        optimizer.use_arrived_weights()
    optimizer.communication._thread = mock.Mock()
    return optimizer._buffers.weights.numel(), Counter({name: count for (_, name), count in commit.launches.items()})


def test_a_commit_of_a_large_model_takes_few_launches() -> None:
    ((_, values), (elements, coded)) = run_world(1, windows, None, (8, 4))[0]
    assert values["adam_kernel"] == 1 and values.total() <= 10, values  # whatever the size
    assert coded["quantize_dense"] and coded["dequantize_dense"] and coded["adam_kernel"] == 1
    assert elements > 8e9 and coded.total() <= 0.1 * elements / 2**20, coded
