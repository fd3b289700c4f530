"""Who may make which call of a server: one table over every message, with and without TLS; expelled and banned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest

from geotrain.common.names import GLOBAL
from geotrain.config import ClusterConfig, parse
from geotrain.net.server import grpc_service
from geotrain.net.transport import rpc, wire
from geotrain.net.transport.authority import make_certificates
from geotrain.net.transport.certs import open_channel
from geotrain.net.transport.operator_client import command
from geotrain.outer.messages import Facts, Join, LeaseRequest, Refused, Release, TakeBack, UpdatePart, Validated
from tests.support.net_worlds import BUSY_S, Cluster, Running, clusters, outer, wait_for, whole

PLAN = {"eu": {"a": whole, "b": whole}, "us": {"c": whole}}
MEMBERS = {"eu": "a", GLOBAL: "eu"}  # by server, the member for which each message speaks
SPEAKERS = {
    **{"a": ("worker", "a"), "b": ("worker", "b"), "eu": ("region", "eu"), "us": ("region", "us")},
    **{"operator": ("operator", "operator"), "a shard of eu": ("shard", "eu"), "a shard of us": ("shard", "us")},
    **{"a shard of global": ("shard", GLOBAL), "global": ("global", GLOBAL), "a worker called eu": ("worker", "eu")},
}
OF_MEMBER = {"eu": {"a"}, GLOBAL: {"eu", "a shard of eu"}}  # a region's shards bring and fetch its payloads
STRANGE = "life-0"  # an incarnation that has not joined: who may speak for the member is asked to join


def messages(member: str, worker: str, incarnation: str = STRANGE) -> dict[str, tuple[str, Any]]:
    """By name, each message that a server takes, with its method."""
    own = member, incarnation
    join = Join("run", "config", "parameter_map", "model", *own, 0, 1, (), ())
    return {
        "join": ("join", join),
        "push": ("push", UpdatePart(*own, 0, 1, 0, ())),
        "push again": ("push", rpc.Resume(*own, 0, 0)),
        "pull": ("pull", rpc.Pull(*own, 0, 0, 0, 0.0)),
        "weights": ("weights", rpc.PullGlobal(*own, 0, 1)),
        "lease": ("lease", rpc.AskLease(*own, LeaseRequest(worker, 1), 0.0)),
        "release": ("release", rpc.ReleaseLeases(*own, Release((1,)))),
        "takeback": ("takeback", rpc.AskBack(*own, TakeBack(worker, (1,)))),
        "trained": ("trained", rpc.SayTrained(*own, 0, (1,))),
        "validated": ("validated", rpc.SayValidated(*own, Validated(worker, 1, 1, 1.0, 1.0))),
        "leave": ("leave", rpc.SayLeave(*own, 0, (0,))),
        "beat": ("beat", rpc.Beat(*own, 0)),
        "status": ("status", None),
        "control": ("control", rpc.Control("explode")),
        "standing": ("standing", rpc.ShardHello(0, 0, (), 0, "", True, 0, 0.0, False, 0, 0, incarnation)),
        "facts": ("facts", Facts(0, 0, (), (), ())),
    }


KINDS = tuple(messages("", ""))
OF_SHARDS = ("standing", "facts")
OF_OTHERS = ("status", "control", *OF_SHARDS)


def said(channel: grpc.Channel, method: str, message: Any) -> str:
    """Make a call; returns why it was refused, or "" if it was carried out."""
    request = b"" if message is None else next(wire.frames(message))
    try:
        frames = list(channel.stream_stream(f"/{rpc.SERVICE}/{method}")(iter([request]), timeout=BUSY_S))
    except grpc.RpcError as error:
        refused = rpc.refusal_of(error)
        assert refused is not None, error
        return refused.reason
    if method == "push":
        reply = wire.unpack(frames[0], rpc.Ack, rpc.Have, rpc.Refusal)
        return reply.reason if isinstance(reply, rpc.Refusal) else ""
    return ""


def server_of(cluster: Cluster, server: str) -> Running:
    return cluster.top if server == GLOBAL else cluster.regions[server]


@pytest.fixture(scope="module")
def speakers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, grpc.Channel]]]:
    """By server, and who speaks, a connection with the speaker's certificate."""
    folder, certs = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("certs")
    regions = [
        {"name": r, "shards": [{}], "workers": [{"name": w, "hosts": [{"host": "h", "slots": 1}]} for w in workers]}
        for r, workers in PLAN.items()
    ]
    raw = {"name": "test", "global_shards": [{}], "regions": regions, "security": {"folder": str(certs)}}
    namesake = {"name": "r", "workers": [{"name": "eu", "hosts": [{"host": "h", "slots": 1}]}]}
    for each in (raw, {"name": "test", "regions": [namesake]}):
        make_certificates(parse(ClusterConfig, each, "test"), certs)
    with clusters(folder) as make, ExitStack() as stack:
        cluster = make(outer(), PLAN, certs=certs)
        open_to: dict[str, dict[str, grpc.Channel]] = {}
        for server, role in (("eu", "region"), (GLOBAL, "global")):
            wait_for(lambda: cluster.top.server.members["eu"].complete)
            open_to[server] = {
                who: stack.enter_context(
                    open_channel(grpc, server_of(cluster, server).address, cluster.trust(*own, role, server), ())
                )
                for who, own in SPEAKERS.items()
            }
        yield open_to


