"""A user's files in, a report and a picture out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.studies.loss_curve import draw, loss_curve
from geotrain.commands.simulate import WhatIf, question, report_text, simulate
from geotrain.config import ConfigError, OuterConfig

ROOT = Path(__file__).parents[2]
RUN, CLUSTER = ROOT / "configs/runs/125m.json", ROOT / "configs/clusters/local-wan.json"


def test_a_report_says_hours_bytes_and_who_waits(tmp_path):
    picture = tmp_path / "report.png"
    report = simulate(RUN, CLUSTER, step_s={"eu-0": 2.0, "us-0": 3.0}, picture=picture)
    samples = json.loads(RUN.read_text())["data"]["train_samples"]
    steps = samples / json.loads(RUN.read_text())["deepspeed"]["train_batch_size"]
    assert report["compute_bound_hours"] == pytest.approx(steps / (1 / 2 + 1 / 3) / 3600, rel=0.001)
    assert 1 < report["hours"] / report["compute_bound_hours"] < 1.2
    assert report["simulated_share"] == 1 and report["lost_updates"] == 0
    parts = [worker["tokens_per_s"] for worker in report["workers"].values()]
    assert sum(parts) == pytest.approx(report["tokens_per_s"]) and parts[0] == pytest.approx(1.5 * parts[1], rel=0.1)
    assert picture.read_bytes()[:4] == b"\x89PNG"
    text = report_text(report)
    assert f"{report['hours']:.2f} h" in text and "us up" in text


def test_what_if():
    now = simulate(RUN, CLUSTER, step_s=0.5, what_if=WhatIf(updates_per_send=32))
    finer = simulate(RUN, CLUSTER, step_s=0.5, what_if=WhatIf(updates_per_send=2, codec="topk2"))
    sparser = simulate(RUN, CLUSTER, step_s=0.5, what_if=WhatIf(local_steps=64))
    alone = simulate(RUN, CLUSTER, step_s=0.5, what_if=WhatIf(without="us"))

    def wide(report) -> int:
        return report["links"]["eu up"]["messages"]

    assert wide(finer) > 4 * wide(now)
    per_message = {r: x["links"]["eu up"]["gigabytes"] / wide(x) for r, x in (("now", now), ("finer", finer))}
    assert per_message["finer"] < 0.7 * per_message["now"]
    assert sparser["links"]["eu local up"]["messages"] < 0.2 * now["links"]["eu local up"]["messages"]
    assert alone["hours"] > 1.8 * now["hours"] and "us up" not in alone["links"]


def test_a_long_run_is_extrapolated(tmp_path, monkeypatch):
    # of whose middle half goes on: some thirty exchanges of each region
    monkeypatch.setattr("geotrain.simulate.forecast.MAX_UPDATES", 300)
    short = simulate(RUN, CLUSTER, step_s=1.0)
    monkeypatch.setattr("geotrain.simulate.forecast.MAX_UPDATES", 100)
    shorter = simulate(RUN, CLUSTER, step_s=1.0)
    monkeypatch.undo()
    whole = simulate(RUN, CLUSTER, step_s=1.0)
    assert short["simulated_share"] < 0.25
    assert short["hours"] == pytest.approx(whole["hours"], rel=0.05)
    # So few jobs that answers would wait, and K count for nothing, were the whole run like that.
    assert shorter["exchanges"]["eu"] == pytest.approx(whole["exchanges"]["eu"], rel=0.2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "names no device"),  # from which the planner would predict a step
        ({"step_s": 1.0, "tflops": 100.0}, "either step_s .* or tflops"),
        ({"step_s": {"eu-0": 1.0}}, "worker 'us-0' needs the seconds"),
        ({"step_s": 1.0, "what_if": WhatIf(without="mars")}, "cannot leave out region 'mars'; regions: eu, us"),
        ({"step_s": 1.0, "what_if": WhatIf(codec="int3")}, "up.name"),
    ],
)
def test_bad_questions(arguments, message):
    with pytest.raises(ConfigError, match=message):
        simulate(RUN, CLUSTER, **arguments)


def test_a_loss_curve_is_of_what_was_trained(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.studies.loss_curve.STEPS", 40)
    rounds = WhatIf(local_steps=16)  # of two workers: one round of 32 steps, and the rest is not trained

    def curve(run: Path) -> list[dict[str, float]]:
        return loss_curve(*question(run, CLUSTER, step_s=1.0, what_if=rounds))

    fair = ROOT / "configs/runs/baselines/diloco-fair.json"
    points = curve(fair)
    draw(points, "fair", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"
    last = points[-1]
    assert last["share"] == 32 / 40 and last["loss"] < 5.55
    monkeypatch.setattr("benchmarks.studies.loss_curve.STEPS", 24)
    with pytest.raises(ConfigError, match="24 steps are fewer than one round of 2 workers with local_steps = 16"):
        curve(fair)


def test_a_cluster_without_links_is_refused(tmp_path):
    cluster = json.loads(CLUSTER.read_text())
    cluster["links"] = cluster["links"][:1]
    cluster["emulate_links"] = False
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(cluster))
    with pytest.raises(ConfigError, match="no link between region 'us' and 'global'"):
        simulate(RUN, path, step_s=1.0)


def test_a_codec_is_tried_both_ways() -> None:
    outer = WhatIf(codec="int8").apply(OuterConfig())
    assert (outer.up.name, outer.down.name, outer.local.name) == ("int8", "int8", "fp32")
