"""Plan, dry run and simulator tell the same of a run, from one cost model."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import ROOT
from geotrain.commands import dry_run
from geotrain.commands import plan as plan_command
from geotrain.commands.simulate import question, simulate
from geotrain.config import OuterConfig, load_cluster, load_run
from geotrain.launch.terminal import size
from geotrain.plan.model.server_rates import MEASURED
from geotrain.plan.model.servers import place_of, update_s
from geotrain.simulate import forecast as forecast_module
from geotrain.simulate.forecast import forecast_run

WORLD = ROOT / "configs/clusters/world-inventory.json"
PRESETS = sorted(path.stem for path in (ROOT / "configs/runs").glob("*.json") if "quick" not in path.stem)
WITHIN = 0.02
SHORT = ("8b", "moe-30b-a3b")  # dense, and with experts; the others have the same parts
WHOLE = pytest.mark.long("geotrain/plan", "geotrain/simulate", "configs/runs")
NAMES = [pytest.param(name, marks=[] if name in SHORT else WHOLE) for name in PRESETS]


def figures(forecast: dict[str, Any]) -> dict[str, float]:
    """Hours, utilizations, bytes."""
    found = {"hours": forecast["hours"], "utilization": forecast["utilization"]}
    found |= {f"{name} busy": worker["utilization"] for name, worker in forecast["workers"].items()}
    found |= {f"{name} GB": link["gigabytes"] for name, link in forecast["links"].items()}
    return found | {f"server {name}": server["busy"] for name, server in forecast["servers"].items()}


@pytest.mark.parametrize("name", NAMES)
def test_all_tell_the_same_of_a_preset(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast_module, "MAX_UPDATES", 3_000)
    shown: list[tuple[Any, dict[str, Any], Console]] = []
    show = plan_command.show_plan
    monkeypatch.setattr(plan_command, "show_plan", lambda *all_of_it: (shown.append(all_of_it), show(*all_of_it)))
    wide = Console(file=io.StringIO(), width=400)
    monkeypatch.setattr(plan_command, "new_console", lambda: wide)
    out = tmp_path / "planned"
    plan_command.plan(ROOT / f"configs/runs/{name}.json", WORLD, out)
    [(found, planned, _)] = shown
    run, cluster = load_run(out / "run.json"), load_cluster(out / "cluster.json")
    words = io.StringIO()
    dried = dry_run.show_forecast(run, cluster, Console(file=words, width=400))
    simulated = simulate(out / "run.json", out / "cluster.json")
    assert dried is not None
    for other in (dried, simulated):
        assert figures(other) == pytest.approx(figures(planned), rel=WITHIN)
    assert f"{dried['hours']:.2f} h for" in words.getvalue()
    number, unit = re.findall(r"tokens: ([\d.e+]+) (\w+)", wide.file.getvalue())[-1]  # type: ignore[attr-defined]
    fullest = max(sum(parts.values()) for parts in dry_run.needs(run, cluster).hosts.values())
    assert f"needs most memory: {size(fullest)};" in wide.file.getvalue()  # type: ignore[attr-defined]
    hours = float(number) * {"days": 24.0, "hours": 1.0, "minutes": 1 / 60}[unit]
    assert hours == pytest.approx(simulated["hours"], rel=WITHIN)
    # What the planner compares its choices by: where no server is full, and but for the run's ends, at which the
    # slowest worker trains alone.
    predicted = found.prediction
    if max(predicted.server_busy.values()) < 0.9:
        of_ends = 3 * max(worker.job_s for worker in predicted.workers.values()) / 3600
        seconds = predicted.seconds(planned["tokens"])
        assert seconds / 3600 == pytest.approx(planned["hours"], rel=WITHIN, abs=of_ends)


def test_a_servers_shards_divide_its_work_in_the_simulator_too(tmp_path: Path) -> None:
    """Else a plan's own files say another time than the plan: 25 hours and 30."""
    run = load_run(ROOT / "configs/runs/moe-30b-a3b.json", ["data.train_samples=2048000"])
    plan_path = tmp_path / "run.json"
    plan_path.write_text(run.model_dump_json(by_alias=True, exclude_defaults=True))
    plan_command.plan(plan_path, WORLD, tmp_path / "planned")
    files = tmp_path / "planned/run.json", tmp_path / "planned/cluster.json"
    cluster = json.loads(files[1].read_text())
    assert (shards := len(cluster["global_shards"])) >= 8
    _, _, spec = question(*files)
    assert spec.encrypted and 1 / shards <= spec.share < 1.1 / shards
    for region in spec.regions:  # as the cluster file has them
        assert region.share == spec.share and region.local.gbps == {"us-west": 200.0}.get(region.name, 400.0)
        assert all(worker.refresh_s > 0 for worker in region.workers)
    shared = simulate(*files)
    cluster["global_shards"] = []
    for region in cluster["regions"]:
        region["shards"] = []
    files[1].write_text(json.dumps(cluster))
    alone = simulate(*files)
    assert shared["utilization"] > 1.5 * alone["utilization"]
    assert all(server["busy"] > 0.9 for name, server in alone["servers"].items() if name != "global")
    words = io.StringIO()
    dry_run.show_forecast(load_run(files[0]), load_cluster(files[1]), Console(file=words, width=400))
    assert re.search(r"works \d+% of the time: at least [24] shards a server .global_shards", words.getvalue())


def test_encrypted_links_cost_servers_time() -> None:
    """As many nanoseconds a byte, in and out, as measured; bf16 has two bytes a parameter."""
    outer = OuterConfig.model_validate({"rule": {"name": "region_momentum"}, "local": {"name": "bf16"}})
    place, numel = place_of("region", outer, 1), 1e9
    plain, encrypted = (update_s(place, 2 * numel, numel, 2 * numel, MEASURED.over(tls)) for tls in (False, True))
    assert MEASURED.of_byte["tls"] > 0
    assert encrypted - plain == pytest.approx(4 * numel * MEASURED.of_byte["tls"] / 1e9)


@WHOLE
def test_a_long_run_goes_on_as_its_middle_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_command.plan(ROOT / "configs/runs/8b.json", WORLD, tmp_path / "planned")
    files = load_run(tmp_path / "planned/run.json"), load_cluster(tmp_path / "planned/cluster.json")
    predicted = dry_run.predict(*files)
    monkeypatch.setattr(forecast_module, "MAX_UPDATES", 1_000)
    short = forecast_run(*files, predicted)
    monkeypatch.setattr(forecast_module, "MAX_UPDATES", 5_000)
    longer = forecast_run(*files, predicted)
    assert short["simulated_share"] < 0.1 < longer["simulated_share"] < 0.3
    for forecast in (short, longer):
        # The first weights, in fp32, are sent once, however much of the run is played.
        beyond = forecast["links"]["europe down"]["gigabytes"] - forecast["links"]["europe up"]["gigabytes"]
        assert beyond == pytest.approx(32.1, rel=0.25)
    assert short["hours"] == pytest.approx(longer["hours"], rel=0.01)
