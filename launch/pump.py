"""Carries IP packets between pairs of TUN devices, each packet after a fixed delay: the distance of an emulated link.

    python pump.py CONTROL NAME FD FD DELAY_S [NAME FD FD DELAY_S …]

Each FD is an open TUN device, whose own queueing discipline has limited the rate before a packet gets here. CONTROL
is a path: a FIFO is made there, from which lines are read that disturb a link ("-": none):

    NAME cut SECONDS                        no packet passes; those on their way are lost
    NAME slow SECONDS BYTES_PER_S           no more than this passes, each way
    NAME drop SECONDS RATE SEED             this share of the packets is lost
    NAME corrupt SECONDS RATE SEED REPAIRED … of the TCP segments with a payload have bits of it flipped, the share
                                            REPAIRED of those with their checksum made right again
    NAME delay SECONDS RATE SEED HOLD_S     … is held for so long, and what comes behind waits with it
    NAME reorder SECONDS RATE SEED          … passes all that is on its way
    NAME duplicate SECONDS RATE SEED        … arrives twice

Each holds for SECONDS, or until the next line of its kind. The pump runs until SIGTERM, then prints what it did, and
what CPU time that took, as a line of JSON. Only the standard library, so that it starts in milliseconds:
`python -I -S pump.py`.
"""

import contextlib
import json
import os
import resource
import select
import signal
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING or __package__:
    from geotrain.launch.impairments import Impairments
else:  # a script, without site-packages
    sys.path.append(str(Path(__file__).parent))
    from impairments import Impairments

PACKET_BYTES = 65536
BATCH_PACKETS = 64  # read from one device before the others get their turn
QUEUE_BYTES = 256 << 20  # per direction; what a 10 Gbit/s link of 200 ms holds


@dataclass
class Direction:
    """One way of a link. cut_until_s, slow_until_s: when a disturbance ends, disturbed_until_s: when all have;
    free_s: when a slowed link is free."""

    name: str
    source: int
    target: int
    delay_s: float
    impairments: Impairments
    disturbed_until_s: float = 0.0
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
            if self.queued_bytes + len(packet) > QUEUE_BYTES:
                self.dropped_packets += 1
            elif now < self.disturbed_until_s:
                self._take_in_disturbed(packet, now)
            else:
                self.queued_bytes += len(packet)
                self.queue.append((now + self.delay_s, packet))

    def _take_in_disturbed(self, packet: bytes, now: float) -> None:
        passages = [] if now < self.cut_until_s else self.impairments.passages(packet, now)
        self.dropped_packets += not passages
        for passage in passages:
            sent_s = now
            if now < self.slow_until_s:
                self.free_s = sent_s = max(now, self.free_s) + len(passage.packet) / self.bytes_per_s
            self.queued_bytes += len(passage.packet)
            if passage.overtakes:
                self.queue.appendleft((now, passage.packet))
            else:
                self.queue.append((sent_s + self.delay_s + passage.hold_s, passage.packet))

    def disturb(self, what: str, for_s: float, *numbers: float) -> None:
        """Raises ValueError, TypeError."""
        now = time.monotonic()
        if what == "cut":
            self.cut_until_s = now + for_s
            self.dropped_packets += len(self.queue)
            self.queue.clear()
            self.queued_bytes = 0
        elif what == "slow":
            (self.bytes_per_s,) = numbers
            self.slow_until_s, self.free_s = now + for_s, now
        else:
            rate, seed, *amount = numbers
            self.impairments.switch(what, rate, seed, now + for_s, *amount)
        self.disturbed_until_s = max(self.disturbed_until_s, now + for_s)

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
    """Whole lines: they are shorter than what a FIFO takes at once. What cannot be done is said, and not done."""
    for line in lines.decode().splitlines():
        try:
            name, what, *numbers = line.split()
            for direction in directions:
                if direction.name == name:
                    direction.disturb(what, *map(float, numbers))
        except (TypeError, ValueError) as error:
            print(f"cannot do {line!r}: {error}", flush=True)


def open_control(path: str) -> int:
    with contextlib.suppress(FileExistsError):
        os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK)  # also for writing: so that it never ends


def main(arguments: list[str]) -> None:
    path, *links = arguments
    control = None if path == "-" else open_control(path)
    directions = []
    for name, first, second, delay in zip(links[::4], links[1::4], links[2::4], links[3::4], strict=True):
        directions.append(Direction(name, int(first), int(second), float(delay), Impairments(0)))
        directions.append(Direction(name, int(second), int(first), float(delay), Impairments(1)))
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
            "impaired_packets": sum((d.impairments.counts for d in directions), Counter()),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
