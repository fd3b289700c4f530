"""What a person may tell a run: pause, resume, drain a region, stop; and that it outlives the server's process."""

from __future__ import annotations

import dataclasses

import pytest

from geotrain.config import OuterConfig
from geotrain.outer.global_server import GlobalServer
from geotrain.outer.layout import Layout
from geotrain.outer.messages import Finished, Join, Lease, LeaseRequest, Refused, Steer
from geotrain.outer.region_server import RegionServer
from geotrain.outer.server import Identity
from tests.outer.test_rules import config
from tests.outer.world import layout

REGIONS = {"eu": ("a", "b"), "us": ("c",)}
STEP = 2  # samples


def server(cfg: OuterConfig | None = None, samples: int = 40) -> GlobalServer:
    lay: Layout = layout()
    cfg = (cfg or config()).model_copy(update={"local_steps": 2})
    return GlobalServer(Identity("test", "config", lay.digest, "toy"), lay, cfg, REGIONS, samples, STEP)


def again(old: GlobalServer) -> GlobalServer:
    """What a restart leaves of it."""
    new = server(OuterConfig(rule="sync") if old.book.rounds else None)
    new.load(*old.state())
    return new


def ask(top: GlobalServer, worker: str, job: int) -> Lease | Finished | None:
    return top.on_lease_request(LeaseRequest(worker, job))


def test_a_paused_run_hands_out_nothing_new_also_after_a_restart():
    top = server()
    held = ask(top, "a", 1)
    top.on_steer(Steer("pause"))
    top = again(top)
    assert top.status()["phase"] == "paused"
    assert ask(top, "a", 1) == held  # what was handed out stays so
    assert ask(top, "a", 2) is None and ask(top, "c", 1) is None
    assert len(top.book.open) == 1
    top.on_steer(Steer("resume"))
    following = ask(top, "a", 2)
    assert isinstance(following, Lease) and following.start == 4
    assert top.status()["phase"] == "running"


def test_a_drained_region_leaves_and_the_others_train_on():
    top = server()
    held = ask(top, "a", 1)
    top.on_steer(Steer("drain", "eu"))
    top = again(top)
    assert top.status()["draining"] == ["eu"]
    assert ask(top, "a", 1) == held
    assert ask(top, "a", 2) == Finished("a", 2) == ask(top, "a", 2)  # the same to each of its ranks
    assert ask(top, "b", 1) == Finished("b", 1)
    assert isinstance(ask(top, "c", 1), Lease)
    assert top.status()["phase"] == "running"


def test_a_drained_region_that_comes_back_trains_again():
    top = server()
    join = _join(top, "eu", "life-1")
    top.on_join(join)
    top.on_steer(Steer("drain", "eu"))
    assert ask(top, "a", 1) == Finished("a", 1)
    top.on_join(dataclasses.replace(join, incarnation="life-2"))  # restarted before it had left
    assert ask(top, "b", 1) == Finished("b", 1)
    top.on_leave("eu")
    top.on_join(dataclasses.replace(join, incarnation="life-3"))
    assert isinstance(ask(top, "a", 1), Lease) and top.status()["draining"] == []


def test_a_stopped_run_goes_on_where_it_was():
    top = server(samples=12)
    first = ask(top, "a", 1)
    assert isinstance(first, Lease)
    top.on_steer(Steer("pause"))
    top.on_steer(Steer("stop"))
    top = again(top)
    assert top.status()["phase"] == "stopping"
    assert [ask(top, w, 2) for w in "abc"] == [Finished(w, 2) for w in "abc"]
    assert ask(top, "a", 1) == first
    top.book.commit((first.lease,))
    for region in REGIONS:
        top.on_leave(region)
    assert top.status()["phase"] == "ended" and not top.status()["complete"]
    top.begin_again()
    leases = [ask(top, "a", 2), ask(top, "c", 2)]
    assert [lease.start for lease in leases if isinstance(lease, Lease)] == [4, 8]


def test_a_synchronous_round_that_has_begun_is_finished_by_all():
    """Others would wait for ever for the worker that was told to stop within a round."""
    top = server(OuterConfig(rule="sync"))
    assert isinstance(ask(top, "a", 1), Lease)
    top.on_steer(Steer("stop"))
    assert isinstance(ask(top, "b", 1), Lease) and isinstance(ask(top, "c", 1), Lease)
    assert [ask(top, w, 2) for w in "abc"] == [Finished(w, 2) for w in "abc"]
    paused = server(OuterConfig(rule="sync"))
    paused.on_steer(Steer("pause"))
    assert ask(paused, "a", 1) is None and paused.book.laid_out == {}


def test_what_cannot_be_done_is_refused():
    with pytest.raises(Refused, match="no region is called 'mars' here; known: eu, us"):
        server().on_steer(Steer("drain", "mars"))
    with pytest.raises(Refused, match="needs every worker: stop the run instead"):
        server(OuterConfig(rule="sync")).on_steer(Steer("drain", "eu"))
    with pytest.raises(Refused, match="known: pause, resume, drain, stop"):
        server().on_steer(Steer("explode"))


def test_a_flat_run_drains_the_workers_of_a_region():
    top = server(config().model_copy(update={"levels": 1}))
    top.on_steer(Steer("drain", "eu"))
    assert isinstance(ask(top, "c", 1), Lease)
    assert ask(top, "a", 1) == Finished("a", 1) and top.status()["draining"] == ["eu"]


def _join(top: GlobalServer, region: str, life: str) -> Join:
    member = RegionServer(region, top.identity, top.layout, config(), REGIONS[region])
    member.incarnation = life
    return member.join_message()
