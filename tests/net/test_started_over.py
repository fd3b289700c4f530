"""Over real sockets: a region whose update is refused for good starts over and the run ends whole; ranks whose peers
have not joined again wait for them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from geotrain.config import FragmentConfig
from geotrain.net.transport.worker_client import ServerForgot
from geotrain.outer.events import StartedOver
from geotrain.outer.messages import Join, MemberSilent, Refused, UpdatePart
from tests.support.net_worlds import BUSY_S, Cluster, halves, outer, wait_for, whole
from tests.support.outer_world import weights_of


def test_an_update_made_while_a_session_begins_is_sent(make):
    """It is made after the region was asked what to send again, and delivered before the answer to that is there."""
    cluster = make(outer(updates_per_send=1), {"eu": {"a": whole}}, train_samples=24)
    running, worker = cluster.regions["eu"], cluster.worker("a")
    worker.join()
    lease = worker.lease()
    read, asked = running.server_thread.read, []

    async def slow_read(what):
        found = await read(what)
        if what == running.server.resend and not asked:
            asked.append(len(found))
            await asyncio.to_thread(worker.train, lease)
            while running.server.sequence == 0:
                await asyncio.sleep(0.01)
        return found

    running.server_thread.read = slow_read
    cluster.restart_top()
    wait_for(lambda: asked and cluster.top.server.members["eu"].sequence >= 1)
    assert asked == [0]
    while (lease := worker.lease()) is not None:
        worker.train(lease)
    worker.leave()
    wait_for(lambda: cluster.top.server.finished)
    assert cluster.top.server.lease_table.committed_samples == 24


def test_what_went_to_others_while_a_region_counted_as_dead_counts_once(make):
    """It hears so when it joins again, starts over as a new incarnation, and goes on."""
    one = outer(updates_per_send=1, fragments=FragmentConfig())
    cluster = make(one, {"eu": {"a": whole}, "us": {"b": whole}}, train_samples=12)
    late, other, (top, eu) = cluster.joined("a"), cluster.joined("b"), (cluster.top, cluster.regions["eu"])
    lost = late.lease()
    top.loop.do(top.server_thread.say(MemberSilent("eu", eu.server.incarnation)))
    taken = other.lease()
    assert taken.start == lost.start
    late.train(lost)
    wait_for(lambda: any(isinstance(event, StartedOver) for event in eu.events) and eu.server.fragments)
    late.close()
    other.train(taken)
    again = cluster.joined("a", "life-2")
    for worker in (again, other):
        while (lease := worker.lease()) is not None:
            worker.train(lease)
    for worker in (again, other):
        worker.leave()
    wait_for(lambda: top.server.finished)
    assert top.server.lease_table.committed_samples == 12
    assert sorted(lease.start for lease in [*again.trained, *other.trained]) == [0, 4, 8]


def weights_of_a_synchronous_run(cluster: Cluster, refuse: int = 0) -> list[Tensor]:
    """The run with all its workers, started again as their launcher does. refuse: the number of eu's update that the
    global server refuses for good, once."""
    top, admit, refused, lives = cluster.top.server, cluster.top.server.admit, [], defaultdict(int)

    def refuse_once(part: UpdatePart) -> bool:
        if part.member == "eu" and part.sequence == refuse and not refused:
            refused.append(part)
            raise Refused("far out of the ordinary, the test says")
        return admit(part)

    top.admit = refuse_once

    def live(name: str) -> None:
        while True:
            lives[name] += 1
            worker = cluster.worker(name, f"life-{lives[name]}")
            try:
                return worker.run()
            except ServerForgot:
                continue
            finally:
                worker.close()

    with ThreadPoolExecutor() as pool:
        for ended in [pool.submit(live, name) for name in cluster.slicings]:
            ended.result(BUSY_S)
    wait_for(lambda: top.finished)
    assert bool(refused) == bool(refuse) and lives["c"] == 1
    assert top.lease_table.committed_samples == 36 and not top.lease_table.open
    return [x.clone() for x in weights_of(top)]


def test_a_synchronous_region_whose_update_is_refused_trains_the_round_again(make):
    """Whichever of a round's updates it is, the others wait, and the run has the bits of one without a refusal."""
    regions = {"eu": {"a": halves, "b": whole}, "us": {"c": whole}}
    truth = weights_of_a_synchronous_run(make(outer("sync"), regions, train_samples=36))
    fragments = len(truth)
    for refuse in (1, fragments, fragments + 2):
        cluster = make(outer("sync"), regions, train_samples=36)
        events = []
        cluster.regions["eu"].server_thread.write_event = events.append
        again = weights_of_a_synchronous_run(cluster, refuse)
        assert [event for event in events if isinstance(event, StartedOver)] == [
            StartedOver("far out of the ordinary, the test says")
        ]
        assert all(torch.equal(x, y) for x, y in zip(again, truth, strict=True))


def test_ranks_do_not_join_over_and_over_while_a_peer_is_missing(make):
    """The region's server restarts; one of two ranks comes back, with calls of every kind under way."""
    cluster = make(outer(updates_per_send=1), {"eu": {"a": halves}}, train_samples=24)
    worker = cluster.joined("a")
    lease = worker.lease()
    worker.clients[1].close()  # the second rank stands still: it neither beats nor calls
    cluster.restart("eu")
    joins, refused, running = [], [], cluster.regions["eu"]
    take, current = running.server.take, running.server.current

    def joining(message):
        joins.extend([message] if isinstance(message, Join) else [])
        return take(message)

    def asking(*rank):
        try:
            return current(*rank)
        except Refused as error:
            refused.append(error)
            raise

    running.server.take, running.server.current = joining, asking
    first = worker.clients[0]
    calls = [first.push(worker.parts(lease, (0,))[0]), first.pull(worker.sequence, (0,))]
    wait_for(lambda: len(refused) >= 6)
    assert 1 <= len(joins) <= 3, len(joins)
    for call in calls:
        call.cancel()
