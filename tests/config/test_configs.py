"""The shipped configurations: valid, consistent, and what they would need."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from geotrain.commands import dry_run
from geotrain.commands.plan import default_run
from geotrain.config import (
    ClusterConfig,
    ConfigError,
    HalosConfig,
    OuterConfig,
    OverlapConfig,
    RunConfig,
    architecture_from_hf,
    load_cluster,
    load_run,
    parse,
    rule_config,
)
from geotrain.launch.check import check_together, link_to_global
from geotrain.launch.preflight import schedule_cautions
from geotrain.launch.site_processes import LaunchRequest
from geotrain.parallelism.checks import accumulates_in_fp32
from geotrain.parameters.parameter_map import active_parameter_count, parameter_count, parameter_map_of
from geotrain.plan.model.memory import rank_memory

CONFIGS = Path(__file__).parents[2] / "configs"
RUNS = sorted((CONFIGS / "runs").glob("*.json"))
CLUSTERS = sorted((CONFIGS / "clusters").glob("*.json"))
LOCAL = ("local-two-regions", "local-wan")
LARGE = ("four-regions-ssh", "slurm")


def pair(run: str, cluster: str) -> tuple[RunConfig, ClusterConfig]:
    return load_run(CONFIGS / f"runs/{run}.json"), load_cluster(CONFIGS / f"clusters/{cluster}.json")


def changed(config: RunConfig | ClusterConfig, **paths: Any) -> Any:
    """The configuration with some keys set: `outer__local_steps=4`."""
    raw = config.model_dump(by_alias=True, mode="json")
    for path, value in paths.items():
        *parents, last = path.split("__")
        place = raw
        for part in parents:
            place = place[int(part) if part.isdigit() else part]
        place[int(last) if last.isdigit() else last] = value
    return parse(type(config), raw, "changed")


@pytest.mark.parametrize("path", RUNS, ids=lambda p: p.stem)
def test_runs_are_what_they_say(path: Path) -> None:
    run = load_run(path)
    assert run.name == path.stem
    block = run.deepspeed
    assert block["scheduler"]["params"]["total_num_steps"] == "auto"  # the schedule ends with the data
    assert schedule_cautions(block, run.total_steps) == []
    assert block["bf16"]["enabled"]
    assert block["zero_optimization"]["stage"] == 1
    outer = run.outer
    if path.stem.startswith("quickstart"):
        assert isinstance(outer.rule, HalosConfig) and outer.rule.ledger
    else:  # what docs/evidence.md speaks for, in four regions
        assert outer.rule == rule_config("region_momentum", updates_per_send=outer.rule.updates_per_send)


def test_every_shipped_run_sums_gradients_in_fp32() -> None:
    """Also the baselines, the examples, and the run that `geotrain plan` makes of a bare model; with ACCO, too."""
    folders = CONFIGS / "runs", CONFIGS / "runs/baselines", *(CONFIGS.parent / "examples").iterdir()
    shipped = [path for folder in folders for path in folder.glob("*.json")]
    runs = {path.stem: run for path in shipped if "deepspeed" in (run := json.loads(path.read_text()))}
    runs["planned"] = default_run("planned", json.loads((CONFIGS / "models/llama-1b.json").read_text()), None)
    assert {"8b", "moe-30b-a3b", "quickstart", "diloco", "planned"} <= runs.keys()
    for name, run in runs.items():
        assert accumulates_in_fp32(run["deepspeed"]), name
    for name in ("125m", "1b", "8b", "70b"):
        run, cluster = pair(name, "four-regions-ssh")
        worker, architecture = cluster.regions[0].workers[0], run.architecture
        least = 4 * parameter_count(architecture) / (run.parallel.tensor * run.parallel.pipeline)
        for acco in (None, {"form": "delayed"}):
            assert rank_memory(changed(run, acco=acco), architecture, worker)["gradients"] >= least


def test_models_have_their_published_sizes() -> None:
    sizes = {
        path.stem: parameter_count(architecture_from_hf(json.loads(path.read_text())))
        for path in (CONFIGS / "models").glob("*.json")
    }
    assert sizes["llama-8b"] == 8_030_261_248
    assert sizes["llama-8b-128k"] == sizes["llama-8b"]
    assert sizes["llama-70b"] == 70_553_706_496
    assert sizes["llama-1b"] == 1_235_814_400
    assert sizes["qwen3-0.6b"] == 596_049_920
    assert sizes["qwen3-30b-a3b"] == 30_532_122_624
    experts = architecture_from_hf(json.loads((CONFIGS / "models/qwen3-30b-a3b.json").read_text()))
    assert 3.3e9 < active_parameter_count(experts) < 3.4e9, "A3B: what a token meets, embeddings included"
    assert 0.12e9 < sizes["llama-125m"] < 0.14e9


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda p: p.stem)
def test_clusters_are_what_they_say(path: Path) -> None:
    cluster = load_cluster(path)
    assert cluster.name == path.stem
    for region in cluster.regions:
        if cluster.emulate_links or cluster.global_ssh:
            assert link_to_global(cluster, region.name).gbps > 0


@pytest.mark.parametrize(
    ("run", "cluster"),
    [("quickstart", c) for c in LOCAL]
    + [("quickstart-moe", "local-two-regions-moe"), ("moe-30b-a3b", "four-regions-ssh")]
    + [(r, c) for r in ("125m", "1b", "8b", "long-8b", "70b") for c in LARGE],
)
def test_the_dry_run_of_every_pair(run: str, cluster: str) -> None:
    begin = time.process_time()
    found = dry_run.needs(*pair(run, cluster))
    assert time.process_time() - begin < 20.0
    assert found.parameters == sum(count for _, count in found.fragments)
    for worker in found.workers:
        assert sum(worker.memory.values()) < 80e9, worker.name  # of an 80 GB accelerator
        assert worker.parameters_per_rank * worker.ranks >= found.parameters


@pytest.mark.parametrize(
    ("run", "cluster", "layouts"),
    [
        ("quickstart", "local-two-regions", {"TP 2 × PP 1 × DP 1, ZeRO 1", "TP 1 × PP 1 × DP 2, ZeRO 1"}),
        ("quickstart-moe", "local-two-regions-moe",
         {"TP 2 + sequence × PP 1 × DP 1, ZeRO 1", "TP 1 × PP 1 × DP 2 (EP 2), ZeRO 1"}),
        ("long-8b", "four-regions-ssh", {"TP 2 + sequence × PP 1 × CP 4 × DP 4, ZeRO 1"}),
    ],
)  # fmt: skip
def test_the_dry_run_names_each_workers_layout(run: str, cluster: str, layouts: set[str]) -> None:
    assert {w.layout for w in dry_run.needs(*pair(run, cluster)).workers} == layouts


def test_bytes_of_an_exchange() -> None:
    run, cluster = pair("quickstart", "local-wan")
    found = dry_run.needs(run, cluster)
    coded = pytest.approx((1 / 2 + 2 / 128) * found.parameters, rel=1e-3)  # 4 bits, and a scale for each block
    assert [link.up_bytes for link in found.links] == [coded] * 2
    assert found.workers[0].delta_bytes == 4 * found.parameters  # fp32 inside a region
    assert found.links[0].up_s == pytest.approx(8 * found.links[0].up_bytes / 0.2e9)
    assert found.links[0].steps_between == run.outer.local_steps * (run.outer.rule.updates_per_send or 0)
    overlap = OverlapConfig.model_validate({"steps": 2, "late": "continue", "adopt": "rebase"})
    outer = OuterConfig(overlap=overlap)  # of its default rule, whose answers wait in so short a run
    short = dry_run.needs(run.model_copy(update={"outer": outer}), cluster)
    assert short.links[0].steps_between == outer.local_steps
    large = dry_run.needs(*pair("70b", "four-regions-ssh"))
    assert large.links[0].up_bytes < 0.6 * large.parameters  # 4 bits and scales


def test_verifications_take_the_share_that_is_stated() -> None:
    run, cluster = pair("70b", "four-regions-ssh")
    first = dry_run.needs(run, cluster).workers[0]
    replicas = first.ranks // run.parallel.replica_ranks
    micro_batches = (first.verified_jobs or 0) * run.outer.local_steps * run.samples_per_step / replicas
    # Two of one micro-batch alone, which each of four stages waits for.
    assert 2 * 4 / micro_batches == pytest.approx(run.monitor.verified_share)
    assert first.saved_bytes == 8 * first.host_memory["checkpoint"]
    off = run.model_copy(update={"monitor": run.monitor.model_copy(update={"verified_share": 0.0})})
    assert dry_run.needs(off, cluster).workers[0].verified_jobs is None


def test_shards_that_leave_something_out_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from geotrain.parallelism import local_parameters

    run, _ = pair("quickstart", "local-wan")
    whole = local_parameters.local_parameters
    monkeypatch.setattr(local_parameters, "local_parameters", lambda *a: whole(*a)[1:])
    with pytest.raises(AssertionError, match="the ranks speak for"):
        dry_run.check_shards(parameter_map_of(run), run, run.parallel)


SMALL = {f"regions__{i}__workers__0__deepspeed": {"train_micro_batch_size_per_gpu": 4} for i in (0, 1)}


@pytest.mark.parametrize(
    ("run", "cluster", "message"),
    [
        ({"data__train_samples": 9601}, {}, "train_samples = 9601 is not a multiple .* use 9600"),
        ({"data__train_samples": 9584, "outer__rule": {"name": "sync"}}, {}, "= 256 samples; use 9472"),
        ({"data__rampup_batch_size": (16, 8, 99)}, {}, "from 16 in steps of 8 nothing grows to the whole"),
        ({"data__rampup_batch_size": (4, 5, 99)}, {}, "from 4 in steps of 5 nothing grows"),
        ({"data__rampup_batch_size": (1, 3, 99)}, {}, "a batch of 1 samples is no multiple of .* data-para"),
        ({"data__rampup_batch_size": (8, 8, 24)}, SMALL,
         r"of deepspeed.train_batch_size = 16, from data.rampup_batch_size = \[8, 8, 24\] on; use 7672"),
        ({"data__rampup_batch_size": (8, 8, 32), "outer__rule": {"name": "sync"}}, SMALL,
         "256 samples, from .* on; use 7648"),
        ({}, {"regions__0__workers__0__deepspeed": {"train_batch_size": 32}},
         "'eu-0': .* = 32 differs from the run's 16"),
        ({}, {"regions__0__workers__0__parallel": {"tensor": 3}}, "worker 'eu-0': parallel: tensor 3 .* 2 ranks"),
        ({}, {"regions__0__ssh": "far"}, "the server of 'eu' runs on far, by ssh: its address 127.0.0.1:0 must be"),
        ({}, {"global_ssh": "far"}, "the server of 'global' runs on far"),
        ({}, {"emulate_links": True}, "`links` has no link between 'eu' and 'global'"),
    ],
)  # fmt: skip
def test_what_does_not_go_together(run: dict[str, Any], cluster: dict[str, Any], message: str) -> None:
    base_run, base_cluster = pair("quickstart", "local-two-regions")
    with pytest.raises(ConfigError, match=message):
        check_together(changed(base_run, **run), changed(base_cluster, **cluster))


HOST = {"host": "a", "slots": 8}


@pytest.mark.parametrize(
    ("region", "message"),
    [
        ({}, "a region needs workers, or hosts"),
        ({"hosts": [{**HOST, "device": "h100"}]}, "device 'h100' is not among `devices`: h200"),
        ({"hosts": [{**HOST, "region": "mars"}]}, "no region is called 'mars'"),
        ({"hosts": [HOST], "offers": {"h100": {}}}, "region 'eu': offers.h100 is no kind among `devices`: h200"),
        (
            {"hosts": [HOST], "offers": {"h200": {"preemptions_per_hour": 0.1}}},
            "offers.h200.preemptions_per_hour without spot_usd_per_hour",
        ),
        ({"hosts": [HOST], "offers": {"h200": {"quota": 0}}}, r"offers.h200.quota = 0: Input should be"),
    ],
)
def test_inventories_that_make_no_sense(region: dict[str, Any], message: str) -> None:
    devices = {"h200": {"memory_gb": 141.0, "tflops": 989.0}}
    with pytest.raises(ConfigError, match=message):
        parse(ClusterConfig, {"name": "c", "regions": [{"name": "eu", **region}], "devices": devices}, "c.json")


def test_a_link_is_described_once() -> None:
    links = [{"regions": ends, "gbps": 1.0} for ends in (["eu", "global"], ["global", "eu"])]
    with pytest.raises(ConfigError, match="links: eu – global is there twice"):
        parse(ClusterConfig, {"name": "c", "regions": [{"name": "eu", "hosts": [HOST]}], "links": links}, "c.json")


@pytest.mark.parametrize("name", ["global", "launcher", "operator", "wan"])
@pytest.mark.parametrize("of", ["region", "worker"])
def test_names_of_other_processes_are_refused(name: str, of: str) -> None:
    worker = {"name": name if of == "worker" else "w", "hosts": [HOST]}
    region = {"name": name if of == "region" else "r", "workers": [worker]}
    with pytest.raises(ConfigError, match=f"no region or worker may be called '{name}'"):
        parse(ClusterConfig, {"name": "c", "regions": [region]}, "c.json")


def test_emulated_links_are_for_one_machine() -> None:
    run, cluster = pair("quickstart", "local-wan")
    address = {"host": "far", "port": 1}
    far = changed(cluster, regions__1__ssh="far", regions__1__server=address)
    with pytest.raises(ConfigError, match="emulate_links = true is for runs on one machine, but the server of 'us'"):
        check_together(run, far)


def test_an_order_survives_the_wire() -> None:
    order = LaunchRequest(*pair("70b", "four-regions-ssh"), sites=("asia",), resume=True)
    assert LaunchRequest.from_line(order.to_line()) == order
    assert order.to_line().count(b"\n") == 1
    with pytest.raises(ConfigError, match="no valid request"):
        LaunchRequest.from_line(b"Last login: today\n")
