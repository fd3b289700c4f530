"""Looks at a running server now and then, and writes events about its links, queues, memory, members and waits."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from geotrain.monitor.events import (
    EventLog,
    LivenessChanged,
    MemberSampled,
    ServerSampled,
    ShardSampled,
    WaitsChanged,
)
from geotrain.net.server.grpc_service import GrpcService
from geotrain.net.server.region_client import RegionClient
from geotrain.net.server.server_thread import ServerThread
from geotrain.net.transport.tcp_counters import Traffic
from geotrain.outer.server.liveness import Liveness

LOOK_S = 1.0  # time between two looks at members and waits
REPORTED_AFTER_S = 10.0  # shorter waits are usual, and no event reports them
IN_HEARTBEATS = "queue", "in_flight", "pending", "retries", "rss_bytes", "disk_free_bytes"  # fields of ServerSampled


class Sampler:
    """Samples one server into events.

    traffic: gives the bytes with each member until now. wide_area: those of the links between regions that end here.
    sample_s: time between two samples.
    """

    def __init__(
        self,
        server_thread: ServerThread,
        service: GrpcService,
        events: EventLog,
        folder: Path,
        traffic: Callable[[], dict[str, Traffic]],
        wide_area: Callable[[], Traffic],
        sample_s: float,
    ) -> None:
        self.server_thread, self.service, self.events, self.folder = server_thread, service, events, folder
        self.traffic, self.wide_area = traffic, wide_area
        self.sample_s = sample_s
        self.region_client: RegionClient | None = None
        self._states: dict[str, Liveness] = {}  # member → as the last event reported
        self._cut_s: dict[str, float] = {}  # member that is silent → since when; Unix time
        self._waits: list[tuple[str, str]] = []  # what and whom of the waits that the last event reported
        # member → bytes sent and received at the last sample; at first, those of earlier incarnations of this server
        self._before = {name: (t.sent_bytes, t.received_bytes) for name, t in traffic().items()}
        self._sampled_s = time.monotonic()
        self._workers: list[float | None] = []  # of each region, as its last heartbeat said
        self._flushes = 0, 0.0  # the journal's flushes, their number and time, at the last sample
        self._process = psutil.Process()

    async def run(self) -> None:
        try:
            while True:
                woke_s = time.monotonic()
                await asyncio.sleep(LOOK_S)
                if time.monotonic() - woke_s > LOOK_S + self.service.failure_detector.missed_s / 2:
                    continue  # this process itself was stopped meanwhile and received nothing from members
                self.look()
                before, self._workers = self._workers, [beat.get("workers") for beat in self.service.beats.values()]
                if time.monotonic() - self._sampled_s >= self.sample_s or before != self._workers:
                    self.sample()
        finally:
            self.look()  # so that the last goodbyes are reported

    def look(self) -> None:
        """Write an event for each member that is otherwise than before, and one if what is waited for has changed."""
        status, now_s = self.service.status(whole=False), time.time()
        for name, member in status["members"].items():
            before, state = self._states.get(name, Liveness.AWAY), Liveness(member["state"])
            if state is not before:
                self._states[name] = state
                cut_s = self._cut_s.setdefault(name, now_s - member["silent_s"])
                self.events.write(LivenessChanged(name, state.value, round(now_s - cut_s, 1)))
                if not state.missing:
                    del self._cut_s[name]
        waits = [wait for wait in status["waits"] if now_s - wait["since_s"] >= REPORTED_AFTER_S]
        if (reported := [(wait["what"], wait["whom"]) for wait in waits]) != self._waits:
            self._waits = reported
            self.events.write(WaitsChanged(waits))

    def sample(self) -> None:
        members, now_s = self.service.status(whole=False)["members"], time.monotonic()
        elapsed_s, self._sampled_s = now_s - self._sampled_s, now_s
        traffic = self.traffic()
        for name, member in self.server_thread.server.members.items():
            if member.joined:
                self._sample_member(name, members[name], traffic.get(name, Traffic()), elapsed_s)
        self.events.write(self._measured())
        self._flushes = self.server_thread.flushes, self.server_thread.flush_s
        for each in self._shards():
            self.events.write(ShardSampled(**each))

    def _measured(self) -> ServerSampled:
        """Measure the server."""
        server_thread, status, link = self.server_thread, self.server_thread.status, self.region_client
        rss_bytes = disk_total_bytes = disk_free_bytes = 0
        wide_area = self.wide_area()
        with suppress(OSError, psutil.Error):  # where no file descriptor is free
            rss_bytes = self._process.memory_info().rss
            disk_total_bytes, _, disk_free_bytes = shutil.disk_usage(self.folder)
        return ServerSampled(
            rss_bytes=rss_bytes,
            disk_free_bytes=disk_free_bytes,
            disk_total_bytes=disk_total_bytes,
            queue=server_thread.waiting,
            calls=server_thread.calls,
            journal_bytes=server_thread.journal.segment_bytes,
            journal_flushes=server_thread.flushes - self._flushes[0],
            journal_flush_s=round(server_thread.flush_s - self._flushes[1], 6),
            versions=list(status["versions"]),
            wide_area_sent_bytes=wide_area.sent_bytes,
            wide_area_received_bytes=wide_area.received_bytes,
            **{name: status.get(name, 0) for name in ("in_flight", "pending", "open_leases", "set_aside_samples")},
            retries=link.link.retries if link else 0,
            connected=link is None or link.connected,
        )

    def _shards(self) -> list[dict[str, Any]]:
        return self.service.shards.status() if self.service.shards else []

    def metrics(self) -> dict[str, float]:
        """Collect what a region's heartbeat carries to the global server: what its server measures. Its workers'
        numbers come with its updates."""
        status, measured = self.server_thread.status, self._measured()
        return {
            **{name: float(getattr(measured, name)) for name in IN_HEARTBEATS},
            "workers": float(sum(state.reachable for state in self._states.values())),
            "region_version": float(max(status["versions"], default=0)),
            "refused_workers": float(sum(m["refused"] for m in status["members"].values())),
            "lost_workers": float(sum(state.missing for state in self._states.values())),
            "shards_down": float(sum(not each["up"] for each in self._shards())),
        }

    def _sample_member(self, name: str, member: Mapping[str, Any], traffic: Traffic, elapsed_s: float) -> None:
        sent, received = traffic.sent_bytes, traffic.received_bytes
        sent_before, received_before = self._before.get(name, (0, 0))
        self._before[name] = sent, received
        self.events.write(
            MemberSampled(
                name,
                member["silent_s"],
                sent,
                received,
                round(max(0, sent - sent_before) / elapsed_s, 1),
                round(max(0, received - received_before) / elapsed_s, 1),
                member["refused"],
                self.service.beats.get(name, {}),
            )
        )
