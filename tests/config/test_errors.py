"""Errors of a wrong run file: the key, its value, the rule, and what to write instead."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from geotrain.config import ClusterConfig, ConfigError, OuterConfig, load_cluster, load_run, parse

SYNC, HALOS = {"name": "sync"}, {"name": "halos"}
MOST = "Input should be less than or equal to 9007199254740992"


def told(outer: dict[str, Any]) -> list[str]:
    """The lines about this `outer` block, without the heading."""
    with pytest.raises(ConfigError) as error:
        parse(OuterConfig, outer, "run.json")
    heading, *lines = str(error.value).split("\n")
    assert heading == "run.json: not a valid OuterConfig"
    return [line.removeprefix("  ") for line in lines]


@pytest.mark.parametrize(
    ("outer", "line"),
    [
        ({"levls": 2}, "levls: unknown key; did you mean 'levels'?"),
        ({"rule": {"name": "hallos"}}, "rule.name = \"hallos\": did you mean 'halos'?"),
        ({"rule": {"name": "x"}}, 'rule.name = "x": known: sync, halos, region_momentum'),
        ({"rule": {"lr": 1.0}}, 'rule.name: this key is required; known: sync, halos, region_momentum'),
        ({"rule": {**HALOS, "legder": True}}, "rule.legder: unknown key; did you mean 'ledger'?"),
        ({"rule": {**SYNC, "lr": -1.0}}, "rule.lr = -1.0: Input should be greater than 0"),
        ({"fragments": {"pieces": 1 << 63}}, f"fragments.pieces = {1 << 63}: {MOST}"),
        ({"rollbacks_per_hour": 1 << 63}, f"rollbacks_per_hour = {1 << 63}: {MOST}"),
        ({"local_steps": 10**6}, "local_steps = 1000000: Input should be less than or equal to 100000"),
        ({"rule": {**SYNC, "lr": float("inf")}}, "rule.lr = Infinity: Input should be a finite number"),
        (
            {"rule": {**HALOS, "global": {"lr_per_update": 1.0, "bta": 0.5, "beta": 0.5, "buffer": 1}}},
            "rule.global.bta: unknown key; did you mean 'beta'?",
        ),
        ({"up": {"name": "int4", "block": 100}}, "up.block = 100: Input should be 32, 64, 128"),
        ({"up": "int4"}, 'up = "int4": write {"name": "int4"}'),
        ({"rule": "x"}, 'rule = "x": write {"name": …}; known: sync, halos, region_momentum'),
        ({"fragments": 3}, "fragments = 3: Input should be an object"),
    ],
)  # fmt: skip
def test_faults_inside_unions_are_told_like_any_other(outer: dict[str, Any], line: str) -> None:
    (found,) = told(outer)
    assert found.startswith(line)


def test_a_rule_by_its_name_alone_says_what_to_write() -> None:
    (found,) = told({"rule": "sync"})
    assert 'rule = "sync": write {"name": "sync"}; ' in found


@pytest.mark.parametrize(
    ("outer", "line"),
    [
        ({"rule": {**HALOS, "lr": 0.7}}, 'rule.lr: a setting of "sync", not of this one; leave it out'),
        ({"rule": {**SYNC, "gain": 1.0}}, 'rule.gain: a setting of "region_momentum", not of this one'),
        ({"up": {"name": "fp32", "density": 0.1}}, 'up.density: a setting of "topk2", not of this one'),
        ({"up": {"name": "int4", "density": 0.1}}, 'up.density: a setting of "topk2", not of this one'),
        ({"rule": SYNC, "lease_reserve": 2}, "lease_reserve: without effect with rule 'sync'"),
        ({"levels": 1, "local": {"name": "bf16"}}, "local: without effect with levels = 1"),
        ({"levels": 1, "lease_reserve": 2}, "lease_reserve: without effect with levels = 1"),
        ({"levels": 1, "rule": {**HALOS, "updates_per_send": 8, "merge_alpha": 1.0}},
         "rule.updates_per_send, rule.merge_alpha: without effect with levels = 1"),
        ({"levels": 1, "rule": {**HALOS, "ledger": False}}, "rule.ledger: without effect with levels = 1"),
        ({"levels": 1, "rule": {"name": "region_momentum", "gain": 2.0, "momentum_share": 0.2}},
         "rule.gain, rule.momentum_share: without effect with levels = 1"),
        ({"rule": {"name": "region_momentum", "answers": "merged", "updates_per_send": 2}},
         "rule.updates_per_send: without effect with rule.answers = 'merged'"),
        ({"rule": {"name": "region_momentum", "answers": "wait"}}, "rule.answers = 'wait' needs overlap.steps > 0"),
        ({"overlap": {"mix": 0.25}}, "mix = 0.25 does nothing with adopt = 'replace'; leave it out, or adopt 'mix'"),
    ],
)  # fmt: skip
def test_a_setting_without_effect_is_an_error(outer: dict[str, Any], line: str) -> None:
    (found,) = told(outer)
    assert line in found


def test_every_default_may_be_written_down() -> None:
    for outer in ({}, {"levels": 1}, {"rule": SYNC}, {"rule": HALOS, "levels": 1}):
        whole = parse(OuterConfig, outer, "r").model_dump(by_alias=True, mode="json")
        assert parse(OuterConfig, whole, "r") == parse(OuterConfig, outer, "r")


def a_cluster(**changes: Any) -> dict[str, Any]:
    host = {"host": changes.pop("host", "h"), "slots": 1}
    worker = {"name": "w", "hosts": [host], "env": changes.pop("env", {})}
    region = {"name": "eu", "workers": [worker], **changes.pop("region", {})}
    return {"name": "c", "regions": [region], **changes}


OPTION = "-oProxyCommand=touch /tmp/x"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        *(
            (changes, key)
            for bad in (OPTION, "", "-h", "a b", "a;b", "$(x)", "a\nb", "a'b", "é", "a" * 256)
            for changes, key in (
                ({"global_ssh": bad}, "global_ssh"),
                ({"region": {"ssh": bad}}, "regions.0.ssh"),
                ({"host": bad}, "regions.0.workers.0.hosts.0.host"),
                ({"global_server": {"host": bad}}, "global_server.host"),
                ({"region": {"server": {"host": bad}}}, "regions.0.server.host"),
                ({"region": {"hosts": [{"host": bad, "slots": 1}]}}, "regions.0.hosts.0.host"),
            )
        ),
        ({"global_ssh": "-l@host"}, "global_ssh"),
        ({"global_ssh": "me@-oX"}, "global_ssh"),
        ({"host": "me@host"}, "regions.0.workers.0.hosts.0.host"),
        *(({"env": {bad: "1"}}, "regions.0.workers.0.env") for bad in ("-u", "A B", "A=B", "", "1A", "A\n")),
    ],
)
def test_hosts_and_environment_keys_are_names_and_nothing_else(changes: dict[str, Any], key: str) -> None:
    """They stand in command lines, where "-oProxyCommand=…" is an option."""
    with pytest.raises(ConfigError, match="(?s)" + re.escape(key) + r".*must be a (host|variable)'s name"):
        parse(ClusterConfig, a_cluster(**changes), "cluster.json")


@pytest.mark.parametrize("host", ["h", "n-1.example.org", "10.0.0.1", "::1", "[fe80::1%eth0]", "GPU_7"])
def test_names_and_addresses_are_taken(host: str) -> None:
    region = {"ssh": f"me.too@{host}", "server": {"host": host}}
    made = parse(ClusterConfig, a_cluster(host=host, region=region, env={"NCCL_DEBUG": "-x $y"}), "cluster.json")
    assert made.regions[0].server.host == host.strip("[]")  # which stand in front of a port only
    assert made.regions[0].ssh == f"me.too@{host.strip('[]')}"


@pytest.mark.parametrize(
    ("pattern", "hosts"),
    [
        ("gpu[01-04]", "gpu01 gpu02 gpu03 gpu04"),
        ("gpu[8-10].eu", "gpu8.eu gpu9.eu gpu10.eu"),
        ("gpu[098-100,7]", "gpu098 gpu099 gpu100 gpu7"),
        ("r[1-2]n[01,3]", "r1n01 r1n3 r2n01 r2n3"),
        ("n[5]", "n5"),
        ("n[0-1][0-1]", "n00 n01 n10 n11"),
    ],
)
def test_patterns_of_hosts_name_each_of_them(pattern: str, hosts: str) -> None:
    region = {"hosts": [{"host": pattern, "slots": 8}]}
    made = parse(ClusterConfig, a_cluster(host=pattern, region=region), "cluster.json")
    for found in (made.regions[0].hosts, made.workers[0][1].hosts):
        assert " ".join(each.host for each in found) == hosts
    assert {each.slots for each in made.regions[0].hosts} == {8}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(
            (changes, "alone: a server's port stands in `port`, ssh's in ~/.ssh/config")
            for bad in ("gpu01:22", "10.0.0.1:7600", "[::1]:7600")
            for changes in (
                {"global_ssh": f"me@{bad}"},
                {"host": bad},
                {"global_server": {"host": bad}},
                {"global_server": {"bind": bad}},
            )
        ),
        *(({"host": bad}, "ascending ranges in its brackets") for bad in ("n[04-01]", "n[a-b]", "n[]")),
        *(({"host": bad}, "at most 65536 hosts") for bad in ("n[0-999999999]", "n[0-999][0-999]")),
        ({"global_server": {"host": "n[1-2]"}}, "must be a host's name or address"),
        ({"host": "n[1-"}, "a pattern as gpu[01-04,7]"),
        ({"host": "n[1]]"}, "a pattern as gpu[01-04,7]"),
        ({"host": "::1::"}, "must be a host's name or address"),
        ({"global_server": {"host": "0.0.0.0"}}, "reaches no machine from another: write it as `bind`"),
    ],
)
def test_what_is_no_host_says_what_to_write(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse(ClusterConfig, a_cluster(**changes), "cluster.json")


CONFIGS = Path(__file__).parents[2] / "configs"
RUN, CLUSTER = CONFIGS / "runs/quickstart.json", CONFIGS / "clusters/local-wan.json"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"seed":', '"seed": 1, "seed":', "not JSON: the key 'seed' stands twice in one object"),
        ('"data": {', '"data": {"train_samples": 1, ',
         "not JSON: the key 'train_samples' stands twice in one object"),
        ('"train": "', '"train": "~/', r'run.json: data.train = "~/.*": only a shell replaces'),
        ('"train": "', '"train": "$HOME/', r'run.json: data.train = "\$HOME/.*": only a shell replaces'),
        ('"config": "', '"config": "~/', r'run.json: model.config = "~/.*": only a shell replaces'),
    ],
)  # fmt: skip
def test_a_run_file_whose_text_would_mean_something_else(tmp_path: Path, old: str, new: str, words: str) -> None:
    text = RUN.read_text()
    assert text.count(old) == 1
    (tmp_path / "run.json").write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match=words):
        load_run(tmp_path / "run.json")


def test_run_and_cluster_file_that_are_given_in_each_others_place() -> None:
    with pytest.raises(ConfigError, match="has 'regions': the run file comes first"):
        load_run(CLUSTER)
    with pytest.raises(ConfigError, match="has 'model': the run file comes first"):
        load_cluster(RUN)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("data.train=~/x",), '--set: data.train = "~/x": only a shell replaces'),
        (("data.skip=[[5, 4]]",), "skip: [5, 4] is no range of samples: state [first, last], both below"),
        (("data.skip=[[0, 7680]]",), "skip: [0, 7680] is no range of samples"),
        (("data.skip=[[-1, 4]]",), "data.skip.0.0 = -1: Input should be greater than or equal to 0"),
        (("data.skip=[[0, 3]]", 'outer.rule={"name": "sync"}'), "data.skip: a synchronous rule needs each worker's"),
        (('data.train=[{"prefix": "a"}, {"prefix": "a"}]',), "twice; name it once, with a larger weight"),
        (("parallel.pipeline=2", "parallel.stage_layers=[4]"), "stage_layers lists 1 stages, pipeline = 2"),
        (("monitor.validate_every_samples=1000",), "is below 4 times data.validation_samples = "),
    ],
)
def test_a_setting_of_the_command_line_that_makes_no_run(settings: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_run(RUN, settings)
