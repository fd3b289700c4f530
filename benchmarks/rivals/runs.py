"""One run of a method over the emulated link, and what its marks say."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.rivals.methods import OUTER
from benchmarks.rivals.site import FIRST_PORT, Site, marks, site, start_trainers, wait_until
from benchmarks.rivals.task import BATCH, LENGTH, LOCAL_STEPS, RATE, REGIONS, Task, load, new_model, save
from geotrain.commands.export import export_run
from geotrain.data.corpus import documents

TEXT_BYTES, VALIDATION_SAMPLES, VALIDATED_AT_ONCE = 4_000_000, 512, 64
CLOSE_S = 60.0
AFTER_S = 10.0  # what is watched after a fault is over
CUT_S = 20.0
NO_LINK = (10.0, 0.2)  # Gbit/s, ms


@dataclass(frozen=True)
class Setting:
    """gbps, rtt_ms: of the link. steps: of each worker that are trained over it, of `schedule_steps`. alone_steps: as
    in `Task`. first: steps that are not timed. step_s: of a step without communication, the same for all methods of a
    call, by which the link was set; 0: the run's own. rate: as in `Task`."""

    gbps: float
    rtt_ms: float
    steps: int
    schedule_steps: int
    alone_steps: int
    first: int = 0
    patience_s: float = 120.0
    step_s: float = 0.0
    rate: float = RATE


def prepare(folder: Path, seeds: int) -> Path:
    """Text as bytes, and the weights that all methods begin with. Returns the data's file."""
    text = np.frombuffer("".join(documents(TEXT_BYTES)).encode(), np.uint8)
    samples = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
    samples = samples[np.random.default_rng(0).permutation(len(samples))]
    np.savez(folder / "text.npz", validation=samples[:VALIDATION_SAMPLES], train=samples[VALIDATION_SAMPLES:])
    for seed in range(seeds):
        save(new_model(seed=seed).named_parameters(), folder / f"start-{seed}.safetensors")
    return folder / "text.npz"


def task_of(method: str, folder: Path, data: Path, setting: Setting, seed: int, place: Site) -> Task:
    ports = [FIRST_PORT + i for i in range(3)]
    steps = (setting.steps, setting.schedule_steps, setting.alone_steps)
    return Task(method, str(folder), str(data), *steps, seed, place.addresses, ports, setting.rate)


def train(method: str, folder: Path, data: Path, setting: Setting, seed: int, rivals: Path | None) -> dict[str, Any]:
    """A whole run. Returns its figures, or {"fault": why there are none}."""
    folder.mkdir()
    with site(folder, setting.gbps, setting.rtt_ms) as place:
        start_trainers(place, task_of(method, folder, data, setting, seed, place), rivals)
        if fault := wait_until(place, lambda: _told(folder, "begin"), setting.patience_s, "training began"):
            return {"fault": fault}
        before = place.processor_s()
        if fault := wait_until(place, lambda: _told(folder, "end"), setting.patience_s, "training ended"):
            return {"fault": fault}
        after = place.processor_s()
        used = {name: after[name] - before.get(name, 0.0) for name in after}
        if fault := wait_until(place, lambda: _told(folder, "closed"), setting.patience_s, "trainers ended"):
            return {"fault": fault}
        if method in OUTER and (fault := wait_until(place, lambda: not _serving(place), CLOSE_S, "servers ended")):
            return {"fault": fault}
    found = figures(folder, setting) | processor_figures(folder, used, setting.steps)
    return found | {"busy": found["processor_ms"] / found["step_ms"]}


def step_s_alone(folder: Path, data: Path, steps: int) -> float:
    """Seconds of a step without communication, both regions at once. Raises RuntimeError if they did not train."""
    found = train("alone", folder, data, Setting(*NO_LINK, steps=1, schedule_steps=steps, alone_steps=steps), 0, None)
    if "fault" in found:
        raise RuntimeError(f"training without communication: {found['fault']}")
    return float(found["alone_step_ms"]) / 1e3


def figures(folder: Path, setting: Setting) -> dict[str, Any]:
    """Figures of one run over the link, means over the regions; `__main__` lists them."""
    utilization, still, byte_counts, step_s, alone_s = [], [], [], [], []
    for region in REGIONS:
        told = marks(folder, region)
        (begin,), (end,) = ([m for m in told if m["what"] == what] for what in ("begin", "end"))
        steps = [m for m in told if m["what"] == "step"]
        timed = steps[setting.first :]
        since = steps[setting.first - 1] if setting.first else begin
        wall_s = end["at_s"] - since["at_s"]
        alone = median(s for m in told if m["what"] == "alone" for s in m["seconds"])
        seconds = wall_s / len(timed)
        utilization.append((setting.step_s or alone) / seconds)
        still.append(1 - (timed[-1]["thread_s"] - since["thread_s"]) / wall_s)
        first_bytes = begin["bytes"]
        byte_counts.append((end["bytes"] - first_bytes) / (len(steps) * BATCH * LENGTH))
        step_s.append(seconds)
        alone_s.append(alone)
    return {
        "utilization": mean(utilization),
        "standing_still": mean(still),
        "bytes_per_token": mean(byte_counts),
        "step_ms": 1e3 * mean(step_s),
        "alone_step_ms": 1e3 * mean(alone_s),
    }


