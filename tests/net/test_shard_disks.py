"""A process of a server with shards loses its disk, and comes back alone, from its copy in S3 over HTTP."""

from __future__ import annotations

import json
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pytest

from geotrain.common.names import GLOBAL
from geotrain.net.server.server_setup import ServerSetup
from geotrain.net.transport import rpc
from geotrain.net.transport.operator_client import command
from geotrain.outer.messages import Refused
from geotrain.parameters.chunks import deal
from tests.support.net_worlds import BUSY_S, wait_for
from tests.support.object_storage import make_bucket, s3_server
from tests.support.server_processes import Server, Site

SAMPLES = 640
TRAINED_S = 900.0  # for all that is trained after the last loss, beside other long tests
MOST_LIVES = 8  # of a worker


class Story:
    """A run of two workers, whose processes lose their disks on the way, in turn."""

    # Ledgers last, the global one behind the region's: what they do not know again, nothing may hang on.
    lost = "global.shard-0", "eu.shard-1", "eu", GLOBAL

    def __init__(self, folder: Path, s3: dict[str, str]) -> None:
        folder.mkdir()
        url = make_bucket(f"bucket-{abs(hash(folder))}", s3) + "/copies"
        self.site = Site(folder, "halos", SAMPLES, snapshots=url, environment=s3, every_minutes=1000.0, shards=2)
        self.servers: dict[str, Server] = {}
        self.events: list[dict[str, Any]] = []  # of the global server, before its folder was lost

    def played(self) -> None:
        """All is trained, once."""
        site = self.site
        self.servers = {name: site.serve(name) for name in site.processes}
        try:
            with ThreadPoolExecutor(2) as pool:
                ends = [pool.submit(self.live, name) for name in ("a", "b")]
                for name in self.lost:
                    self.lose(name)
                for end in as_completed(ends, TRAINED_S):
                    end.result()
            for name, server in self.servers.items():
                assert server.ended()[0] == 0, (name, server.ended())
        finally:
            site.kill()
        status = json.loads((site.folder / GLOBAL / "status.json").read_text())
        assert (status["committed_samples"], status["open_leases"]) == (SAMPLES, 0)

    def live(self, name: str) -> None:
        """A worker's lives: another begins where a region has lost what it acknowledged, as its launcher does it."""
        for life in range(MOST_LIVES):
            worker = self.site.worker(name, f"life-{life}")
            try:
                return worker.run()
            except Refused as error:
                print(f"{name}, life {life}: {error}")
            finally:
                worker.close()
        raise AssertionError(f"{name} has no life left")

    def lose(self, name: str) -> None:
        """Have a copy, train on, and lose the disk."""
        site = self.site
        server, _, shard = name.partition(".shard-")
        setup = ServerSetup(site.run, site.cluster, server, site.folder / name, int(shard) if shard else None)
        copies = setup.copies()
        assert copies is not None
        before = copies.own.whole()
        wait_for(lambda: site.updates() >= 1)
        command(str(setup.address), rpc.Control("snapshot"), BUSY_S)
        wait_for(lambda: copies.own.whole()[-1:] > before[-1:])
        enough = self.applied(server, shard) + 9  # what the copy does not have
        wait_for(lambda: self.applied(server, shard) >= enough)
        self.servers[name].send(signal.SIGKILL)
        self.servers[name].process.join(BUSY_S)
        self.events += site.events(GLOBAL)
        shutil.rmtree(site.folder / name)
        self.servers[name] = site.serve(name, resume=True)

    def applied(self, server: str, shard: str) -> int:
        """Updates that a server has taken, or one of its shards."""
        dealt = deal(self.site.parameter_map.fragments, 2)
        taken = [e["fragment"] for e in self.site.events(server) if e["event"] == "UpdateApplied"]
        return sum(not shard or fragment in dealt[int(shard)] for fragment in taken)


@pytest.mark.long("geotrain/net", "geotrain/outer")
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_process_loses_its_disk_and_all_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had and has no more is handed out again."""
    with s3_server() as s3:
        for key, value in s3.items():
            monkeypatch.setenv(key, value)
        story = Story(tmp_path / "run", s3)
        story.played()
    assert [event for event in story.events if event["event"] == "ShardWentBack"]
