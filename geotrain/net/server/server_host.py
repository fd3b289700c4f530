"""Runs a server in the frame of `geotrain.net.server.process_host`.

When snapshots are due, shards, counters, the end of a run and, in a region, the client to the global server.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

from geotrain.common.files import OutputError, out_of_room, write_whole
from geotrain.common.names import GLOBAL
from geotrain.config import ClusterConfig, RunConfig, shards_of
from geotrain.monitor.events import (
    Acknowledged,
    EventLog,
    LinkTraffic,
    UpdatesLost,
)
from geotrain.monitor.monitor import Monitor
from geotrain.net.server.failure_detector import REGION_SILENT_S, WORKER_SILENT_S
from geotrain.net.server.first_weights import first_answers
from geotrain.net.server.grpc_service import GrpcService
from geotrain.net.server.process_host import ProcessHost
from geotrain.net.server.region_client import RegionClient
from geotrain.net.server.sampler import Sampler
from geotrain.net.server.server_setup import ServerSetup
from geotrain.net.server.shard_link import FAREWELL_S, ShardLink, ShardTable
from geotrain.net.storage.journal import JOURNAL_PER_STATE, MIN_JOURNAL_BYTES, JournalFull
from geotrain.net.storage.owner import begun_s, note_origin
from geotrain.net.storage.recovery import Dismissed, Recovered, Stopped
from geotrain.net.storage.remote_snapshots import Copies, Uploader
from geotrain.net.storage.snapshots import StoreError
from geotrain.net.transport.deadlines import first_of, within
from geotrain.net.transport.fragment_links import link_to, shards_above
from geotrain.net.transport.grpc_client import GrpcClient
from geotrain.net.transport.tcp_counters import TcpCounters, Traffic
from geotrain.outer.messages import OperatorCommand, Refused, RunComplete, Send, SkipSamples, Validated
from geotrain.outer.server.region_server import RegionServer

SNAPSHOT_RETRY_S = 30.0
TRAFFIC_EVENT_S = 5.0  # time between two events about the link's traffic
LAST_UPLOAD_S = 120.0  # how long the process waits at its end for the last snapshot's copy
FINAL_VALIDATION_S = 600.0  # at most, of the final weights; the launcher waits longer for its servers
LINGER_S = 2.0  # the server goes on for so long after its end, since a member whose last answer was lost asks again
GROWN_LOOK_S = 0.1
CLOCK_S = 10.0  # between two looks at the time
TRAFFIC = "traffic.json"  # in the server's folder: bytes on its links so far in the run, for its next incarnation
STATUS = "status.json"  # in the server's folder once it has ended: its last status


class Grown(Exception):
    """Raised where a server is to begin a new incarnation, with a cluster of more members."""

    def __init__(self, run: RunConfig, cluster: ClusterConfig) -> None:
        super().__init__(f"serves {', '.join(region.name for region in cluster.regions)} from now on")
        self.run, self.cluster = run, cluster


class ServerHost(ProcessHost):
    """Runs one incarnation of a server, or of a shard of one."""

    def __init__(
        self,
        setup: ServerSetup,
        recovered: Recovered,
        events: EventLog,
        monitor: Monitor,
        copies: Copies | None,
    ) -> None:
        super().__init__(setup, recovered, events)
        self.monitor, self.copies = monitor, copies
        self.new = recovered.snapshot is None  # without a state
        self.ended_before, self.dismissed = recovered.ended, recovered.dismissed
        self.uploader = Uploader(self.store, copies, events.write) if copies else None
        self.region_client: RegionClient | None = None
        self.shards: ShardTable | None = None  # of the ledger's process, where there are any
        self.ledger: ShardLink | None = None  # of a shard
        # Versions of a shard's fragments in its newest snapshot, or in the newest copy where there are any.
        self.safe: dict[int, tuple[int, ...]] = {}
        self.saved_updates, self.saved_s = self._updates(), time.monotonic()  # at the last snapshot, or the start
        self.carried_bytes = 0  # the size of the journal's open segment at its beginning, where messages are repeated
        self.saving = asyncio.Lock()
        self.grown = False  # whether it ends because others have joined the cluster
        self.doing = ""  # what the server still does at its end, for its status
        self.tcp_counters = TcpCounters(self._is_wide_area, self._traffic_before())

    def _make_service(self) -> GrpcService:
        if self.server.part.dealt and self.server.ledger:
            self.shards = ShardTable(self.server_thread, self.dismissed, lambda shard: self._note(Dismissed(shard)))
        return GrpcService(
            self.server_thread,
            self._snapshot,
            self._status,
            silent_s=REGION_SILENT_S if self.server.member_role == "region" else WORKER_SILENT_S,
            credentials=self.credentials,
            shards=self.shards,
            enroll=self.setup.enroll,
        )

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            self.tcp_counters.stop()

    def _works(self) -> list[Coroutine[Any, Any, None]]:
        (self.folder / STATUS).unlink(missing_ok=True)
        self.tcp_counters.start()
        self.service.failure_detector.gone = self._gone
        self.sampler = Sampler(
            self.server_thread,
            self.service,
            self.events,
            self.folder,
            self._with_members,
            self._wide_area,
            self.setup.run.monitor.sample_s,
        )
        if self.uploader is not None:  # goes on beyond these, for the copy of the last snapshot
            self.uploading = asyncio.ensure_future(self.uploader.run())
        works = [self._snapshots(), self._write_traffic()]
        if self.server.name != GLOBAL:
            works.append(self._go_up())
        elif self.server.ledger:
            works.append(self._until_finished())
        if not self.server.ledger:
            trust, shard = self.trust(self.setup.server_role, self.server.name), self.setup.shard or 0
            to = shard, str(self.setup.server_address), trust
            count = self.tcp_counters.total, self._traffic
            self.ledger = ShardLink(self.server_thread, *to, self._newest_safe, self.new, *count)
            # Its ledger may be gone, if this shard knows already that the server has ended.
            works.append(asyncio.sleep(0) if self.ended_before else self.ledger.run())
        if self.setup.newest is not None:
            works.append(self._until_grown(self.setup.newest))
        if self.server.name == GLOBAL and self.server.ledger and self.setup.run.ends_at is not None:
            works.append(self._stop_at(self.setup.run.ends_at.timestamp()))
        samples = self.setup.run.monitor.enabled and self.server.ledger
        return [*works, self.sampler.run()] if samples else works

    async def _before_service(self) -> None:
        if not self.server.ledger:
            return
        if self.server.name == GLOBAL:
            note_origin(self.folder.parent, self.server.origin)
        skip = SkipSamples(*(tuple(each[end] for each in self.setup.run.data.skip) for end in (0, 1)))
        if self.server.name == GLOBAL and (skip.firsts or self.server.status()["skip"]):
            await self.server_thread.persist(skip)

    async def _until_over(self) -> None:
        try:
            await super()._until_over()
        finally:
            try:
                status = {**self.service.status(), "page": None, "metrics": None, "waits": []}
                write_whole(self.folder / STATUS, json.dumps(status))  # before links close, and their bytes are gone
            except OutputError as error:  # it must not hide why the server ends
                self.report(str(error))
            if self.region_client is not None:
                await self.region_client.close()

    def _newest_safe(self) -> tuple[int, ...]:
        """Versions of a shard's fragments that its disk's loss would leave; without copies, those on the disk."""
        number = self.uploader.uploaded if self.uploader is not None else max(self.safe, default=0)
        return self.safe.get(number, (0,) * len(self.server.numbers))

    async def _end(self) -> None:
        self.doing = "its last snapshot"
        # Else its shards may go on without it, and the journal holds all.
        whole = not self.stop.is_set() or not self.server.part.dealt
        if whole:
            await self._last_snapshot()
        # Behind the joins with which the last snapshot's journal begins: these incarnations end with this one.
        await self._note(Stopped())
        if whole:
            await self._last_upload()
        # One that was stopped has not ended: its shards wait for its next incarnation.
        if self.shards is not None and not self.stop.is_set():
            self.doing = "its shards, to acknowledge that it has ended"
            unacknowledged = await first_of(self.stop.wait(), self.shards.farewell(FAREWELL_S))
            for shard in [] if self.stop.is_set() else unacknowledged:
                self.report(
                    f"{self.server.name}: shard {shard} has not acknowledged that the server has ended: stop it"
                )
        if self.ledger is not None:
            await self.ledger.farewell()

    def _linger_s(self) -> float:
        return 0.0 if self.grown else LINGER_S

    async def _last_snapshot(self) -> None:
        """Write the snapshot of the end, and wait for room on the disk for it. Who stops the server need not wait:
        the journal holds all that a snapshot would."""
        while True:
            try:
                await self._snapshot(ended=self.server.finished if self.server.ledger else self.ledger_ended)
                return
            except StoreError as error:
                if not out_of_room(error):
                    raise
                self.report(str(error))
                if self.stop.is_set():
                    return
                with suppress(TimeoutError):
                    await within(SNAPSHOT_RETRY_S, self.stop.wait())

    async def _note(self, what: Stopped | Dismissed) -> None:
        def note() -> None:
            with suppress(JournalFull):  # then incarnations count as restarted, and shards are waited for
                self.journal.append(what)
                self.journal.flush()

        await self.server_thread.alone(note)

    @property
    def ledger_ended(self) -> bool:
        """Whether a shard's server has ended in good order."""
        return self.server.as_shard.standing is not None and self.server.as_shard.standing.ended

    async def _last_upload(self) -> None:
        """Wait for the last snapshot's copy. Without it the snapshot is still on this machine's disk, so it is no
        reason to fail."""
        if self.uploader is not None:
            self.doing = f"the copy of its last snapshot, {LAST_UPLOAD_S:g} s at most"
            try:
                await self.uploader.finish(LAST_UPLOAD_S)
            except StoreError as error:
                self.report(str(error))

    async def _until_finished(self) -> None:
        """Return when the server has finished and this process should end in good order."""
        while True:
            await self.server_thread.until(lambda: self.server.finished or None, float("inf"))
            await self._validate_final_weights()
            await asyncio.sleep(LINGER_S)
            with suppress(Refused):  # somebody has joined meanwhile, and waits for the answer that all is done
                await self.server_thread.persist(RunComplete())
                return

    async def _until_grown(self, newest: Callable[[ClusterConfig], ClusterConfig]) -> None:
        """Raise Grown when the cluster has other members than those that are served."""
        while (cluster := newest(self.setup.cluster)) == self.setup.cluster:
            await asyncio.sleep(GROWN_LOOK_S)
        self.grown = True
        raise Grown(self.monitor.staying(self.setup.run), cluster)

    async def _stop_at(self, ends_s: float) -> None:
        """Stop the run at a time, as a person would."""
        while (left_s := ends_s - time.time()) > 0:
            await asyncio.sleep(min(left_s, CLOCK_S))
        await self.server_thread.persist(OperatorCommand("stop"))
        await self.stop.wait()  # when this returns, the process ends

    async def _validate_final_weights(self) -> None:
        """Validate the final weights, once all data is trained. No worker is there any more, so this process does it,
        in a bounded time."""
        server, evaluate, began_s = self.server, self.setup.evaluate, time.monotonic()
        if evaluate is None or not server.final_validation:
            return
        if self.shards is not None:
            self.report("the final weights are in other processes: `geotrain eval` validates them, with an export")
            return
        given_up = threading.Event()
        self.doing = f"the validation of the final weights, {FINAL_VALIDATION_S:g} s at most"

        def go_on() -> bool:
            return not given_up.is_set() and time.monotonic() - began_s < FINAL_VALIDATION_S

        parameter_map, number, version = server.parameter_map, server.final_validation, max(server.versions)
        weights = (w for f in parameter_map.fragments for w in parameter_map.split(f.index, server.weights(f.index)))
        try:
            loss = await asyncio.to_thread(evaluate, weights, go_on)
            seconds = time.monotonic() - began_s
            await self.server_thread.say(Validated(GLOBAL, number, version, loss, seconds))
        except Exception as error:  # whatever it is, the run is trained, and its weights are to be written
            self.report(f"the final weights are not validated: {error}; `geotrain eval` does it with an export")
        finally:
            self.doing = ""
            given_up.set()

    async def _snapshots(self) -> None:
        """Take a snapshot now and then, so that neither the journal nor the time to replay it grows without bound."""
        every_s = 60.0 * self.setup.run.checkpoint.every_minutes
        while True:
            if not await self.server_thread.until(lambda: self._snapshot_is_due() or None, every_s):
                continue  # it is looked at anew, as no message may come by which the time would be noticed
            try:
                await self._snapshot()
            except StoreError as error:  # the older ones are whole, so the server can go on
                self.report(str(error))
                await asyncio.sleep(SNAPSHOT_RETRY_S)

    async def _write_traffic(self) -> None:
        while True:
            began_s = time.monotonic()
            try:
                await asyncio.sleep(TRAFFIC_EVENT_S)
            finally:  # also when cancelled at the end, so that the last seconds are written
                recent, seconds = self.tcp_counters.take_recent(), round(time.monotonic() - began_s, 3)
                self.events.write(LinkTraffic(seconds, **self._up_and_down(recent)))
                self._keep_traffic()

    def _up_and_down(self, wide_area: Traffic) -> dict[str, int]:
        """Name the bytes on wide-area links by their way: a region server sends up, the global server down."""
        sent, received = ("down", "up") if self.server.name == GLOBAL else ("up", "down")
        return {
            f"{sent}_bytes": wide_area.sent_bytes,
            f"{received}_bytes": wide_area.received_bytes,
            f"peak_{sent}_bytes_per_s": wide_area.peak_sent_bytes,
            f"peak_{received}_bytes_per_s": wide_area.peak_received_bytes,
        }

    def _traffic_before(self) -> Traffic:
        """Read what earlier incarnations of this server have counted on its wide-area links; nothing where no file
        says so."""
        try:
            saved = json.loads((self.folder / TRAFFIC).read_text())
            self.peers_before = {name: Traffic(*counts) for name, counts in saved["peers"].items()}
            return Traffic(*saved["links"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            self.peers_before = {}
            return Traffic()

    def _keep_traffic(self) -> None:
        """Write the counts for the next incarnation. Those after the last call before a kill are missing there."""
        peers = {name: traffic.counts for name, traffic in self._traffic().items()}
        with suppress(OutputError):  # the disk may be full
            write_whole(self.folder / TRAFFIC, json.dumps({"links": self.tcp_counters.total.counts, "peers": peers}))

    def _snapshot_is_due(self) -> bool:
        enough_bytes = max(MIN_JOURNAL_BYTES, JOURNAL_PER_STATE * 4 * sum(c.numel for c in self.server.store.chunks))
        journal_bytes = self.journal.segment_bytes - self.carried_bytes
        late = time.monotonic() - self.saved_s >= 60.0 * self.setup.run.checkpoint.every_minutes
        return (late and self._updates() > self.saved_updates) or journal_bytes >= enough_bytes

    async def _snapshot(self, ended: bool = False) -> str:
        async with self.saving:
            # Before the state is frozen: what comes meanwhile counts for the next snapshot.
            began_s, updates = time.monotonic(), self._updates()
            place = await self._written(await self._save(ended))
            self.saved_updates, self.saved_s = updates, began_s
            if self.uploader is not None:
                self.uploader.wake()
            return place

    def _begin_snapshot(self, ended: bool) -> Future[int]:
        begun = super()._begin_snapshot(ended)
        self.carried_bytes = self.journal.segment_bytes
        # On the server's thread, between two messages: those of the frozen state.
        versions = self.server.own_versions
        begun.add_done_callback(lambda done: done.exception() or self.safe.update({done.result(): versions}))
        return begun

    def _updates(self) -> int:
        """Count the updates so far: of a shard, its facts."""
        own = sum(member.updates for member in self.server.members.values())
        return own if self.server.ledger else self.server.as_shard.count

    def _deliver(self, send: Send) -> None:
        if send.to != GLOBAL:
            self.service.deliver(send)
        elif self.region_client is not None:
            self.region_client.deliver(send)

    def _is_wide_area(self, peer: str) -> bool:
        """Whether a connection is on a link between regions: in the global server all are, in a region server those
        to the global server and its shards, which are known by their ports."""
        above = self.setup.cluster.global_server, *shards_of(self.setup.cluster, GLOBAL)
        return self.server.name == GLOBAL or peer.rpartition(":")[2] in {str(each.port) for each in above}

    def _wide_area(self) -> Traffic:
        """Bytes of this server's links between regions, with those of its shards."""
        own = self.tcp_counters.total
        return own if self.shards is None else self.shards.with_links(own)

    def _with_members(self) -> dict[str, Traffic]:
        """Bytes with each member, with those of this server's shards."""
        return self._traffic() if self.shards is None else self.shards.with_peers(self._traffic())

    def _status(self, whole: bool) -> dict[str, Any]:
        """Collect what the process adds to the server's status. whole: with the bytes, which take long to count."""
        effective, ends_at = None, self.setup.run.ends_at
        if (trained_s := self.server_thread.status.get("trained_s")) and self.server.origin:
            effective = min(1.0, trained_s / max(1.0, time.time() - begun_s(self.server.origin)))
        return {
            "effective": effective,  # of the time since the run began, what is in its weights
            "connected": self.region_client is None or self.region_client.connected,
            "snapshot_updates": self.saved_updates,
            "full": self.server_thread.full,
            "doing": self.doing,
            "ends_s": ends_at.timestamp() if ends_at and self.server.name == GLOBAL else None,
            "shards": self.shards.status() if self.shards else [],
            "page": self.monitor.page_url,
            "metrics": self.monitor.metrics_url,
            "snapshots": self.uploader.status() if self.uploader else None,
            **(self._bytes_status() if whole else {}),
        }

    def _bytes_status(self) -> dict[str, Any]:
        """Collect the bytes for the server's status.

        links: bytes on the wide-area links, up towards the global server and down from it, and their highest rates
        over a second. peers: bytes with each member.
        """
        peers = {
            name: {"sent_bytes": traffic.sent_bytes, "received_bytes": traffic.received_bytes}
            for name, traffic in self._with_members().items()
        }
        return {"links": self._up_and_down(self._wide_area()), "peers": peers}

    def _gone(self) -> set[str]:
        """The members that have no connection any more, as those of a process that was killed."""
        at, peers = self.tcp_counters.open, dict(self.service.peers)
        return set() if at is None else set(peers.values()) - {name for peer, name in peers.items() if peer in at}

    def _traffic(self) -> dict[str, Traffic]:
        """Count the bytes with each member, over all its connections, in all incarnations of the server."""
        traffic = self.tcp_counters.traffic()
        members = {name: replace(before) for name, before in self.peers_before.items()}
        for peer, member in list(self.service.peers.items()):
            if peer in traffic:
                members.setdefault(member, Traffic()).join(traffic[peer])
        return members

    # -- of a region's server

    def _go_up(self) -> Coroutine[Any, Any, None]:
        """Exchange progress with the global server, until that has taken the region's goodbye."""
        # No coroutine function: the client is made at once, not when the task first runs. What the server sends
        # before there is a client would be lost.
        server = cast(RegionServer, self.server)
        self.region_client = self.sampler.region_client = RegionClient(
            self.server_thread,
            server,
            self._link_above(server),
            on_lost=lambda updates: self.events.write(UpdatesLost(updates)),
            on_acknowledged=lambda *u: self.events.write(Acknowledged(server.name, server.speaks_as, *u)),
            on_joined=lambda: note_origin(self.folder.parent, server.origin),
            metrics=self.sampler.metrics,
            first=partial(first_answers, self.setup.run, server.parameter_map, server.numbers),
            times=self.service.answer_timer.times,
        )
        return self.region_client.run()

    def _link_above(self, server: RegionServer) -> GrpcClient:
        """Make the link to the global server: of a shard, to the shard that has the same fragments there; of the
        ledger of a region with shards, to the ledger."""
        cluster, who, shard = self.setup.cluster, (server.name, server.speaks_as), self.setup.shard
        if shard is not None:
            return GrpcClient(str(cluster.global_shards[shard]), *who, self.trust("shard", GLOBAL))
        above = shards_above(cluster, server.parameter_map, "region", server.name, GLOBAL)
        own = None if server.part.dealt else above
        return link_to(str(cluster.global_server), *who, self.trust("global", GLOBAL), own)
