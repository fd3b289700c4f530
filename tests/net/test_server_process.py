"""Servers as processes: from a run file and a cluster file to exit codes."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from geotrain.launch.terminal import headline, region_cells
from geotrain.net.server import failure_detector
from geotrain.net.storage.snapshots import read_weights
from geotrain.net.transport import rpc
from geotrain.net.transport.operator_client import command
from geotrain.parameters.initial import initial_tensor
from tests.support.net_worlds import BUSY_S, wait_for
from tests.support.server_processes import Site

Weights = Iterable[tuple[str, torch.Tensor]]
GoOn = Callable[[], bool]


@pytest.fixture
def site(tmp_path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.kill()


def work(site: Site, jobs: int, incarnation: str) -> list[int]:
    """Both workers train that many jobs each. Returns the samples' starts."""
    workers = [site.worker("a", incarnation), site.worker("b", incarnation)]
    for worker in workers:
        worker.join()
    starts = []
    for _ in range(jobs):
        for worker in workers:
            lease = worker.lease()
            assert lease is not None
            worker.train(lease)
            starts.append(lease.start)
    for worker in workers:
        worker.close()
    return starts


def test_workers_that_were_killed_are_shown_as_gone_before_they_miss_a_heartbeat(site):
    """Their connections are closed. The region's row, and the global server's events, say so."""
    site.serve("global"), site.serve("eu")
    work(site, 1, "life-1")  # without a goodbye

    def gone() -> dict[str, Any] | None:
        status = site.status("eu")
        return status if {member["state"] for member in status["members"].values()} == {"cut off"} else None

    status = wait_for(gone)
    assert all(
        member["silent_s"] < failure_detector.MISSED_BEATS * rpc.BEAT_S for member in status["members"].values()
    )
    row = region_cells(site.cluster.region("eu"), {"eu": status, "global": site.status("global")})
    assert (row["workers"], row["tokens/s"], row["state"]) == ("0/2", "–", "up")
    wait_for(
        lambda: any(
            event["event"] == "MemberSampled"
            and (event["metrics"]["workers"], event["metrics"]["lost_workers"]) == (0, 2)
            for event in site.events("global")
        )
    )


def test_a_pause_ends_no_count_and_is_no_death(site):
    top, region = site.serve("global"), site.serve("eu")
    work(site, 3, "life-1")
    links = site.status("eu")["links"]
    model_bytes = 4 * site.parameter_map.numel
    assert links["up_bytes"] > 2 * model_bytes and links["down_bytes"] > 2 * model_bytes
    assert links["up_bytes"] >= links["peak_up_bytes_per_s"] > model_bytes / 4
    above = wait_for(  # not all: some went to the one who asks
        lambda: (
            (counted := site.status("global"))["peers"]["eu"]["received_bytes"] > 0.9 * links["up_bytes"]
            and counted["peers"]["eu"]["sent_bytes"] > 0.9 * links["down_bytes"]
            and counted
        )
    )
    assert abs(above["links"]["up_bytes"] - links["up_bytes"]) < 20_000

    region.send(signal.SIGTERM)  # a pause: region first, so that what is in flight is in its snapshot
    top.send(signal.SIGTERM)
    assert region.ended() == (0, "") and top.ended() == (0, "")
    traffic = [event for event in site.events("eu") if event["event"] == "LinkTraffic"]
    assert sum(event["up_bytes"] for event in traffic) >= links["up_bytes"] and traffic[0]["seconds"] < 60
    assert max(event["peak_up_bytes_per_s"] for event in traffic) >= links["peak_up_bytes_per_s"]
    assert not (site.folder / "global" / "listening.json").exists()

    top, region = site.serve("global", resume=True), site.serve("eu", resume=True)
    before, links = links, site.status("eu")["links"]
    for way in ("up_bytes", "down_bytes", "peak_up_bytes_per_s", "peak_down_bytes_per_s"):
        assert links[way] >= before[way]  # they count from the run's beginning
    # the global server reads its sockets' counts after the region, which may have joined only now
    wait_for(lambda: site.status("global")["peers"]["eu"]["received_bytes"] > 0.9 * links["up_bytes"])
    workers = [site.worker("a", "life-2"), site.worker("b", "life-2")]
    for worker in workers:
        worker.join()
    for server, members in (("global", {"eu"}), ("eu", {"a", "b"})):
        told = site.status(server)["members"]
        assert {told[name]["restarts"] for name in members} == {0}, "all were told to stop"
    for worker in workers:
        worker.close()


