"""A region makes the run's first weights by itself, and only a digest of them goes over its link."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import signal
import threading
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from geotrain.config import OuterConfig, RunConfig, parse
from geotrain.net.server import first_weights
from geotrain.net.server.first_weights import FirstDigests, initial_weights
from geotrain.net.transport import rpc
from geotrain.net.transport.made_weights import MadeWeights
from geotrain.outer.messages import Answer, ChunkWeights
from geotrain.parameters.initial import initial_tensor
from geotrain.parameters.parameter_map import Parameter, ParameterMap, parameter_map_of
from tests.support.net_worlds import BUSY_S, FP32, wait_for
from tests.support.server_processes import Site

MADE = "first weights: made here"


def says_all() -> None:
    logging.basicConfig(level=logging.INFO)


def other_seed() -> None:
    """Let this process draw other weights."""
    says_all()
    # Those too that are the same with every seed.
    first_weights.initial_tensor = lambda parameter, seed: initial_tensor(parameter, seed + 1) + 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("flat", [False, True])
def test_weights_that_differ_or_that_nobody_has_made_are_sent(tmp_path: Path, flat: bool) -> None:
    """Regions' file differs from the global server's, or holds what is no weight; workers of a flat run make none."""
    settings: dict[str, Any] = {"levels": 1, "down": FP32} if flat else {}
    site = Site(tmp_path, OuterConfig(**settings) if flat else "halos", regions={"eu": ("a", "b"), "us": ("c",)})
    run = json.loads((tmp_path / "run.json").read_text())
    run["model"] = {"weights": str(tmp_path / "model.safetensors")}
    run["data"] = {"train_samples": 48, "samples_per_step": 2}
    del run["deepspeed"]
    (tmp_path / "run.json").write_text(json.dumps(run))

    def write(value: float) -> None:
        shapes = {"0.weight": (12, 12), "0.bias": (12,)}
        save_file({name: torch.full(shape, value) for name, shape in shapes.items()}, run["model"]["weights"])

    write(1.0)
    site.run = parse(RunConfig, run, "run")
    site.parameter_map = parameter_map_of(site.run)
    servers = {"global": site.serve("global")}
    site.status("global")  # it has read the file
    for name, value in {"eu": 2.0, "us": inf}.items():
        write(value)
        if not flat:
            servers[name] = site.serve(name, first=says_all)
            wait_for(lambda name=name: site.status(name)["versions"])
    worker = site.worker("a", at="global" if flat else "eu")
    worker.join()
    assert all(bool((vector == 1.0).all()) for vector in worker.anchor)
    worker.close()
    for name, server in servers.items():
        server.send(signal.SIGKILL)
        assert MADE not in server.said.read_text()
        assert ("holds infinities or NaN" in server.said.read_text()) == (name == "us")


@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6),
    chunk_elements=st.integers(1, 40),
    dealt=st.randoms(use_true_random=False),
)
def test_fragments_are_parts_of_the_parameters(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, int]], chunk_elements: int, dealt: random.Random
) -> None:
    """Of any fragments of any map, also where a parameter lies in several chunks."""
    run = Site(tmp_path_factory.mktemp("run")).run
    inits = ("normal", "ones", "zeros")
    parameters = [Parameter(f"p{i}", shape, i // 2, inits[i % 3], 0.02) for i, shape in enumerate(shapes)]
    parameter_map = ParameterMap(parameters, 1, chunk_elements)
    by_name = {p.name: initial_tensor(p, run.seed).flatten() for p in parameters}
    vectors = [torch.cat([by_name[p.name] for p in f.parameters]) for f in parameter_map.fragments]
    numbers = [number for number in range(len(vectors)) if dealt.random() < 0.5]
    found = initial_weights(run, parameter_map, numbers)
    assert [*found] == numbers and all(torch.equal(found[number], vectors[number]) for number in numbers)
    assert all(map(torch.equal, initial_weights(run, parameter_map).values(), vectors))


def test_a_member_asks_again_while_its_answer_is_digested(monkeypatch: pytest.MonkeyPatch) -> None:
    """However short it waits, an answer is digested once; and another answer anew."""
    held, began = threading.Event(), []
    real = MadeWeights.of

    def slow(weights: tuple[ChunkWeights, ...]) -> MadeWeights:
        began.append(weights)
        assert held.wait(BUSY_S)
        return real(weights)

    one, other = (Answer(0, 0, (ChunkWeights(0, version, b"same"),), "life") for version in (0, 1))
    digest = real(one.weights).digest
    monkeypatch.setattr(MadeWeights, "of", staticmethod(slow))

    async def main() -> None:
        digests = FirstDigests()
        now_s = asyncio.get_running_loop().time()
        for _ in range(3):
            assert await digests.reply("eu", one, digest, now_s) == rpc.NotYet()
        held.set()
        assert await digests.reply("eu", one, digest, now_s + BUSY_S) == rpc.Same("life")
        assert began == [one.weights]
        assert await digests.reply("eu", other, digest, now_s + BUSY_S) is other
        held.clear()
        assert await digests.reply("eu", one, digest, now_s) == rpc.NotYet()
        held.set()  # the server was told meanwhile to answer with other weights
        assert await digests.reply("eu", other, digest, now_s + BUSY_S) is other
        assert not digests._begun

    asyncio.run(main())
