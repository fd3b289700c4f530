"""What is to change in a run that is on: today's inventory against what trains, with its speeds as measured."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from geotrain.commands.change_regions import with_regions
from geotrain.commands.operate import LiveRun
from geotrain.commands.serve import regions_added
from geotrain.config import ClusterConfig, ConfigError, OuterConfig, load_cluster, parse
from geotrain.parameters.parameter_map import parameter_map_of
from geotrain.plan.inventory import Pins
from geotrain.plan.live import as_measured, changes
from geotrain.plan.planner import Plan
from geotrain.plan.predict import predict
from tests.support import small_runs
from tests.support.net_worlds import BUSY_S
from tests.support.plan_cases import changed, inventory, planned, small_run

HOSTS = {"a": [(8, "d")] * 2, "b": [(8, "d")], "c": [(8, "d")]}


def told(plan: Plan, today: ClusterConfig, slower: dict[str, float]) -> dict[str, tuple[str, str]]:
    """Region → what is to change there, and why. slower: worker → how many times as long its steps take."""
    predicted = predict(plan.run, plan.cluster).workers
    step_s = {name: w.step_s * slower.get(name, 1.0) for name, w in predicted.items()}
    pins = Pins(recompute=plan.run.model.recompute, outer=frozenset(OuterConfig.model_fields))
    again = planned(plan.run, as_measured(plan.run, plan.cluster, today, step_s, {}, "a"), pins)
    return {change.region: (change.what, change.why) for change in changes(plan.cluster, again)}


def test_what_changes_with_hosts_quotas_prices_and_measured_speeds() -> None:
    before = inventory({name: HOSTS[name] for name in "ab"})
    plan = planned(small_run(), before)
    assert {what for what, _ in told(plan, before, {}).values()} == {"keep"}
    grown = told(plan, inventory(HOSTS), {})
    assert [what for what, _ in grown.values()] == ["keep", "keep", "add"]
    assert grown["c"][1].startswith("8 × d: ") and grown["c"][1].endswith("tokens/s for 8.00 USD/h")

    def quota(raw: dict[str, Any]) -> None:
        raw["regions"][0]["offers"] = {"d": {"quota": 8}}

    fewer = told(plan, changed(before, quota), {})
    assert fewer["a"][0] == "move" and fewer["a"][1].startswith("not a-1: "), fewer
    assert told(plan, inventory({"a": HOSTS["a"]}), {})["b"] == ("drop", "is not in the inventory")
    weak = told(plan, before, {"b-0": 40.0})
    assert weak["a"][0] == "keep"
    assert weak["b"] == ("drop", "dearer a token, or costs more in loss than its tokens gain")


def test_measured_speeds_are_of_a_kind_or_of_a_region() -> None:
    cluster = inventory(HOSTS)
    plan = planned(small_run(), cluster)
    step_s = {name: 1.25 * w.step_s for name, w in plan.prediction.workers.items()}
    one = as_measured(plan.run, plan.cluster, cluster, {**step_s, "c-0": 4 * step_s["c-0"]}, {}, "a")
    assert set(one.devices) == {"d", "d.c"}
    assert one.devices["d"].efficiency == pytest.approx(0.5 / 1.25)
    assert one.devices["d.c"].efficiency == pytest.approx(0.5 / 5)
    assert {host.device for host in one.region("c").hosts} == {"d.c"}
    assert {host.device for host in one.region("a").hosts} == {"d"}
    assert as_measured(plan.run, plan.cluster, cluster, {}, {}, "a").devices == cluster.devices


def test_links_have_the_rate_of_their_fastest_second() -> None:
    """At least; and no more where one message takes longer than two."""
    cluster = inventory(HOSTS)
    plan = planned(small_run(), cluster)
    message = plan.prediction.regions["b"].up_bytes / len(parameter_map_of(plan.run).group_numel)

    def gbps(peak: float) -> list[float]:
        found = as_measured(plan.run, plan.cluster, cluster, {}, {"a": peak / 3, "b": peak, "c": 0}, "a")
        return [link.gbps for link in found.links if set(link.regions) in ({"a", "b"}, {"a", "c"}, {"a"})]

    stated = gbps(0.0)  # inside a; between a, where the global server is, and b; and c
    assert stated == [100.0, 1.0, 1.0]
    assert gbps(message / 2.5) == [100.0, pytest.approx(8e-9 * message / 2.5), 1.0]
    assert gbps(0.9 * message) == [100.0, pytest.approx(max(1.0, 8e-9 * 0.9 * message)), 1.0]
    assert gbps(1e10) == [100.0, 80.0, 1.0]


def folder_of(tmp_path: Path, change: Any = lambda raw: None) -> LiveRun:
    files = small_runs.write_files(tmp_path, "live", 100, {"eu": [1]}, {"rule": {"name": "region_momentum"}})
    run, cluster = (json.loads(path.read_text()) for path in files)
    change(run if change.__name__ == "of_run" else cluster)
    (tmp_path / "live").mkdir()
    for name, raw in (("run", run), ("cluster", cluster)):
        (tmp_path / "live" / f"{name}.json").write_text(json.dumps(raw))
    return LiveRun(tmp_path / "live")


def of_run(raw: dict[str, Any]) -> None:
    raw["outer"] |= {"rule": {"name": "sync"}}


def far_away(raw: dict[str, Any]) -> None:
    raw |= {"global_ssh": "far", "global_server": {"host": "far", "port": 7000}}


def more_workers(raw: dict[str, Any]) -> None:
    raw["regions"][0]["workers"].append({**raw["regions"][0]["workers"][0], "name": "eu-1"})


@pytest.mark.parametrize(
    ("now", "wanted", "words"),
    [
        (of_run, None, r"regions join a live run whose rule is asynchronous"),
        (far_away, None, r"its global server is on far, .* apply it there"),
        (None, more_workers, r"regions.eu.workers: eu-1: others than in the run"),
        (more_workers, None, r"regions.eu.workers: fewer: others than in the run"),
    ],
)
def test_what_cannot_change_in_a_live_run(tmp_path: Path, now: Any, wanted: Any, words: str) -> None:
    none = lambda raw: None  # noqa: E731
    run = folder_of(tmp_path, now or none)
    other = folder_of(tmp_path / "other" if not (tmp_path / "other").mkdir() else tmp_path, wanted or none)
    with pytest.raises(ConfigError, match=words):
        with_regions(run, other.cluster)


def test_a_region_brings_its_device_and_its_link_and_changes_no_others(tmp_path: Path) -> None:
    def has_link(raw: dict[str, Any]) -> None:
        raw["links"] = [{"regions": ["eu", "global"], "gbps": 1.0}]

    def more(raw: dict[str, Any]) -> None:
        hosts = [{"host": "localhost", "slots": 1, "device": "d"}]
        raw["regions"].append({"name": "us", "workers": [{"name": "us-0", "hosts": hosts}]})
        raw["devices"] = {"d": {"memory_gb": 80, "tflops": 900}}
        raw["links"] = [{"regions": [name, "global"], "gbps": 2.0} for name in ("eu", "us")]

    (tmp_path / "other").mkdir()
    now = folder_of(tmp_path, has_link)
    grown = with_regions(now, folder_of(tmp_path / "other", more).cluster)
    assert [(*link.regions, link.gbps) for link in grown.links] == [("eu", "global", 1.0), ("us", "global", 2.0)]
    assert grown.regions[0] == now.cluster.regions[0] and grown.region("us").workers[0].hosts[0].device == "d"


def test_a_server_takes_regions_more_and_nothing_else(tmp_path: Path) -> None:
    served = inventory({"a": HOSTS["a"]})
    path = tmp_path / "cluster.json"
    newest = regions_added(path)
    assert newest(served) is served, "there is no file"

    def named(*names: str) -> ClusterConfig:
        regions = [{"name": name, "workers": [{"name": f"{name}-0"}]} for name in names]
        return parse(ClusterConfig, {"name": "live", "regions": regions}, "live")

    served = named("a", "b")
    for cluster, taken in ((named("a"), False), (named("a", "c"), False), (named("a", "b", "c"), True)):
        path.write_text(cluster.model_dump_json(by_alias=True))
        assert (newest(served) is not served) == taken
    path.write_text("{")
    assert newest(served) is served


@pytest.mark.long("geotrain/commands", "geotrain/net/server", "launch")
@pytest.mark.slow
def test_a_region_joins_a_live_run_and_another_leaves_it(tmp_path: Path) -> None:
    """Processes. Before, the global server, or its shards, knew the regions of their start only."""
    small_runs.prepare_text(tmp_path)
    run, cluster = small_runs.write_files(
        tmp_path, "live", 4000, {"eu": [1]}, {"rule": {"name": "region_momentum"}, "fragments": {"pieces": 2}},
        min_step_s=0.1, shards=2,
    )  # fmt: skip
    folder, wanted = tmp_path / "live", tmp_path / "wanted.json"

    def geotrain(*arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "geotrain", *map(str, arguments)]
        return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def top(seen: Any) -> dict[str, Any]:
        return {"members": {}, "committed_samples": 0, **seen.statuses.get("global", {})}

    first = geotrain("launch", run, cluster)
    raw = json.loads(cluster.read_text())
    us = {**raw["regions"][0], "name": "us", "workers": [{**raw["regions"][0]["workers"][0], "name": "us-0"}]}
    began: list[subprocess.Popen[str]] = [first]
    try:
        while not (folder / "cluster.json").exists():
            assert first.poll() is None
        live = LiveRun(folder)
        live.wait(lambda seen: top(seen)["committed_samples"] > 0, BUSY_S)
        wanted.write_text(json.dumps({**raw, "regions": [*raw["regions"], us]}))
        began.append(geotrain("launch", folder, wanted, "--apply"))
        seen = LiveRun(folder).wait(lambda s: top(s)["members"].get("us", {}).get("updates", 0) > 1, BUSY_S)
        eu = seen.statuses["eu"]["members"]["eu-0"]
        assert (eu["restarts"], top(seen)["members"]["eu"]["joined"]) == (0, True)
        assert set(load_cluster(folder / "cluster.json").sites) == {"global", "eu", "us"}
        wanted.write_text(json.dumps({**raw, "regions": [us]}))
        drained = geotrain("launch", folder, wanted, "--apply")
        assert "drop eu: " in drained.communicate(timeout=BUSY_S)[0] and drained.returncode == 0
        live = LiveRun(folder)
        live.wait(lambda s: bool(top(s)["members"].get("eu", {}).get("left")), BUSY_S)
        live.steer("stop")
        for process in began:
            said = process.communicate(timeout=BUSY_S)[0]
            assert process.returncode == 0, said
    finally:
        for process in began:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(BUSY_S)
        shutil.rmtree(folder / "data", ignore_errors=True)
