"""Looks at a running server now and then, and writes events about its links, queues and memory, and lost members."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from geotrain.monitor.events import EventLog, Found, Lost, MemberSampled, ServerSampled, ShardSampled
from geotrain.monitor.registry import LIVE
from geotrain.net.server.grpc_service import GrpcService
from geotrain.net.server.region_client import RegionClient
from geotrain.net.server.server_thread import ServerThread
from geotrain.net.transport.tcp_counters import Traffic
from geotrain.outer.server.region_server import mean_metrics

LOOK_S = 1.0  # time between two looks for lost members
IN_HEARTBEATS = "queue", "in_flight", "pending", "retries", "rss_bytes", "disk_free_bytes"  # fields of ServerSampled
LOST_BEATS = 3  # a member that was silent for the time of so many heartbeats counts as lost


class Sampler:
    """Samples one server into events.

    traffic: gives the bytes with each member until now. wide_area: bytes of the links between regions that end here.
    sample_s: time between two samples. beat_s: time between heartbeats of a member.
    """

    def __init__(
        self,
        server_thread: ServerThread,
        service: GrpcService,
        events: EventLog,
        folder: Path,
        traffic: Callable[[], dict[str, Traffic]],
        wide_area: Traffic,
        sample_s: float,
        beat_s: float,
    ) -> None:
        self.server_thread, self.service, self.events, self.folder = server_thread, service, events, folder
        self.traffic, self.wide_area = traffic, wide_area
        self.sample_s, self.lost_s = sample_s, LOST_BEATS * beat_s
        self.region_client: RegionClient | None = None
        self._lost: dict[str, float] = {}  # member → when it was last heard of
        # member → bytes sent and received at the last sample; at first, those of earlier incarnations of this server
        self._before = {name: (t.sent_bytes, t.received_bytes) for name, t in traffic().items()}
        self._sampled_s = time.monotonic()
        self._flushes = 0, 0.0  # the journal's flushes, their number and time, at the last sample
        self._process = psutil.Process()

    async def run(self) -> None:
        while True:
            woke_s = time.monotonic()
            await asyncio.sleep(LOOK_S)
            if time.monotonic() - woke_s > LOOK_S + self.lost_s / 2:
                continue  # this process itself was stopped meanwhile and could not hear the members
            self.look_for_lost()
            if time.monotonic() - self._sampled_s >= self.sample_s:
                self.sample()

    def look_for_lost(self) -> None:
        now_s = time.monotonic()
        for name, member in self.server_thread.server.members.items():
            silent_s = self.service.failure_detector.silent_for(name, now_s)
            if member.left:
                self._lost.pop(name, None)
            elif name in self._lost and silent_s < self.lost_s:
                self.events.write(Found(name, round(now_s - silent_s - self._lost.pop(name), 1)))
            elif name not in self._lost and member.joined and silent_s >= self.lost_s:
                self._lost[name] = now_s - silent_s
                self.events.write(Lost(name, round(silent_s, 1)))

    def sample(self) -> None:
        now_s = time.monotonic()
        elapsed_s, self._sampled_s = now_s - self._sampled_s, now_s
        traffic = self.traffic()
        for name, member in self.server_thread.server.members.items():
            if member.joined:
                self._sample_member(name, traffic.get(name, Traffic()), now_s, elapsed_s)
        self.events.write(self._measured())
        self._flushes = self.server_thread.flushes, self.server_thread.flush_s
        for each in self._shards():
            self.events.write(ShardSampled(**each))

    def _measured(self) -> ServerSampled:
        """Measure the server."""
        server_thread, status, link = self.server_thread, self.server_thread.status, self.region_client
        rss_bytes = disk_total_bytes = disk_free_bytes = 0
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
            wide_area_sent_bytes=self.wide_area.sent_bytes,
            wide_area_received_bytes=self.wide_area.received_bytes,
            **{name: status.get(name, 0) for name in ("in_flight", "pending", "open_leases", "set_aside_samples")},
            retries=link.link.retries if link else 0,
            connected=link is None or link.connected,
        )

    def _shards(self) -> list[dict[str, Any]]:
        return self.service.shards.status() if self.service.shards else []

    def metrics(self) -> dict[str, float]:
        """Collect the numbers that a region's heartbeat carries to the global server."""
        status, measured = self.server_thread.status, self._measured()
        here = [m for m in status["members"].values() if m["joined"] and not m["left"]]
        return {
            **mean_metrics([{name: m[name] for name in LIVE if name in m} for m in here]),
            **{name: float(getattr(measured, name)) for name in IN_HEARTBEATS},
            "workers": float(len(here)),
            "region_version": float(max(status["versions"], default=0)),
            "refused_workers": float(sum(m["refused"] for m in status["members"].values())),
            "lost_workers": float(len(self._lost)),
            "shards_down": float(sum(not each["up"] for each in self._shards())),
        }

    def _sample_member(self, name: str, traffic: Traffic, now_s: float, elapsed_s: float) -> None:
        sent, received = traffic.sent_bytes, traffic.received_bytes
        sent_before, received_before = self._before.get(name, (0, 0))
        self._before[name] = sent, received
        self.events.write(
            MemberSampled(
                name,
                round(self.service.failure_detector.silent_for(name, now_s), 2),
                sent,
                received,
                round(max(0, sent - sent_before) / elapsed_s, 1),
                round(max(0, received - received_before) / elapsed_s, 1),
                self.server_thread.status["members"][name]["refused"],
                self.service.beats.get(name, {}),
            )
        )
