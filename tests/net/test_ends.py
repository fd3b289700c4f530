"""Servers that are killed at their end: between their last snapshot and their exit, with shards and without.

A launcher that starts one again in the same launch finds it ended still; another launch trains on.
"""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest

from geotrain.net.server.server_process import begin_server, global_server
from geotrain.net.storage.recovery import Dismissed, Recovered, Stopped, begin_snapshot, finish_snapshot, recover
from geotrain.outer.messages import Leave, OperatorCommand
from tests.support.net_worlds import BUSY_S, side_by_side
from tests.support.server_processes import Server, Site, dies_at

HOST, LINK = "geotrain.net.server.server_host:", "geotrain.net.server.shard_link:"
NOTED, SAVED = HOST + "ServerHost._note", HOST + "ServerHost._last_snapshot"
# Who dies, with how many shards, and where: as `dies_at` takes it.
PLACES = {
    "the global server, its last snapshot written": ("global", 0, SAVED, True),
    "a region's server, its last snapshot written": ("eu", 0, SAVED, True),
    "a region's server, all said": ("eu", 0, HOST + "ServerHost._last_upload", True),
    "the global ledger, its last snapshot written": ("global", 2, SAVED, True),
    "the global ledger, a shard told": ("global", 2, NOTED, False, Dismissed),
    "a region's ledger, its last snapshot written": ("eu", 2, SAVED, True),
    "a region's ledger, a shard told": ("eu", 2, NOTED, False, Dismissed),
    "a region's ledger, one shard let go": ("eu", 2, NOTED, True, Dismissed),
    "a region's ledger, all shards let go": ("eu", 2, LINK + "ShardTable.farewell", True),
    "a shard, its last snapshot written": ("eu.shard-1", 2, SAVED, True),
    "a shard, its ledger told": ("global.shard-0", 2, LINK + "ShardLink.farewell", True),
}


SHORT = ("a region's server, its last snapshot written", "a region's ledger, a shard told")


@pytest.mark.parametrize(
    "place",
    [pytest.param(p, marks=() if p in SHORT else pytest.mark.long("geotrain/net/server")) for p in PLACES],
)
def test_who_is_killed_at_its_end_and_started_again_stays_ended(tmp_path: Path, place: str) -> None:
    """Nobody waits for who has gone, everybody ends in good order, and all data is trained once."""
    which, shards, *where = PLACES[place]
    site = Site(tmp_path, "sync", 24, shards=shards)
    servers: dict[str, Server] = {}
    for name in site.processes:
        dies = partial(dies_at, *where) if name == which else int
        servers[name] = site.serve(name, launch="1", first=dies)
    try:
        with side_by_side([site.worker(name) for name in ("a", "b")]):  # all of the run's data
            servers[which].process.join(BUSY_S)
            assert servers[which].process.exitcode == -signal.SIGKILL
            servers[which] = site.serve(which, resume=True, launch="1")
        for name, server in servers.items():
            assert server.ended()[0] == 0, (name, server.ended())
    finally:
        site.kill()
    applied = [event for event in site.events("global") if event["event"] == "UpdateApplied"]
    assert sum(event["samples"] for event in applied) == 24


def test_only_in_another_launch_who_had_ended_begins_again(tmp_path: Path) -> None:
    site = Site(tmp_path)

    def lives(launch: str) -> Recovered:
        build = partial(global_server, site.run, site.cluster)
        return recover(build, partial(begin_server, run=site.run), tmp_path / "global", 2, launch=launch)

    def ends(incarnation: Recovered, launch: str) -> None:
        for message in (OperatorCommand("stop"), Leave("eu")):
            incarnation.journal.append(message)
            incarnation.server.handle(message)
        frozen, meta = begin_snapshot(
            incarnation.server, incarnation.store, incarnation.journal, incarnation.server.finished, launch=launch
        )
        finish_snapshot(incarnation.store, incarnation.journal, frozen, meta)
        incarnation.journal.append(Stopped(), Dismissed(1))
        incarnation.journal.flush()
        incarnation.journal.close()

    ends(lives("1"), "1")
    for launch in ("1", "2", "", "1"):
        incarnation = lives(launch)
        stays = launch == "1"
        assert incarnation.ended == incarnation.server.finished == stays
        assert incarnation.dismissed == ({1} if stays else set())
        assert incarnation.server.status()["phase"] == ("ended" if stays else "running")
        incarnation.journal.close()
    ends(lives(""), "")  # by hand: nothing says that it is the same launch
    assert not lives("").ended
