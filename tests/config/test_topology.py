"""Who takes part in a run, who speaks to whom, and with which settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from geotrain.common.names import GLOBAL
from geotrain.config import (
    ClusterConfig,
    ConfigError,
    RunConfig,
    Topology,
    UnsupportedModelError,
    load_run,
    parse,
)
from tests.support.families import QWEN3_NEXT

CONFIGS = Path(__file__).parents[2] / "configs"
HOST = {"host": "localhost", "slots": 2}
OWN = {"parallel": {"tensor": 2}, "deepspeed": {"train_micro_batch_size_per_gpu": 1}}


def topology(**outer: Any) -> Topology:
    raw = load_run(CONFIGS / "runs/quickstart.json").model_dump(by_alias=True, mode="json")
    cluster = {
        "name": "c",
        "global_server": {"port": 1},
        "regions": [
            {
                "name": "eu",
                "server": {"port": 2},
                "workers": [{"name": "a", "hosts": [HOST], **OWN}, {"name": "b", "hosts": [HOST]}],
            },
            {"name": "spare", "hosts": [HOST]},
            {"name": "us", "server": {"port": 3}, "workers": [{"name": "c", "hosts": [HOST]}]},
        ],
    }
    run = parse(RunConfig, {**raw, "outer": outer}, "run")
    return Topology(run, parse(ClusterConfig, cluster, "cluster"))


def test_two_levels() -> None:
    found = topology()
    assert found.regions == found.members == {"eu": ("a", "b"), "us": ("c",)}
    assert {site: address.port for site, address in found.servers.items()} == {GLOBAL: 1, "eu": 2, "us": 3}
    assert [found.server_of(member) for member in ("a", "b", "c", "eu", "us")] == ["eu", "eu", "us", GLOBAL, GLOBAL]
    outer = found.run.outer
    assert not found.flat and outer.worker_codecs == (outer.local, outer.local)


def test_one_level() -> None:
    found = topology(levels=1, up={"name": "int4"})
    assert found.members == {"a": ("a",), "b": ("b",), "c": ("c",)} and list(found.servers) == [GLOBAL]
    assert {found.server_of(member) for member in ("a", "b", "c")} == {GLOBAL}
    assert found.region_of("b") == "eu"
    outer = found.run.outer
    assert found.flat and outer.worker_codecs == (outer.up, outer.down)


def test_a_workers_own_settings_lie_over_the_runs() -> None:
    found = topology()
    own, plain = found.workers["a"], found.workers["b"]
    assert (own.parallel.tensor, plain.parallel) == (2, found.run.parallel)
    assert plain.deepspeed["train_micro_batch_size_per_gpu"] == 8
    assert own.deepspeed == {**plain.deepspeed, "train_micro_batch_size_per_gpu": 1}
    params = plain.deepspeed["scheduler"]["params"]
    assert params["total_num_steps"] == found.run.total_steps  # "auto" in the file


def test_strangers_are_told_who_takes_part() -> None:
    with pytest.raises(ConfigError, match="'spare' is no worker or region of this run; there are eu, a, b, us, c"):
        topology().server_of("spare")


def test_the_architecture_follows_the_models_config() -> None:
    run = topology().run
    deeper = run.model.config | {"num_hidden_layers": run.architecture.layers + 1}
    changed = run.model_copy(update={"model": run.model.model_copy(update={"config": deeper})})
    assert changed.architecture.layers == run.architecture.layers + 1
    inside = {"data": run.data.model_copy(update={"attention": "document"})}
    nets = run.model_copy(update={"model": run.model.model_copy(update={"config": QWEN3_NEXT})})
    assert nets.architecture.net
    with pytest.raises(UnsupportedModelError, match="'document' does not go with the gated delta nets"):
        _ = nets.model_copy(update=inside).architecture
    other = run.model_copy(update={"model": run.model.model_copy(update={"config": {"model_type": "bert"}})})
    with pytest.raises(UnsupportedModelError, match="bert"):
        _ = other.architecture
