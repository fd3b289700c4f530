"""The device of a rank is watched by NVML, and a driver that fails or hangs keeps nobody."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from geotrain.common.device_state import DeviceState, numbers_of_worker
from geotrain.config import load_cluster, load_run
from geotrain.monitor.events import FAILED_MARK, DeviceFailed, DeviceSampled, Record, Trouble
from geotrain.outer.metrics import WORKER_METRICS
from geotrain.worker import device_watch
from geotrain.worker.connection import connected
from geotrain.worker.device_watch import EVERY_S, DeviceWatch
from tests.support.nvml import Nvml
from tests.support.process_trees import until

CONFIGS = Path(__file__).parents[2] / "configs"
WITHIN_S = 60.0
ADDRESS = "00000001:00:00.0"
CUDA = torch.device("cuda", 0)


class Watched(DeviceWatch):
    """Device 1, with what was said of it."""

    def __init__(self, nvml: Nvml) -> None:
        self.nvml, self.now_s, self.samples = nvml, 0.0, list[DeviceState]()
        self.failed, self.blind = list[tuple[str, str]](), list[str]()
        said = lambda *what: self.failed.append(what), self.blind.append, self.samples.append
        super().__init__(CUDA, *said, ADDRESS, lambda: self.now_s)

    def becomes(self, **fields: object) -> bool:
        return until(lambda: all(getattr(self(), name) == value for name, value in fields.items()), WITHIN_S)


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(device_watch, "EVERY_S", 0.02)
    watched = Watched(Nvml(tmp_path, monkeypatch))
    yield watched
    watched.nvml.go_on()
    watched.stop()
    assert until(lambda: not watched.thread.is_alive(), WITHIN_S)


def test_a_device_is_read_again_and_again(watch: Watched) -> None:
    assert watch.becomes(busy=0.97)
    assert watch() == DeviceState(0.97, 1.98e9, 650.0, 61.0, 4194304.0, 0.0, 0.0)
    watch.nvml.say({"1.busy": 40, "1.megahertz": 1200, "1.slowed": 0x44, "1.nvlink": 7, "0.busy": 1})
    assert watch.becomes(busy=0.4, slowed="power limit, heat (hardware)", nvlink_errors=21.0)
    assert str(watch()) == (
        "40% busy, 1.2e+09 Hz, 650 W, 61 °C, 4.19e+06 bytes in use, 0 uncorrectable memory errors, 21 NVLink errors, "
        "slowed by power limit, heat (hardware)"
    )
    assert watch.failed == [] and watch.samples[0].busy == 0.97


def test_what_a_device_does_not_know_is_left_out(watch: Watched) -> None:
    unknown = ("PowerUsage", "TotalEccErrors", "FieldValues", "CurrentClocksThrottleReasons")
    watch.nvml.say({f"nvmlDeviceGet{name}.error": 3 for name in unknown} | {"nvmlEventSetWait_v2.error": 3})
    assert watch.becomes(busy=0.97, power_w=None, ecc_errors=None, nvlink_errors=None)
    assert watch().numbers().keys() == {"busy", "clock_hz", "celsius", "memory_bytes", "slowed", "xids"}


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ({"1.ecc": 2}, "its memory has had 2 uncorrectable errors since its last reset"),
        ({"system.xid": 79}, "its driver logged Xid 79"),
        ({"nvmlDeviceGetUtilizationRates.error": 15}, "NVML says: GPU is lost"),
        ({"nvmlDeviceGetTemperature.error": 16}, "NVML says: GPU requires restart"),
    ],
)
def test_a_device_that_is_not_fit_is_told_once(watch: Watched, answers: dict[str, int], told: str) -> None:
    assert watch.becomes(busy=0.97)
    watch.nvml.say(answers)
    assert until(lambda: watch.failed, WITHIN_S)
    watch.nvml.say({"system.xid": 31})  # of a program
    assert until(lambda: 31 in watch.xids, WITHIN_S)
    assert watch.failed == [(ADDRESS, told)]


def test_a_driver_that_hangs_keeps_nobody_and_is_told(watch: Watched) -> None:
    assert watch.becomes(busy=0.97)

    def later() -> str:
        watch.now_s += EVERY_S
        return watch().unwatched

    watch.nvml.say({"nvmlDeviceGetPowerUsage.hang": 1})
    assert until(lambda: later() == "its driver does not answer", WITHIN_S)
    assert watch().numbers() == {} and "97% busy, " in str(watch())
    assert watch.blind == ["its driver does not answer"]
    watch.nvml.go_on()
    assert watch.becomes(unwatched="")


@pytest.mark.parametrize(
    ("symbol", "error", "told"),
    [
        ("nvmlInitWithFlags", 18, "NVML says: RM has detected an NVML/RM version mismatch."),
        ("nvmlDeviceGetHandleByPciBusId_v2", 6, "NVML says: Not Found"),
    ],
)
def test_why_a_device_is_not_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, symbol: str, error: int, told: str
) -> None:
    nvml = Nvml(tmp_path, monkeypatch)
    nvml.say({f"{symbol}.error": error})
    watch = Watched(nvml)
    assert watch.becomes(unwatched=told) and watch.blind == [told]


def test_devices_of_other_makers_and_processors_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DeviceWatch(torch.device("cpu"), print, print)() == DeviceState()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    told = list[str]()
    assert DeviceWatch(CUDA, print, told.append)() == DeviceState(unwatched="NVML reads NVIDIA's devices only")
    assert told == ["NVML reads NVIDIA's devices only"]


def test_the_devices_of_a_worker_together() -> None:
    hot = DeviceState(0.5, 1e9, 300.0, 80.0, 2.0, 1.0, 5.0, "heat", (31,))
    cool = DeviceState(1.0, 2e9, 400.0, 50.0, 3.0, None, 6.0)
    assert numbers_of_worker([hot, cool, DeviceState(), hot._replace(unwatched="its driver hangs")]) == {
        "device_busy": 0.75, "device_clock_hz": 1e9, "device_power_w": 700.0, "device_celsius": 80.0,
        "device_memory_bytes": 3.0, "device_ecc_errors": 1.0, "device_nvlink_errors": 11.0, "device_slowed": 1.0,
        "device_xids": 1.0,
    }  # fmt: skip
    assert numbers_of_worker([hot]).keys() <= WORKER_METRICS.keys()


def test_a_device_that_is_not_fit_is_in_the_workers_log_and_in_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    nvml, told = Nvml(tmp_path, monkeypatch), list[str]()
    nvml.say({"0.ecc": 1})
    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x17, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: place)
    config = load_run(CONFIGS / "runs/quickstart.json").model_copy(update={"folder": str(tmp_path)})
    cluster = load_cluster(CONFIGS / "clusters/local-two-regions.json")
    with connected(config, cluster, cluster.workers[0][1], trouble=told.append) as member:
        watch = member.watch_device(CUDA, 3)
        assert until(lambda: told and watch().busy, WITHIN_S)
        member.device_failed(1, "cuda:1", "its results are wrong")  # as who compares them says
    (log,) = (tmp_path / "events").iterdir()
    events = [record.event for record in map(Record.from_line, log.read_text().splitlines()) if record is not None]
    failed, wrong = [event for event in events if isinstance(event, DeviceFailed)]
    assert (wrong.rank, wrong.device, wrong.what) == (1, "cuda:1", "its results are wrong")
    assert (failed.rank, failed.device) == (3, "00000000:17:00.0") and "has had 1 uncorrectable" in failed.what
    marked = capfd.readouterr().err.partition(FAILED_MARK)[2].splitlines()[0]
    assert json.loads(marked) == asdict(failed) and told == [
        event.what for event in events if isinstance(event, Trouble)
    ]
    assert [event.numbers["ecc_errors"] for event in events if isinstance(event, DeviceSampled)] == [1.0]