def processor_figures(folder: Path, used: dict[str, float], steps: int) -> dict[str, float]:
    """Processor time, which other programs do not disturb as they do times. processor_ms: of a step of one worker,
    everything counted that runs for it, its part of servers too. processor_alone_ms: of a step without
    communication."""
    alone = [m["cpu_s"] for region in REGIONS for m in marks(folder, region) if m["what"] == "alone"]
    share = 1e3 / (steps * len(REGIONS))
    parts = {"trainers": 0.0, "servers": 0.0}
    for name, seconds in used.items():
        parts["trainers" if name.startswith("train") else "servers"] += seconds * share
    found = {"processor_ms": sum(parts.values()), "processor_alone_ms": 1e3 * mean(alone)}
    return {**found, **{f"processor_{part}_ms": ms for part, ms in parts.items()}}


def losses(method: str, folder: Path, data: Path) -> dict[str, Any]:
    """loss: validation loss of the weights that a user would export. curve: (seconds, loss) of the first region's
    weights on the way."""
    told = marks(folder, REGIONS[0])
    begin_s = next(m["at_s"] for m in told if m["what"] == "begin")
    at_s = {m["number"]: m["at_s"] - begin_s for m in told if m["what"] == "step"}
    end_s = next(m["at_s"] for m in told if m["what"] == "end") - begin_s
    final = folder / "final.safetensors"
    if method in OUTER:
        export_run(folder / "run", folder / "export", "float32")
        final = folder / "export" / "model.safetensors"
    steps = sorted(int(path.stem.split("-")[1]) for path in folder.glob("after-*.safetensors"))
    model = new_model()
    curve = [(at_s[n], validation(model, folder / f"after-{n}.safetensors", data)) for n in steps[:-1]]
    loss = validation(model, final, data)
    return {"loss": loss, "curve": [*curve, (end_s, loss)], "steps": [*steps[:-1], len(at_s)]}


def validation(model: Any, weights: Path, data: Path) -> float:
    import torch

    load(model, weights)
    tokens = torch.from_numpy(np.load(data)["validation"]).long()
    with torch.no_grad():
        return mean(float(model(input_ids=part, labels=part).loss) for part in tokens.split(VALIDATED_AT_ONCE))


def time_to(curve: list[tuple[float, float]], target: float) -> float | None:
    """Seconds until the curve first comes to the loss, interpolated between its points; None: it does not."""
    for (at, loss), (next_at, next_loss) in pairwise(curve):
        if next_loss <= target:
            share = 0.0 if loss <= target else (loss - target) / (loss - next_loss)
            return at + share * (next_at - at)
    return None


def faulted(
    method: str, what: str, folder: Path, data: Path, setting: Setting, rivals: Path | None
) -> dict[str, Any]:
    """A run in which the second region is killed and started again at once (what = "kill"), or its link is cut for
    CUT_S ("cut"). It is ended when enough was seen.

    lost_s: of a region: the time that was watched less what its steps in that time took before. back_s: until the
    killed region's next step.
    """
    folder.mkdir()
    with site(folder, setting.gbps, setting.rtt_ms) as place:
        start_trainers(place, task_of(method, folder, data, setting, 0, place), rivals)
        trained = 1.5 * LOCAL_STEPS
        if fault := wait_until(
            place,
            lambda: all(_steps(folder, r) >= trained for r in REGIONS),
            setting.patience_s,
            f"{trained:g} steps were trained",
        ):
            return {"fault": fault}
        at_s = time.monotonic()
        if what == "cut":
            place.cut(CUT_S)
            time.sleep(CUT_S)
        else:
            victims = [name for name in place.processes if name.endswith(REGIONS[1])]
            place.kill(*victims)
            for name in victims:
                place.again(name, *(("--resume",) if name.startswith("server") else ()))
            if fault := wait_until(
                place, lambda: _is_back(folder, REGIONS[1]), setting.patience_s, "it trained again"
            ):
                return {"fault": fault}
        over_s = time.monotonic()
        if fault := wait_until(place, lambda: time.monotonic() > over_s + AFTER_S, 2 * AFTER_S, "time passed"):
            return {"fault": fault}
        until_s = time.monotonic()
    found: dict[str, Any] = {}
    for region in REGIONS:
        told = marks(folder, region)
        ends = [m["at_s"] for m in told if m["what"] == "step"]
        begin_s = next(m["at_s"] for m in told if m["what"] == "begin")
        before, during = [t for t in ends if t <= at_s], [t for t in ends if at_s < t <= until_s]
        usual_s = (before[-1] - begin_s) / len(before)
        found[f"lost_s.{region}"] = max(0.0, until_s - at_s - usual_s * len(during))
        around = [at_s, *during, until_s]
        found[f"longest_pause_s.{region}"] = max(b - a for a, b in pairwise(around))
        if what == "kill" and region == REGIONS[1]:
            last_begin_s = [m["at_s"] for m in told if m["what"] == "begin"][-1]
            found["back_s"] = next(t for t in during if t > last_begin_s) - at_s
    shutil.rmtree(folder / "run", ignore_errors=True)
    return found


def _told(folder: Path, what: str) -> bool:
    return all(any(m["what"] == what for m in marks(folder, region)) for region in REGIONS)


def _steps(folder: Path, region: str) -> int:
    return sum(m["what"] == "step" for m in marks(folder, region))


def _is_back(folder: Path, region: str) -> bool:
    """Whether a region that was killed has trained a step of its next incarnation."""
    told = [m["what"] for m in marks(folder, region)]
    return told.count("begin") > 1 and told[-1] == "step"


def _serving(place: Site) -> bool:
    return any(p.poll() is None for name, p in place.processes.items() if not name.startswith("train"))
