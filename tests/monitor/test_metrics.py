"""Metrics: what Prometheus reads, and that dashboard and alert rules ask only for what there is."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from geotrain.monitor.board import curves
from geotrain.monitor.events import (
    LivenessChanged,
    MemberSampled,
    ProcessEnded,
    ProcessStarted,
    Record,
    ServerSampled,
    ShardSampled,
    SnapshotWritten,
    WaitsChanged,
)
from geotrain.monitor.history import History
from geotrain.monitor.metrics import ALWAYS, MAX_SAID, NAMESPACE, Metrics, collector
from geotrain.monitor.registry import METRICS, time_shares
from geotrain.outer.events import Joined, UpdateApplied, UpdateRefused, ValidationDone
from geotrain.outer.metrics import WORKER_METRICS
from tests.support.synthetic_events import synthetic_facts

SHIPPED = Path(__file__).parents[2] / "configs" / "monitoring"
PREFIX = f"{NAMESPACE}_"
UPDATE = UpdateApplied(
    "eu", 2, 1, 1, [3, 1, 4], 5, 8, 100, 2.5,
    {"lr": 0.1, "grad_norm": 0.5, "tokens_per_s": 10.0, "mfu": 0.4, "compute_s": 6.0, "communication_s": 3.0,
     "waiting_s": 1.0},
    0.25, 4096,
)  # fmt: skip


def told(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """(name, label values but run and site, sorted) → value, read back by the official parser."""
    text = metrics.route({}).body.decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["run"] == "r" and sample.labels["site"] == "global"
            labels = [v for name, v in sample.labels.items() if name not in ("run", "site")]
            found[(sample.name.removeprefix(PREFIX), *sorted(labels))] = sample.value
    return found


def test_events_become_metrics() -> None:
    metrics = Metrics("r", "global", 8192, {"eu": 0.8})
    sample = MemberSampled("eu", 2.0, 70, 80, 7.0, 8.0, 1, {"pending": 3.0})
    server = ServerSampled(1, 2, 3, 4, 5, 6, 7, 0.5, [3, 1, 4], retries=2, open_leases=9)
    for event in (
        Joined("eu", 0, "x"), LivenessChanged("eu", "paused", 0.0), UPDATE, sample, server, SnapshotWritten(1, 1.5),
        UpdateRefused("eu", "no", 1), UpdateRefused("eu", "no", 2), server,
        ProcessStarted("eu-0", "worker"), ProcessEnded("eu-0", 3), LivenessChanged("us", "cut off", 6.0),
        LivenessChanged("us", "lost", 60.0), LivenessChanged("af", "up", 0.0), LivenessChanged("af", "left", 0.0),
        WaitsChanged([{"what": "lease"}]), ValidationDone("eu", 1, 4, 2.25, 3.0, 4096),
        ShardSampled(1, True, 9, 2, 50, 60), ShardSampled(0, False, 0, 0, 0, 0),
    ):  # fmt: skip
        metrics.on(Record(1000.0, "global", event))
    found = told(metrics)
    wanted: dict[tuple[str, ...], float] = {
        ("member_up", "eu"): 1, ("member_up", "us"): 0, ("member_losses_total", "us"): 1,
        ("member_last_seen_timestamp_seconds", "eu"): 998, ("loss", "eu"): 2.5, ("learning_rate", "eu"): 0.1,
        ("staleness_versions", "eu", "2"): 5, ("delta_norm", "eu", "2"): 0.25, ("committed_tokens",): 4096,
        ("target_tokens",): 8192, ("mfu_ratio", "eu"): 0.4, ("time_share_ratio", "eu", "communication"): 0.3,
        ("link_bytes_total", "eu", "from"): 80, ("link_bytes_per_second", "eu", "to"): 7,
        ("link_capacity_bytes_per_second", "eu"): 1e8, ("refusals_total", "eu"): 2,
        ("member_says", "eu", "pending"): 3,
        ("retries_total",): 2, ("journal_flushes_total",): 14, ("journal_flush_seconds_total",): 1.0,
        ("validation_loss",): 2.25, ("waits",): 1,
        ("open_leases",): 9, ("snapshots_total",): 1, ("snapshot_seconds",): 1.5, ("process_up", "eu-0"): 0,
        ("process_exits_total", "eu-0", "3"): 1, ("fragment_version", "2"): 4, ("disk_free_bytes",): 2,
        ("events_total", "ServerSampled"): 2, ("shard_up", "0"): 0, ("shard_up", "1"): 1, ("shard_facts", "1"): 9,
        ("shard_facts_behind", "1"): 2, ("shard_memory_bytes", "1"): 60,
    }  # fmt: skip
    for (name, *labels), value in wanted.items():
        assert found.get((name, *sorted(labels))) == value, (name, labels)
    assert ("member_up", "af") not in found


def test_a_life_joins_once_however_many_ranks_and_rejoins_it_has() -> None:
    metrics = Metrics("r", "global")
    lives = [("x", 0, True), ("x", 1, False), ("x", 0, False), ("y", 0, True), ("y", 1, False)]
    for incarnation, part, new in lives:
        metrics.on(Record(1000.0, "global", Joined("eu", part, incarnation, new)))
    found = told(metrics)
    assert found["joins_total", "eu"] == 2
    assert found["updates_total", "eu"] == 0  # there from the start: the first update is a rise


def test_a_number_that_a_worker_declares_is_in_every_view() -> None:
    """One declaration (`JobTrained`) is enough: Prometheus, curves and page take it from there."""
    update = replace(UPDATE, metrics={name: 0.5 for name in WORKER_METRICS})
    metrics, page = Metrics("r", "global"), History(synthetic_facts(1, 0.1), "x")
    name = next(iter(page.facts.members))
    for sink in (metrics.on, page.on):
        sink(Record(1000.0, "global", replace(update, member=name)))
    prometheus, (_, drawn), state = told(metrics), curves(update) or (0, {}), page.state(1000.0)
    for field, metric in WORKER_METRICS.items():
        unit = f"_{metric.unit}" if metric.unit else ""
        assert prometheus[f"{metric.name}{unit}", name] == drawn[f"{field}/eu"] == state["members"][0][field] == 0.5
        assert state["facts"]["metrics"]["worker"][field] == [metric.title, metric.unit]


def test_time_shares() -> None:
    assert time_shares({"compute_s": 3.0, "waiting_s": 1.0}) == {"compute": 0.75, "communication": 0, "waiting": 0.25}
    assert time_shares({"loss": 1.0}) == {}


def exposed() -> dict[str, set[str]]:
    """Every name that a query may use → its labels."""
    names: dict[str, set[str]] = {}
    for metric in METRICS:
        (family,) = collector(metric).describe()
        names[family.name + ("_total" if family.type == "counter" else "")] = {*ALWAYS, *metric.labels}
    return names


def names_and_labels(expression: str) -> tuple[set[str], set[str]]:
    """Metrics, and labels in matchers and groupings."""
    bare = re.sub(r'"[^"]*"', '""', expression)
    labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", bare))
    for group in re.findall(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)", bare):
        labels |= {label.strip() for label in group.split(",") if label.strip()}
    return set(re.findall(rf"\b{PREFIX}\w+", bare)), labels


def expressions() -> Iterator[tuple[str, str]]:
    """(where, expression) of everything shipped."""
    for path in sorted(SHIPPED.glob("*.yaml")):
        for group in yaml.safe_load(path.read_text()).get("groups", []):
            for rule in group["rules"]:
                yield f"{path.name}: {rule['alert']}", rule["expr"]
    for path in sorted(SHIPPED.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", []):
                yield f"{path.name}: {panel['title']}", target["expr"]


@pytest.mark.parametrize(("where", "expression"), list(expressions()), ids=lambda v: str(v)[:50])
def test_what_is_shipped_asks_only_for_what_there_is(where: str, expression: str) -> None:
    known = exposed()
    names, labels = names_and_labels(expression)
    assert names, f"{where}: names no metric: {expression}"
    assert names <= set(known), f"{where}: no such metric: {names - set(known)}"
    every = {"run", "site", "job", "instance"}.union(*(known[name] for name in names))
    assert labels <= every, f"{where}: no such label: {labels - every}"
    assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}")


def test_a_region_is_stalled_after_half_an_hour_without_an_update_and_not_before_it_could_send_one(
    tmp_path: Path,
) -> None:
    """Prometheus's own tool evaluates the shipped rule, minute by minute. asia has just joined; us has never sent
    anything; eu stopped sending in minute 40."""
    labels = '{run="r", site="global", member="%s"}'
    up, updates = (f"geotrain_{name}{labels}" for name in ("member_up", "updates_total"))
    series = {
        up % "eu": "1x120", updates % "eu": "0x9 1+1x30 31x80",
        up % "us": "1x120", updates % "us": "0x120",
        up % "asia": "_x49 1x70", updates % "asia": "_x49 0x9 1+1x60",
    }  # fmt: skip
    alerts = {10: [], 29: [], 40: ["us"], 60: ["us"], 100: ["eu", "us"]}
    checks = []
    for minute, stalled in alerts.items():
        for state in ("pending", "firing"):
            there = stalled if state == "firing" else []
            alert = f'alertname="RegionStalled", alertstate="{state}"'
            samples = [{"labels": f'{{member="{member}"}}', "value": 1} for member in there]
            expr = f"sum by (member) (ALERTS{{{alert}}})"
            checks.append({"expr": expr, "eval_time": f"{minute}m", "exp_samples": samples})
    one = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": checks,
    }
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(SHIPPED / "alerts.yaml")], "tests": [one]}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_is_one_that_grafana_loads() -> None:
    dashboard = json.loads((SHIPPED / "grafana-dashboard.json").read_text())
    assert dashboard["uid"] and dashboard["title"] and dashboard["schemaVersion"] >= 36
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    boxes = [panel["gridPos"] for panel in dashboard["panels"]]
    for i, a in enumerate(boxes):
        assert a["x"] >= 0 and a["x"] + a["w"] <= 24
        for b in boxes[:i]:
            beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
            assert beside or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"], (a, b)


def test_names_that_come_with_heartbeats_are_bounded() -> None:
    """A series lives for as long as the process, and another machine chooses the names."""
    metrics = Metrics("r", "global", 8192, {})
    for i in range(50):
        numbers = {"queue": float(i), **{f"{i}-{n}": 1.0 for n in range(31)}}
        metrics.on(Record(1.0, "global", MemberSampled("eu", 2.0, 70, 80, 7.0, 8.0, 1, numbers)))
    said = {key: value for key, value in told(metrics).items() if key[0] == "member_says"}
    assert len(said) == MAX_SAID
    assert said[("member_says", "eu", "queue")] == 49.0
