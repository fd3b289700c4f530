"""Carries IP packets between pairs of TUN devices, each packet after a fixed delay: the distance of an emulated link.

    python pump.py CONTROL NAME FD FD DELAY_S [NAME FD FD DELAY_S …]

Each FD is an open TUN device, whose own queueing discipline has limited the rate before a packet gets here. CONTROL
is a path: a FIFO is made there, from which lines are read that disturb a link ("-": none):

    NAME cut SECONDS              no packet passes; those on their way are lost
    NAME slow BYTES_PER_S SECONDS no more than this passes, each way

The pump runs until SIGTERM, then prints what it did, and what CPU time that took, as a line of JSON. Only the
standard library, so that it starts in milliseconds: `python -I -S pump.py`.
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
    """One way of a link. cut_until_s, slow_until_s: when a disturbance ends; free_s: when a slowed link is free."""

    name: str
    source: int
    target: int
    delay_s: float
    cut_until_s: float = 0.0
    slow_until_s: float = 0.0
    bytes_per_s: float = 0.0
    free_s: float = 0.0
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
            now = time.monotonic()
            if self.queued_bytes + len(packet) > QUEUE_BYTES or now < self.cut_until_s:
                self.dropped_packets += 1
                continue
            if now < self.slow_until_s:
                self.free_s = now = max(now, self.free_s) + len(packet) / self.bytes_per_s
            self.queued_bytes += len(packet)
            self.queue.append((now + self.delay_s, packet))

    def disturb(self, what: str, numbers: list[float]) -> None:
        now = time.monotonic()
        if what == "cut":
            self.cut_until_s = now + numbers[0]
            self.dropped_packets += len(self.queue)
            self.queue.clear()
            self.queued_bytes = 0
        elif what == "slow":
            self.bytes_per_s, self.slow_until_s, self.free_s = numbers[0], now + numbers[1], now

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


def pump(directions: list[Direction], control: int | None) -> None:
    """Runs for ever."""
    by_source = {d.source: d for d in directions}
    sources = [*by_source, *([] if control is None else [control])]
    while True:
        due = min((d.queue[0][0] for d in directions if d.queue), default=None)
        wait_s = None if due is None else max(0.0, due - time.monotonic())
        for source in select.select(sources, [], [], wait_s)[0]:
            if source == control:
                obey(os.read(source, 4096), directions)
            else:
                by_source[source].take_in()
        now = time.monotonic()
        for direction in directions:
            direction.put_out(now)


def obey(lines: bytes, directions: list[Direction]) -> None:
    """Whole lines: they are shorter than what a FIFO takes at once."""
    for line in lines.decode().splitlines():
        name, what, *numbers = line.split()
        for direction in directions:
            if direction.name == name:
                direction.disturb(what, [float(number) for number in numbers])


def open_control(path: str) -> int:
    with contextlib.suppress(FileExistsError):
        os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK)  # also for writing: so that it never ends


def main(arguments: list[str]) -> None:
    path, *links = arguments
    control = None if path == "-" else open_control(path)
    directions = []
    for name, first, second, delay in zip(links[::4], links[1::4], links[2::4], links[3::4], strict=True):
        directions.append(Direction(name, int(first), int(second), float(delay)))
        directions.append(Direction(name, int(second), int(first), float(delay)))
    for direction in directions:
        os.set_blocking(direction.source, False)
    with contextlib.suppress(PermissionError):
        os.nice(-10)  # else busy ranks on the same cores lengthen the delay
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    begin = time.monotonic()
    try:
        pump(directions, control)
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
