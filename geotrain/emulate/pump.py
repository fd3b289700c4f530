"""Carries IP packets between pairs of TUN devices, each after a fixed delay, which stands for a link's distance.

    python pump.py CONTROL NAME FD FD DELAY_S [NAME FD FD DELAY_S …]

Each FD is an open TUN device, whose queueing discipline has limited the rate before a packet gets here. CONTROL is
the path of a FIFO, which the pump makes ("-": none). It reads lines from there that disturb a link:

    NAME cut SECONDS                        no packet passes; those on their way are lost
    NAME slow SECONDS BYTES_PER_S           no more than this passes, each way
    NAME drop SECONDS RATE SEED             this share of the packets is lost
    NAME corrupt SECONDS RATE SEED REPAIRED … of the TCP segments with a payload have bits of it flipped, the share
                                            REPAIRED of those with their checksum made right again
    NAME delay SECONDS RATE SEED HOLD_S     … is held for so long, and what comes behind waits with it
    NAME reorder SECONDS RATE SEED          … passes all that is on its way
    NAME duplicate SECONDS RATE SEED        … arrives twice

A disturbance lasts for SECONDS, or until the next line of its kind. The pump runs until SIGTERM, then prints what it
did and the CPU time that this took, as a line of JSON. It uses only the standard library, so that it starts in
milliseconds:
`python -I -S pump.py`.
"""

import contextlib
import json
import os
import random
import resource
import select
import signal
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

PACKET_BYTES = 65536
BATCH_PACKETS = 64  # at most so many are read from one device before the others get their turn
QUEUE_BYTES = 256 << 20  # of each direction: as much as a 10 Gbit/s link of 200 ms holds
KINDS = ("drop", "corrupt", "delay", "reorder", "duplicate")  # in the order in which they happen to a packet
TCP = 6  # the protocol's number in IPv4


# ------------------------------------------------------------ what a disturbed link does to packets


@dataclass(frozen=True)
class Passage:
    """A packet to be delivered. hold_s: how much later than usual; the packets behind it wait with it. overtakes: it
    is delivered at once, before all packets that are under way."""

    packet: bytes
    hold_s: float = 0.0
    overtakes: bool = False


@dataclass(frozen=True)
class ActiveImpairment:
    """One kind of impairment while it lasts. rate: share of the packets. amount: as in `Impairments.switch`."""

    rate: float
    until_s: float
    amount: float
    dice: random.Random


class Impairments:
    """The impairments of one direction of a link. It reads no clock, and equal seeds and packets give equal results.

    way: 0 or 1, the number of the direction; each has its own random numbers.
    counts: impaired packets, by kind; "repaired" counts the corrupted ones whose checksum was made right again.
    """

    def __init__(self, way: int = 0) -> None:
        self.way = way
        self.counts: Counter[str] = Counter()
        self._on: dict[str, ActiveImpairment] = {}

    def switch(self, kind: str, rate: float, seed: float, until_s: float, amount: float = 0.0) -> None:
        """Impair a share `rate` (0 to 1) of the packets, each drawn by itself, until `until_s`. This replaces the
        earlier setting of the same kind.

        amount: for "corrupt" the share of the corrupted packets whose TCP checksum is made right again; for "delay"
        seconds. Only TCP segments with a payload are corrupted: `rate` is a share of these. Raises ValueError.
        """
        if kind not in KINDS:
            raise ValueError(f"no kind of impairment: {kind!r}; known: {', '.join(KINDS)}")
        if not 0.0 <= rate <= 1.0 or amount < 0.0 or (kind == "corrupt" and amount > 1.0):
            raise ValueError(f"{kind}: rate {rate:g} or amount {amount:g} is out of its range")
        self._on[kind] = ActiveImpairment(rate, until_s, amount, random.Random(f"{seed:g} {self.way} {kind}"))

    def passages(self, packet: bytes, now_s: float) -> list[Passage]:
        """The packets that are delivered in place of one: none, itself, or two. An unimpaired packet is the same
        object."""
        hold_s, overtakes, copies = 0.0, False, 1
        for kind in KINDS:
            on = self._on.get(kind)
            if on is None or now_s >= on.until_s:
                continue
            payload = payload_begin(packet) if kind == "corrupt" else 0
            if payload is None or on.dice.random() >= on.rate:
                continue
            self.counts[kind] += 1
            if kind == "drop":
                return []
            if kind == "corrupt":
                repaired = on.dice.random() < on.amount
                self.counts["repaired"] += repaired
                at, mask = on.dice.randrange(payload, len(packet)), on.dice.randrange(1, 256)
                packet = corrupted(packet, at, mask, repaired)
            elif kind == "delay":
                hold_s = on.amount
            elif kind == "reorder":
                overtakes = True
            else:
                copies = 2
        return [Passage(packet, hold_s, overtakes)] * copies