@pytest.mark.parametrize("server", MEMBERS)
@pytest.mark.parametrize("kind", KINDS)
def test_over_tls_each_call_takes_the_certificate_of_whom_it_speaks_for(
    speakers: dict[str, dict[str, grpc.Channel]], server: str, kind: str
) -> None:
    may = {"status": set(SPEAKERS), "control": {"operator"}}
    may |= {each: {f"a shard of {server}"} for each in OF_SHARDS}
    method, message = messages(MEMBERS[server], "a")[kind]
    answers = {who: said(channel, method, message) for who, channel in speakers[server].items()}
    assert {who for who, words in answers.items() if "does not speak for" not in words} == may.get(
        kind, OF_MEMBER[server]
    ), answers


def test_every_call_of_a_server_stands_in_the_table(speakers: dict[str, dict[str, grpc.Channel]]) -> None:
    listed = {line.split()[0] for line in rpc.__doc__.splitlines() if line[:1].islower()}
    assert {method for method, _ in messages("", "").values()} == listed - {"method", "enroll"}


def test_without_tls_other_machines_may_do_all_but_steer(
    make: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make(outer(), PLAN)
    with open_channel(grpc, cluster.regions["eu"].address, None, ()) as channel:
        calls = messages("a", "a")
        assert "not explode" in said(channel, *calls["control"])
        monkeypatch.setattr(grpc_service, "is_this_machine", lambda peer: False)
        elsewhere = {kind: said(channel, *call) for kind, call in calls.items()}
    assert [kind for kind, words in elsewhere.items() if "from the server's own machine only" in words] == ["control"]


def test_who_was_expelled_is_refused_all_calls_until_unbanned_and_then_its_old_life_is(
    make: Callable[..., Cluster],
) -> None:
    cluster = make(outer(), PLAN)
    worker, region = cluster.joined("a"), cluster.regions["eu"]
    worker.lease()

    def calls(incarnation: str) -> dict[str, str]:
        with open_channel(grpc, region.address, None, ()) as channel:
            made = messages("a", "a", incarnation) | {"join": ("join", worker.joins()[0])}
            return {kind: said(channel, *made[kind]) for kind in KINDS if kind not in OF_OTHERS}

    command(region.address, rpc.Control("expel", "a"), BUSY_S)
    assert all("expelled" in words for words in calls("life-1").values()), calls("life-1")
    again = cluster.worker("a", "life-2")
    with pytest.raises(Refused, match="expelled"):
        again.join()
    command(region.address, rpc.Control("unban", "a"), BUSY_S)
    assert all("expelled" in words for words in calls("life-1").values()), calls("life-1")
    again.join()
    assert again.lease() is not None
