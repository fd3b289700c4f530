"""What a worker is formed of, from what its hosts answer: a fake clock, and answers that the test gives."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from geotrain.common.files import OutputError
from geotrain.config import ConfigError, RestartConfig, load_cluster, load_run
from geotrain.launch import forming as forming_module
from geotrain.launch.forming import Forming, cordon, cordoned, formed_here, without_cordoned
from geotrain.launch.supervisor import ProcessSpec, Supervisor, guarded
from geotrain.monitor.events import FAILED_MARK, ProcessDied, Trouble, WorkerFormed
from geotrain.outer.events import Event
from geotrain.plan.inventory import PlanError
from tests.support.process_trees import marked, new_mark, until
from tests.support.small_runs import write_files

HOSTS = ("a", "b", "c", "d")


class Site:
    """Workers of one region on these hosts, two ranks on each. lost: hosts that do not answer."""

    def __init__(
        self, folder: Path, *hosts: str, spare: tuple[str, ...] = (), back_s: float = 60.0, launcher: str = "ssh"
    ) -> None:
        self.lost, self.now_s, self.asked, self.folder = set[str](), 0.0, list[str](), folder
        ssh = {"launcher": launcher, "hosts": [{"host": host, "slots": 2} for host in hosts]}
        files = write_files(folder, "run", 64, {"eu": [2, 2]}, {"rule": {"name": "halos"}}, first=ssh)
        raw = json.loads(files[1].read_text())
        raw["restart"] = {"host_back_s": back_s, "window_s": 600.0}
        raw["regions"][0]["spare_hosts"] = [{"host": host, "slots": 2} for host in spare]
        raw["regions"][0]["workers"][1].update(ssh, hosts=[{"host": "z", "slots": 2}])
        files[1].write_text(json.dumps(raw))
        self.run, self.cluster = load_run(files[0]), load_cluster(files[1])
        self.taken: dict[str, str] = {}

    def worker(self, number: int = 0) -> Forming:
        def answer(worker: Any, host: str) -> str:
            self.asked.append(host)
            return "no answer" if host in self.lost else ""

        region, worker = self.cluster.workers[number]
        return Forming(self.run, self.cluster, self.folder, region, worker, self.taken, lambda: self.now_s, answer)


def hosts(forming: Forming) -> list[str]:
    return [host.host for host in forming.formed.hosts]


def started_again(forming: Forming, host: str = "", lived_s: float = 1000.0) -> list[str]:
    """Let the worker die, and start it again; returns its hosts then."""
    forming.again(host, lived_s, "failed")
    assert until(forming.ready, 30.0)
    forming.take()
    return hosts(forming)


def asked_to_end(forming: Forming) -> bool:
    """Whether the running worker is asked to end its job, once all that was begun is known."""

    def looked() -> bool:
        forming.look()
        return forming._finding is None

    return until(looked, 30.0) and forming.ending


def test_a_worker_does_without_a_lost_host_and_grows_back(tmp_path: Path) -> None:
    site = Site(tmp_path, *HOSTS[:2])
    forming = site.worker()
    assert started_again(forming) == ["a", "b"] and not forming.events and forming.formed == forming.configured
    site.lost.add("b")
    forming.again()
    assert until(forming.ready, 30.0) and forming.leaves("b") and not forming.leaves("a") and not forming.leaves("")
    forming.take()
    # As many samples a step, by more accumulation.
    assert hosts(forming) == ["a"] and forming.formed.ranks == 2
    assert forming.formed.deepspeed["train_micro_batch_size_per_gpu"] in (1, 2)
    (event,) = forming.events
    assert isinstance(event, WorkerFormed) and event.hosts == ["a"] and event.why == "without b: no answer"
    assert formed_here(tmp_path)["eu-0"] == {"hosts": ["a"], "layout": event.layout, "why": event.why}
    site.asked.clear()
    assert not asked_to_end(forming) and not site.asked  # not before its time
    site.now_s += 61
    assert not asked_to_end(forming) and site.asked == ["b"]
    site.lost.clear()
    site.now_s += 61
    assert asked_to_end(forming) and hosts(forming) == ["a"]
    assert started_again(forming) == ["a", "b"] and forming.formed == forming.configured
    assert not forming.ending and not formed_here(tmp_path)
    site.lost.add("b")
    assert started_again(forming) == ["a"]
    site.lost.clear()
    site.now_s += 119
    assert not asked_to_end(forming)  # lost twice: twice as long
    site.now_s += 2
    assert asked_to_end(forming)


def test_a_spare_host_takes_the_place_of_a_lost_one(tmp_path: Path) -> None:
    site = Site(tmp_path, "a", "b", spare=("s", "t"))
    first, second = site.worker(), site.worker(1)
    site.lost.update("az")
    assert started_again(first) == ["s", "b"]  # in its place: ranks of b keep their numbers
    assert first.formed.parallel == first.configured.parallel
    assert started_again(second) == ["t"] and site.taken == {"s": "eu-0", "t": "eu-1"}
    site.lost = {"s", "z"}
    site.now_s += 1000.0
    assert started_again(first) == ["a", "b"] and site.taken == {"t": "eu-1"}


def test_two_workers_do_not_take_the_same_spare_host(tmp_path: Path) -> None:
    site = Site(tmp_path, "a", "b", spare=("s",))
    first, second = site.worker(), site.worker(1)
    site.lost.update("az")
    for forming in (first, second):
        forming.again()
    assert until(first.ready, 30.0) and first.take() and hosts(first) == ["s", "b"]
    assert until(lambda: second.ready() or bool(second.events), 30.0)
    assert isinstance(second.events[0], Trouble) and not second.ready()


def test_a_cordoned_host_is_left_at_a_jobs_end_and_at_a_launch(tmp_path: Path) -> None:
    site = Site(tmp_path, *HOSTS[:2])
    forming = site.worker()
    cordon(tmp_path, "a", "a fan is loud")
    assert asked_to_end(forming) and not site.asked
    assert started_again(forming) == ["b"] and site.asked == ["b"]
    again = site.worker()  # of a launcher that was started anew
    assert hosts(again) == ["b"] and "without a: cordoned: a fan is loud" in again.events[0].why  # type: ignore[attr-defined]
    cordon(tmp_path, "a", None)
    assert asked_to_end(again) and started_again(again) == ["a", "b"]
    cordon(tmp_path, "b", "a disk is slow")  # and the worker ends by itself
    assert started_again(again) == ["a"]
    with ThreadPoolExecutor(8) as pool:  # an operator's and a launcher's at once
        deque(pool.map(lambda host: cordon(tmp_path, host, "again"), [*HOSTS[2:], *"efgh", *HOSTS[:2]]), maxlen=0)
    assert cordoned(tmp_path) == dict.fromkeys("abcdefgh", "again")
    with pytest.raises(PlanError, match="worker 'eu-0': all its hosts are cordoned"):
        without_cordoned(site.run, site.cluster, tmp_path)
    (tmp_path / "spare").mkdir()
    spare = Site(tmp_path / "spare", "a", spare=("b", "s"))
    used = without_cordoned(spare.run, spare.cluster, tmp_path)
    assert [[host.host for host in worker.hosts] for _, worker in used.workers] == [["s"], ["z"]]
    with pytest.raises(ConfigError, match=r"worker 'eu-0': cordoned: .*: no host is left"):
        site.worker()
    assert not asked_to_end(again) and isinstance(again.events[-1], Trouble)
    assert "stays as it is" in again.events[-1].what


def test_where_nobody_knows_who_is_cordoned_what_was_known_stays(tmp_path: Path) -> None:
    site = Site(tmp_path, *HOSTS[:2])
    forming = site.worker()
    cordon(tmp_path, "a", "a fan is loud")
    assert asked_to_end(forming) and started_again(forming) == ["b"]
    (tmp_path / "cordoned.json").write_text('{"a": "a fan')
    forming.events.clear()
    for _ in range(2):
        assert not asked_to_end(forming)
    (said,) = forming.events
    assert isinstance(said, Trouble) and "nobody knows which hosts are out of use" in said.what
    assert started_again(forming) == ["b"]
    for refused in (site.worker, lambda: cordon(tmp_path, "b", "x"), lambda: cordon(tmp_path, "b", None)):
        with pytest.raises(ConfigError, match=r"cordoned\.json: cannot be read, so that nobody knows"):
            refused()
    with pytest.raises(ConfigError, match="nobody knows"):
        without_cordoned(site.run, site.cluster, tmp_path)


def test_a_host_with_a_broken_device_is_cordoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, said = Site(tmp_path, *HOSTS[:2]), tmp_path / "logs/eu-0.1.log"
    said.parent.mkdir()
    broken = {"worker": "eu-0", "rank": 2, "host": "node7", "device": "0000:3B:00.0", "what": "Xid 79"}
    said.write_text(f"of an earlier launch: {FAILED_MARK}{json.dumps({**broken, 'rank': 0})}\n")
    forming = site.worker()
    assert not asked_to_end(forming)
    with said.open("a") as log:
        print(f"{FAILED_MARK}{json.dumps(broken)}", file=log)
    with monkeypatch.context() as full:
        full.setattr(forming_module, "write_whole", Mock(side_effect=OutputError("no space")))
        assert not asked_to_end(forming)
    forming._next_s = 1e9  # a broken device does not wait for the next look at hosts
    assert asked_to_end(forming) and cordoned(tmp_path) == {"b": "device 0000:3B:00.0: Xid 79"}
    assert started_again(forming) == ["a"]


@pytest.mark.parametrize(
    "words",
    ["srun: error: n1: tasks 0-1: Exited with exit code 1", "pdsh@home: b: ssh exited with exit code 137"],
)
def test_a_command_that_waits_for_ranks_of_a_lost_host_is_stopped(tmp_path: Path, words: str) -> None:
    site = Site(tmp_path, *HOSTS[:2], launcher="slurm" if "srun" in words else "pdsh")
    (tmp_path / "logs").mkdir()
    (said := tmp_path / "logs/eu-0.log").write_text(f"{words}\n")  # of an earlier launch
    forming = site.worker()
    for line, stopped in (("srun: error: Couldn't load plugin mpi/pmix", False), (words, True)):
        said.write_text(f"{said.read_text()}{line}\n")
        looks = [forming.look()]
        for later_s in (4.0, 2.0):  # it may still end by itself
            site.now_s += later_s
            looks.append(forming.look())
        assert looks == [False, False, stopped]
    assert forming.look() and len(forming.events) == 1  # said once
    started_again(forming)
    assert not forming.look()


def test_a_host_that_ends_its_worker_twice_at_its_start_is_lost(tmp_path: Path) -> None:
    forming = Site(tmp_path, *HOSTS[:2]).worker()
    assert started_again(forming, "a", 5.0) == ["a", "b"]
    assert started_again(forming, "b", 5.0) == ["a", "b"]
    assert started_again(forming, "b", 500.0) == ["a", "b"]
    assert started_again(forming, "b", 5.0) == ["a", "b"]
    assert started_again(forming, "b", 5.0) == ["a"]
    assert forming.events[-1].why == "without b: failed"  # type: ignore[attr-defined]


def test_a_worker_waits_for_a_host_and_then_leaves_the_run(tmp_path: Path) -> None:
    site = Site(tmp_path, *HOSTS[:2])
    forming = site.worker()
    site.lost.update(HOSTS)

    def waits(done: Callable[[], bool]) -> bool:
        def passes() -> bool:
            site.now_s += 5.0
            return done()

        return until(passes, 30.0)

    forming.again()
    assert until(lambda: forming.ready() or bool(forming.events), 30.0) and not forming.ready()
    site.lost.clear()
    assert waits(forming.ready) and forming.take() == forming.configured
    site.lost.update(HOSTS)
    forming.again()
    assert waits(forming.ready)
    with pytest.raises(ConfigError, match=r"worker 'eu-0' leaves the run: no host is left: a: no answer; b"):
        forming.take()
    assert len(forming.events) == 2


LIVES = """
case $(cat lives) in
x) echo 'pdsh@home: b: ssh exited with exit code 255'; exec sleep 1000 ;;
xx) until [ -e hosts/eu-0.end ]; do sleep 0.05; done; exit 76 ;;
esac
"""
HANGS = "trap '' TERM; touch hangs; while :; do sleep 0.1; done"


def test_a_supervisor_forms_its_worker_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By real processes. A rank fails, and the command goes on; what is left of a connection to the lost host hangs;
    the host comes back."""
    monkeypatch.setattr(forming_module, "FAILED_S", 0.2)
    monkeypatch.chdir(tmp_path)
    site, told, mark = Site(tmp_path, *HOSTS[:2], back_s=0.2, launcher="pdsh"), list[Event](), new_mark()
    (tmp_path / "hosts").mkdir()

    def answer(worker: Any, host: str) -> str:
        return "no answer" if host == "b" and (tmp_path / "lives").read_text() == "x" else ""

    forming = Forming(site.run, site.cluster, tmp_path, *site.cluster.workers[0], {}, probe=answer)

    def processes() -> list[ProcessSpec]:
        hosts = forming.take().hosts
        (tmp_path / "hosts/eu-0.end").unlink(missing_ok=True)
        with (tmp_path / "lives").open("a") as lives:
            lives.write("x")
        common: dict[str, Any] = {"respawn": processes, "group": "eu-0", "formation": forming, "env": mark}
        made = [ProcessSpec("eu-0", guarded(("bash", "-c", LIVES)), **common)]
        if not told:
            made.append(ProcessSpec("eu-0.1", guarded(("bash", "-c", HANGS), grace_s=1000.0), host="b", **common))
        return made[: len(hosts)]

    with Supervisor(tmp_path / "logs", restart=RestartConfig(first_s=0.05), on_event=told.append) as running:
        for process in processes():
            running.start(process)
        assert until((tmp_path / "hangs").exists)
        deadline_s = time.monotonic() + 120.0
        outcome = running.wait(lambda: None if time.monotonic() < deadline_s else pytest.fail(str(told)))
        assert outcome.code == 0 and until(lambda: marked(mark) == [])
    assert [event.hosts for event in told if isinstance(event, WorkerFormed)] == [["a"], ["a", "b"]]
    assert [event.how for event in told if isinstance(event, ProcessDied)] == ["failed with exit code 143"]
