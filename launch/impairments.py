"""What a disturbed link does to packets: drops, corrupts, duplicates, reorders or delays a share of them. Pure, and
the same again for the same seed and packets.

Only the standard library: `pump.py` imports it, a script that runs without site-packages.
"""

import random
from collections import Counter
from dataclasses import dataclass

KINDS = ("drop", "corrupt", "delay", "reorder", "duplicate")  # in the order in which they befall a packet
TCP = 6  # the protocol's number in IPv4


@dataclass(frozen=True)
class Passage:
    """A packet that goes on. hold_s: so much later than usual, and what is behind it waits with it. overtakes: it
    passes all that is on its way."""

    packet: bytes
    hold_s: float = 0.0
    overtakes: bool = False


@dataclass(frozen=True)
class _Switched:
    rate: float
    until_s: float
    amount: float
    dice: random.Random


class Impairments:
    """What befalls the packets of one direction. way: which of the link's two, so that they differ.

    counts: packets, by kind; "repaired" counts those of "corrupt" whose checksum was made right again.
    """

    def __init__(self, way: int = 0) -> None:
        self.way = way
        self.counts: Counter[str] = Counter()
        self._on: dict[str, _Switched] = {}

    def switch(self, kind: str, rate: float, seed: float, until_s: float, amount: float = 0.0) -> None:
        """Do this to a share `rate` (0 to 1) of the packets, each by itself, until then. It replaces what was said
        of this kind before.

        amount: "corrupt": the share of those whose TCP checksum is made right again; "delay": seconds. Only TCP
        segments with a payload are corrupted: `rate` is a share of them. Raises ValueError.
        """
        if kind not in KINDS:
            raise ValueError(f"no kind of impairment: {kind!r}; known: {', '.join(KINDS)}")
        if not 0.0 <= rate <= 1.0 or amount < 0.0 or (kind == "corrupt" and amount > 1.0):
            raise ValueError(f"{kind}: rate {rate:g} or amount {amount:g} is out of its range")
        self._on[kind] = _Switched(rate, until_s, amount, random.Random(f"{seed:g} {self.way} {kind}"))

    def passages(self, packet: bytes, now_s: float) -> list[Passage]:
        """What goes on in its place. A packet that nothing befalls is the same object."""
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
    """Where the payload of an IPv4 packet with a whole TCP segment begins; None: it is none, or has no payload."""
    if len(packet) < 40 or packet[0] >> 4 != 4 or packet[9] != TCP or packet[6] & 0x3F or packet[7]:  # fragments
        return None
    segment = 4 * (packet[0] & 15)
    if segment < 20 or segment + 20 > len(packet):
        return None
    begin = segment + 4 * (packet[segment + 12] >> 4)
    return begin if segment + 20 <= begin < len(packet) else None


def corrupted(packet: bytes, at: int, mask: int, repaired: bool) -> bytes:
    """With the bits of `mask` flipped in the byte at `at`: a change within one byte never escapes TCP's checksum.

    repaired: the checksum is made right again (RFC 1624, equation 3).
    """
    changed = bytearray(packet)
    changed[at] ^= mask
    if repaired:
        segment = 4 * (packet[0] & 15)
        shift = 0 if (at - segment) % 2 else 8  # of the byte in its 16-bit word
        old, new = packet[at] << shift, changed[at] << shift
        total = (0xFFFF - int.from_bytes(packet[segment + 16 : segment + 18])) + (0xFFFF - old) + new
        total = (total & 0xFFFF) + (total >> 16)
        total = (total & 0xFFFF) + (total >> 16)
        changed[segment + 16 : segment + 18] = (0xFFFF - total).to_bytes(2)
    return bytes(changed)