def payload_begin(packet: bytes) -> int | None:
    """Offset of the payload in an IPv4 packet that holds a whole TCP segment, in bytes from the packet's
    beginning.

    None: the packet is something else, or has no payload.
    """
    # Bytes 6 and 7 hold the fragment's offset and whether there are more: a fragment is no whole segment.
    if len(packet) < 40 or packet[0] >> 4 != 4 or packet[9] != TCP or packet[6] & 0x3F or packet[7]:
        return None
    segment = 4 * (packet[0] & 15)
    if segment < 20 or segment + 20 > len(packet):
        return None
    begin = segment + 4 * (packet[segment + 12] >> 4)
    return begin if segment + 20 <= begin < len(packet) else None


def corrupted(packet: bytes, at: int, mask: int, repaired: bool) -> bytes:
    """The packet with the bits of `mask` flipped in the byte at `at`. TCP's checksum notices any change within one
    byte.

    repaired: the checksum is made right again, so that TCP does not notice (RFC 1624, equation 3).
    """
    changed = bytearray(packet)
    changed[at] ^= mask
    if repaired:
        segment = 4 * (packet[0] & 15)
        shift = 0 if (at - segment) % 2 else 8  # where the byte is in its 16-bit word
        old, new = packet[at] << shift, changed[at] << shift
        total = (0xFFFF - int.from_bytes(packet[segment + 16 : segment + 18])) + (0xFFFF - old) + new
        total = (total & 0xFFFF) + (total >> 16)
        total = (total & 0xFFFF) + (total >> 16)
        changed[segment + 16 : segment + 18] = (0xFFFF - total).to_bytes(2)
    return bytes(changed)


# ---------------------------------------------------------------------- carrying packets across


@dataclass
class Direction:
    """One direction of a link, from the device `source` to the device `target`.

    delay_s: half the round trip. cut_until_s, slow_until_s: when these disturbances end; disturbed_until_s: when all
    have ended. bytes_per_s: the rate of a slowed link; free_s: when it will have sent all that it has accepted.
    """

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
        """Read packets that wait in the device. Those for which the queue has no room are lost, as in a router."""
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
        """Begin a disturbance; `what` and `numbers` are as in the module's text. Raises ValueError, TypeError."""
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
        """Write the packets that are due, in the queue's order: one that is held holds up those behind it."""
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
    """Carry packets for ever, and execute the lines that come from `control`."""
    by_source = {d.source: d for d in directions}
    sources = [*by_source, *([] if control is None else [control])]
    while True:
        due = min((d.queue[0][0] for d in directions if d.queue), default=None)
        wait_s = None if due is None else max(0.0, due - time.monotonic())
        for source in select.select(sources, [], [], wait_s)[0]:
            if source == control:
                execute(os.read(source, 4096), directions)
            else:
                by_source[source].take_in()
        now = time.monotonic()
        for direction in directions:
            direction.put_out(now)


def execute(lines: bytes, directions: list[Direction]) -> None:
    """Execute commands. Lines come whole, since they are shorter than what a FIFO takes at once. A command that is
    wrong is reported and has no effect."""
    for line in lines.decode().splitlines():
        try:
            name, what, *numbers = line.split()
            for direction in directions:
                if direction.name == name:
                    direction.disturb(what, *map(float, numbers))
        except (TypeError, ValueError) as error:
            print(f"cannot do {line!r}: {error}", flush=True)


def main(arguments: list[str]) -> None:
    path, *links = arguments
    control = None
    if path != "-":
        making = f"{path}.{os.getpid()}"
        os.mkfifo(making, 0o600)
        # Opened for writing as well, so that it does not end when a writer closes it; and before it has its name, so
        # that whoever finds it is read.
        control = os.open(making, os.O_RDWR | os.O_NONBLOCK)
        Path(making).replace(path)
    directions = []
    for name, first, second, delay in zip(links[::4], links[1::4], links[2::4], links[3::4], strict=True):
        directions.append(Direction(name, int(first), int(second), float(delay), Impairments(0)))
        directions.append(Direction(name, int(second), int(first), float(delay), Impairments(1)))
    for direction in directions:
        os.set_blocking(direction.source, False)
    with contextlib.suppress(PermissionError):
        os.nice(-10)  # otherwise busy ranks on the same cores would lengthen the delay
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
