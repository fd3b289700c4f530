"""Looks at a running server now and then, and writes down what it sees: links, queues, memory, who is silent."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from geotrain.monitor.events import EventLog, Found, Lost, MemberSampled, ServerSampled
from geotrain.net.machine import Machine
from geotrain.net.meter import Traffic
from geotrain.net.service import Service
from geotrain.net.uplink import Uplink
from geotrain.outer.region_server import mean_metrics

LOOK_S = 1.0
LIVE = ("loss", "lr", "grad_norm", "tokens_per_s", "compute_s", "communication_s", "waiting_s", "mfu")
LOST_BEATS = 3  # so many heartbeats without a sign, and a member counts as lost


class Watch:
    """beat_s: how often members say that they live. traffic: bytes with each member by now; wide_area: of the links
    between regions that end here."""

    def __init__(
        self,
        machine: Machine,
        service: Service,
        events: EventLog,
        folder: Path,
        traffic: Callable[[], dict[str, Traffic]],
        wide_area: Traffic,
        sample_s: float,
        beat_s: float,
    ) -> None:
        self.machine, self.service, self.events, self.folder = machine, service, events, folder
        self.traffic, self.wide_area = traffic, wide_area
        self.sample_s, self.lost_s = sample_s, LOST_BEATS * beat_s
        self.uplink: Uplink | None = None
        self._lost: dict[str, float] = {}  # member → when it was last heard of
        self._before: dict[str, tuple[int, int]] = {}
        self._sampled_s = time.monotonic()
        self._flushes = 0, 0.0
        self._process = psutil.Process()

    async def run(self) -> None:
        while True:
            woke_s = time.monotonic()
            await asyncio.sleep(LOOK_S)
            if time.monotonic() - woke_s > LOOK_S + self.lost_s / 2:
                continue  # this process was stopped itself: it could not hear
            self.look_for_lost()
            if time.monotonic() - self._sampled_s >= self.sample_s:
                self.sample()

    def look_for_lost(self) -> None:
        now_s = time.monotonic()
        for name, member in self.machine.server.members.items():
            silent_s = self.service.pulse.silent_for(name, now_s)
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
        for name, member in self.machine.server.members.items():
            if member.joined:
                self._sample_member(name, traffic.get(name, Traffic()), now_s, elapsed_s)
        self._sample_server()

    def metrics(self) -> dict[str, float]:
        """What a region's heartbeat tells the global server."""
        status = self.machine.status
        here = [m for m in status["members"].values() if m["joined"] and not m["left"]]
        told = mean_metrics([{name: m[name] for name in LIVE if name in m} for m in here])
        return {
            **told,
            "workers": float(len(here)),
            "queue": float(self.machine.waiting),
            "in_flight": float(status.get("in_flight", 0)),
            "pending": float(status.get("pending", 0)),
            "region_version": float(max(status["versions"], default=0)),
            "refused_workers": float(sum(m["refused"] for m in status["members"].values())),
            "lost_workers": float(len(self._lost)),
            "retries": float(self.uplink.link.retries if self.uplink else 0),
            "rss_bytes": float(self._process.memory_info().rss),
            "disk_free_bytes": float(self._disk()[1]),
        }

    def _sample_member(self, name: str, traffic: Traffic, now_s: float, elapsed_s: float) -> None:
        sent, received = traffic.sent_bytes, traffic.received_bytes
        sent_before, received_before = self._before.get(name, (0, 0))
        self._before[name] = sent, received
        self.events.write(
            MemberSampled(
                name,
                round(self.service.pulse.silent_for(name, now_s), 2),
                sent,
                received,
                round(max(0, sent - sent_before) / elapsed_s, 1),
                round(max(0, received - received_before) / elapsed_s, 1),
                self.machine.status["members"][name]["refused"],
                self.service.beats.get(name, {}),
            )
        )

    def _sample_server(self) -> None:
        machine, status = self.machine, self.machine.status
        total, free = self._disk()
        flushes, flush_s = machine.flushes, machine.flush_s
        flushes_before, flush_s_before = self._flushes
        self._flushes = flushes, flush_s
        self.events.write(
            ServerSampled(
                rss_bytes=self._process.memory_info().rss,
                disk_free_bytes=free,
                disk_total_bytes=total,
                queue=machine.waiting,
                calls=machine.calls,
                journal_bytes=machine.journal.segment_bytes,
                journal_flushes=flushes - flushes_before,
                journal_flush_s=round(flush_s - flush_s_before, 6),
                versions=list(status["versions"]),
                wide_area_sent_bytes=self.wide_area.sent_bytes,
                wide_area_received_bytes=self.wide_area.received_bytes,
                in_flight=status.get("in_flight", 0),
                pending=status.get("pending", 0),
                open_leases=status.get("open_leases", 0),
                retries=self.uplink.link.retries if self.uplink else 0,
                connected=self.uplink is None or self.uplink.connected,
            )
        )

    def _disk(self) -> tuple[int, int]:
        """(total, free) bytes."""
        with suppress(OSError):
            usage = shutil.disk_usage(self.folder)
            return usage.total, usage.free
        return 0, 0