def test_a_run_stops_at_its_time_and_says_when(site: Site) -> None:
    """In good order: workers finish what they have, all is written, and both servers end."""
    path, hour_s = site.folder / "run.json", 3600.0
    raw = json.loads(path.read_text())
    for left_s in (hour_s, 0.0):
        ends_s = int(time.time() + left_s)
        path.write_text(json.dumps({**raw, "ends_at": datetime.fromtimestamp(ends_s, UTC).isoformat()}))
        top, region = (site.serve(name, resume=left_s == 0.0) for name in ("global", "eu"))
        if left_s:
            told = site.status("global")
            assert told["ends_s"] == ends_s and "; stops in 59:" in headline(told, told["phase"])
            assert "ends_s" not in site.status("eu") or site.status("eu")["ends_s"] is None
            starts = work(site, 1, "life-1")
            assert site.status("global")["phase"] == "running"
            region.send(signal.SIGTERM)
            top.send(signal.SIGTERM)
            assert region.ended() == (0, "") and top.ended() == (0, "")
    wait_for(lambda: any(e["event"] == "Steered" and e["what"] == "stop" for e in site.events("global")))
    for name in "ab":
        worker = site.worker(name, "life-2")
        worker.join()
        while (lease := worker.lease()) is not None:  # those that were out when the servers were stopped
            worker.train(lease)
            starts.append(lease.start)
        worker.leave()
        worker.close()
    assert region.ended() == (0, "") and top.ended() == (0, "")
    words = json.loads((site.folder / "global/status.json").read_text())
    assert words["phase"] == "ended" and not words["complete"] and "stops in" not in headline(words, "stopped")


def cannot(weights: Weights, go_on: GoOn) -> float:
    raise RuntimeError("nothing to evaluate with")


def goes_on(begun: Path, weights: Weights, go_on: GoOn) -> float:
    begun.touch()
    while go_on():
        time.sleep(0.01)
    raise TimeoutError("there was no time")


def sum_of(weights: Weights, go_on: GoOn) -> float:
    return 3.0 + sum(float(tensor.double().abs().sum()) for _, tensor in weights)


def test_the_final_weights_are_validated_whatever_happens_and_no_failure_ends_a_run(tmp_path):
    site, begun = Site(tmp_path, train_samples=8, validates=True), tmp_path / "begun"

    def all_work(incarnation: str) -> None:
        workers = [site.worker("a", incarnation), site.worker("b", incarnation)]
        for worker in workers:
            worker.join()
        for worker in workers:
            while (lease := worker.lease()) is not None:
                worker.train(lease)
            worker.leave()
            worker.close()

    def told(kind: str) -> list[dict[str, Any]]:
        return [e for e in site.events("global") if e["event"] == kind]

    top, region = site.serve("global", evaluate=cannot), site.serve("eu")
    all_work("life-1")
    assert region.ended() == (0, "") and top.ended()[0] == 0
    assert "final weights are not validated: nothing to evaluate with" in told("Trouble")[-1]["what"]
    assert not told("ValidationDone")

    top, region = site.serve("global", True, evaluate=partial(goes_on, begun)), site.serve("eu", True)
    all_work("life-2")
    wait_for(begun.exists)
    top.process.kill()
    top.ended()
    assert site.serve("global", True, evaluate=sum_of).ended()[0] == 0
    assert region.ended()[0] == 0
    wanted = sum_of(read_weights(site.folder / "global", site.parameter_map), lambda: True)
    assert [e["loss"] for e in told("ValidationDone")] == [pytest.approx(wanted)]
    last = json.loads((tmp_path / "global/status.json").read_text())["validation"]
    assert (last["worker"], last["samples"], last["loss"]) == ("global", 8, pytest.approx(wanted))


def test_what_a_server_says_and_does_without_workers(site):
    """The first weights are on disk before any worker comes; control; a taken port; folders in use."""
    top = site.serve("global")
    wait_for(lambda: (site.folder / "global" / "listening.json").exists())
    for name, tensor in read_weights(site.folder / "global", site.parameter_map):
        parameter = next(p for p in site.parameter_map.parameters if p.name == name)
        assert torch.equal(tensor, initial_tensor(parameter, site.run.seed))

    code, said = site.serve("global", resume=True).ended()
    assert code == 1 and "another server is running in this folder" in said

    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", site.cluster.region("eu").server.port))
        squatter.listen()
        code, said = site.serve("eu").ended()
    assert code == 1 and said == (
        f"geotrain serve: cannot listen on {site.address('eu')}: Address already in use; "
        "stop what uses the port, or choose another\n"
    )

    told = command(site.address("global"), rpc.Control("snapshot"), BUSY_S)
    assert told.endswith(f"{site.folder}/global/snapshots/00000002")
    top.send(signal.SIGTERM)
    assert top.ended() == (0, "")
    assert [e["event"] for e in site.events("global")].count("SnapshotWritten") == 3

    code, said = site.serve("global").ended()
    assert code == 1 and "holds the state of a run already; resume it, or choose another folder" in said
