"""What a person may tell a run: pause, resume, drain a region, stop; and that it outlives the server's process."""

from __future__ import annotations

import dataclasses

import pytest

from geotrain.config import OuterConfig
from geotrain.outer.messages import Finished, Join, Lease, LeaseRequest, Leave, OperatorCommand, Refused
from geotrain.outer.rules import region_rule
from geotrain.outer.server.global_server import GlobalServer
from geotrain.outer.server.region_server import RegionServer
from geotrain.outer.server.server import Identity
from geotrain.parameters.parameter_map import ParameterMap
from tests.support.outer_world import UPDATES, config, parameter_map

REGIONS = {"eu": ("a", "b"), "us": ("c",)}
STEP = 2  # samples


def server(cfg: OuterConfig | None = None, samples: int = 40) -> GlobalServer:
    lay: ParameterMap = parameter_map()
    cfg = (cfg or config()).model_copy(update={"local_steps": 2})
    return GlobalServer(Identity("test", "config", lay.digest, "toy"), lay, cfg, REGIONS, samples, STEP)


def again(old: GlobalServer) -> GlobalServer:
    """What a restart leaves of it."""
    new = server(config("sync") if old.lease_table.rounds else None)
    new.load(*old.state())
    return new


def ask(top: GlobalServer, worker: str, job: int) -> Lease | Finished | None:
    return top.handle(LeaseRequest(worker, job)).reply


def test_a_paused_run_hands_out_nothing_new_also_after_a_restart():
    top = server()
    held = ask(top, "a", 1)
    top.handle(OperatorCommand("pause"))
    top = again(top)
    assert top.status()["phase"] == "paused"
    assert ask(top, "a", 1) == held  # what was handed out stays so
    assert ask(top, "a", 2) is None and ask(top, "c", 1) is None
    assert len(top.lease_table.open) == 1
    top.handle(OperatorCommand("resume"))
    following = ask(top, "a", 2)
    assert isinstance(following, Lease) and following.start == 4
    assert top.status()["phase"] == "running"


def test_a_drained_region_leaves_and_the_others_train_on():
    top = server()
    held = ask(top, "a", 1)
    top.handle(OperatorCommand("drain", "eu"))
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
    top.handle(join)
    top.handle(OperatorCommand("drain", "eu"))
    assert ask(top, "a", 1) == Finished("a", 1)
    top.handle(dataclasses.replace(join, incarnation="life-2"))  # restarted before it had left
    assert ask(top, "b", 1) == Finished("b", 1)
    top.handle(Leave("eu"))
    top.handle(dataclasses.replace(join, incarnation="life-3"))
    assert isinstance(ask(top, "a", 1), Lease) and top.status()["draining"] == []


def test_a_stopped_run_goes_on_where_it_was():
    top = server(samples=12)
    first = ask(top, "a", 1)
    assert isinstance(first, Lease)
    top.handle(OperatorCommand("pause"))
    top.handle(OperatorCommand("stop"))
    top = again(top)
    assert top.status()["phase"] == "stopping"
    assert [ask(top, w, 2) for w in "abc"] == [Finished(w, 2) for w in "abc"]
    assert ask(top, "a", 1) == first
    top.lease_table.commit((first.lease,))
    for region in REGIONS:
        top.handle(Leave(region))
    assert top.status()["phase"] == "ended" and not top.status()["complete"]
    top.begin_again()
    leases = [ask(top, "a", 2), ask(top, "c", 2)]
    assert [lease.start for lease in leases if isinstance(lease, Lease)] == [4, 8]


def test_a_synchronous_round_that_has_begun_is_finished_by_all():
    """Others would wait for ever for the worker that was told to stop within a round."""
    top = server(config("sync"))
    assert isinstance(ask(top, "a", 1), Lease)
    top.handle(OperatorCommand("stop"))
    assert isinstance(ask(top, "b", 1), Lease) and isinstance(ask(top, "c", 1), Lease)
    assert [ask(top, w, 2) for w in "abc"] == [Finished(w, 2) for w in "abc"]
    paused = server(config("sync"))
    paused.handle(OperatorCommand("pause"))
    assert ask(paused, "a", 1) is None and paused.lease_table.laid_out == {}


def test_what_cannot_be_done_is_refused():
    with pytest.raises(Refused, match="no region is called 'mars' here; known: eu, us"):
        server().handle(OperatorCommand("drain", "mars"))
    with pytest.raises(Refused, match="needs every worker: stop the run instead"):
        server(config("sync")).handle(OperatorCommand("drain", "eu"))
    with pytest.raises(Refused, match="known: pause, resume, drain, stop"):
        server().handle(OperatorCommand("explode"))


def test_a_flat_run_drains_the_workers_of_a_region():
    top = server(config().model_copy(update={"levels": 1}))
    top.handle(OperatorCommand("drain", "eu"))
    assert isinstance(ask(top, "c", 1), Lease)
    assert ask(top, "a", 1) == Finished("a", 1) and top.status()["draining"] == ["eu"]


def _join(top: GlobalServer, region: str, incarnation: str) -> Join:
    member = RegionServer(
        region,
        top.identity,
        top.parameter_map,
        config(),
        region_rule(config().rule, REGIONS[region], UPDATES),
        REGIONS[region],
    )
    member.incarnation = incarnation
    return member.join_message()
