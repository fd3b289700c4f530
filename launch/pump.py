"""Carries IP packets between pairs of TUN devices, each packet after a fixed delay: the distance of an emulated link.

    python pump.py FD FD DELAY_S [FD FD DELAY_S …]

Each FD is an open TUN device, whose own queueing discipline has limited the rate before a packet gets here. The pump
runs until SIGTERM, then prints what it did, and what CPU time that took, as a line of JSON. Only the standard
library, so that it starts in milliseconds: `python -I -S pump.py`.
"""

import contextlib
import json
import os
import resource
import select
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass, field

PACKET_BYTES = 65536
BATCH_PACKETS = 64  # read from one device before the others get their turn
QUEUE_BYTES = 256 << 20  # per direction; what a 10 Gbit/s link of 200 ms holds


@dataclass
class Direction:
    """One way of a link."""

    source: int
    target: int
    delay_s: float
    queue: deque[tuple[float, bytes]] = field(default_factory=deque)  # (when it is due, packet)
    queued_bytes: int = 0
    packets: int = 0
    carried_bytes: int = 0
    dropped_packets: int = 0

    def take_in(self) -> None:
        """Read what the device has. Packets beyond the queue's bound are lost, as on any router."""
        for _ in range(BATCH_PACKETS):
            try:
                packet = os.read(self.source, PACKET_BYTES)
            except BlockingIOError:
                return
            if self.queued_bytes + len(packet) > QUEUE_BYTES:
                self.dropped_packets += 1
                continue
            self.queued_bytes += len(packet)
            self.queue.append((time.monotonic() + self.delay_s, packet))

    def put_out(self, now: float) -> None:
        """Write what is due."""
        while self.queue and self.queue[0][0] <= now:
            packet = self.queue.popleft()[1]
            self.queued_bytes -= len(packet)
            try:
                os.write(self.target, packet)
            except OSError:  # the device is down or full
                self.dropped_packets += 1
                continue
            self.packets += 1
            self.carried_bytes += len(packet)


def pump(directions: list[Direction]) -> None:
    """Runs for ever."""
    by_source = {d.source: d for d in directions}
    while True:
        due = min((d.queue[0][0] for d in directions if d.queue), default=None)
        wait_s = None if due is None else max(0.0, due - time.monotonic())
        for source in select.select(by_source, [], [], wait_s)[0]:
            by_source[source].take_in()
        now = time.monotonic()
        for direction in directions:
            direction.put_out(now)


def main(arguments: list[str]) -> None:
    directions = []
    for first, second, delay in zip(arguments[::3], arguments[1::3], arguments[2::3], strict=True):
        directions.append(Direction(int(first), int(second), float(delay)))
        directions.append(Direction(int(second), int(first), float(delay)))
    for direction in directions:
        os.set_blocking(direction.source, False)
    with contextlib.suppress(PermissionError):
        os.nice(-10)  # else busy ranks on the same cores lengthen the delay
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    begin = time.monotonic()
    try:
        pump(directions)
    finally:
        used = resource.getrusage(resource.RUSAGE_SELF)
        report = {
            "wall_s": round(time.monotonic() - begin, 3),
            "cpu_s": round(used.ru_utime + used.ru_stime, 3),
            "packets": sum(d.packets for d in directions),
            "carried_bytes": sum(d.carried_bytes for d in directions),
            "dropped_packets": sum(d.dropped_packets for d in directions),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
