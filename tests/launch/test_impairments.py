"""Packets on a disturbed link: nothing befalls them but what was asked for, at its rate, and the same by the same
seed."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.emulate.pump import KINDS, Impairments, Passage, payload_begin

PACKETS = 4000


def word_sum(data: bytes) -> int:
    """RFC 1071's sum of 16-bit words."""
    total = sum((high << 8) + low for high, low in zip(data[::2], (data + b"\0")[1::2], strict=False))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def checksum_fits(packet: bytes) -> bool:
    header = 4 * (packet[0] & 15)
    pseudo = packet[12:20] + b"\0\6" + (len(packet) - header).to_bytes(2)
    return word_sum(pseudo + packet[header:]) == 0xFFFF


def segment(payload: bytes, ip_options: int = 0, tcp_options: int = 0) -> bytes:
    """An IPv4 packet with a TCP segment, its TCP checksum right. Options in words of 4 bytes."""
    tcp = bytearray(b"\x1f\x90\x1f\x91" + bytes(8) + bytes([(5 + tcp_options) << 4, 0x18]) + bytes(6))
    tcp += bytes([1]) * 4 * tcp_options + payload
    head = bytearray(20) + bytes(4 * ip_options)
    head[0], head[9] = 0x45 + ip_options, 6
    head[2:4] = (len(head) + len(tcp)).to_bytes(2)
    head[12:20] = b"\xc6\x12\0\1\xc6\x12\0\2"
    tcp[16:18] = (0xFFFF - word_sum(bytes(head[12:20]) + b"\0\6" + len(tcp).to_bytes(2) + tcp)).to_bytes(2)
    assert checksum_fits(bytes(head + tcp))
    return bytes(head + tcp)


segments = st.builds(segment, st.binary(min_size=1, max_size=70), st.integers(0, 3), st.integers(0, 3))
anything = st.one_of(segments, st.binary(max_size=80), st.builds(segment, st.just(b"")))


def switched(way: int = 0, seed: int = 1, amount: float = 0.0, **rates: float) -> Impairments:
    impairments = Impairments(way)
    for kind, rate in rates.items():
        impairments.switch(kind, rate, seed, math.inf, amount)
    return impairments


@given(packets=st.lists(anything, max_size=5))
def test_nothing_befalls_packets_when_all_is_off(packets: list[bytes]) -> None:
    off, ended, never = Impairments(), Impairments(), switched(**dict.fromkeys(KINDS, 0.0))
    for kind in KINDS:
        ended.switch(kind, 1.0, 1, until_s=5.0)
    for impairments in (off, ended, never):
        for packet in packets:
            (passage,) = impairments.passages(packet, 5.0)
            assert passage.packet is packet and passage == Passage(packet)
        assert not impairments.counts


@given(packet=anything, kind=st.sampled_from(KINDS), seed=st.integers(0, 9))
def test_nothing_else_befalls_a_packet_than_what_was_said(packet: bytes, kind: str, seed: int) -> None:
    passages = switched(seed=seed, amount=0.5, **{kind: 1.0}).passages(packet, 0.0)
    if kind == "corrupt" and payload_begin(packet) is not None:
        (passage,) = passages
        assert passage == Passage(passage.packet) and len(passage.packet) == len(packet)
        return
    assert all(passage.packet is packet for passage in passages)
    assert (
        passages
        == {
            "drop": [],
            "corrupt": [Passage(packet)],
            "delay": [Passage(packet, hold_s=0.5)],
            "reorder": [Passage(packet, overtakes=True)],
            "duplicate": [Passage(packet)] * 2,
        }[kind]
    )


@given(packet=segments, repaired=st.booleans(), seed=st.integers(0, 1000))
def test_one_byte_of_a_payload_is_corrupted_and_its_checksum_is_right_only_when_repaired(
    packet: bytes, repaired: bool, seed: int
) -> None:
    impairments = switched(seed=seed, amount=float(repaired), corrupt=1.0)
    (passage,) = impairments.passages(packet, 0.0)
    begin = payload_begin(packet)
    assert begin is not None
    changed = [i for i, (a, b) in enumerate(zip(packet, passage.packet, strict=True)) if a != b]
    assert len([i for i in changed if i >= begin]) == 1
    checksum = 4 * (packet[0] & 15) + 16
    assert {i for i in changed if i < begin} <= ({checksum, checksum + 1} if repaired else set())
    assert checksum_fits(passage.packet) == repaired
    assert impairments.counts == Counter(corrupt=1, **({"repaired": 1} if repaired else {}))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rate", [0.02, 0.5])
def test_the_rate_is_what_was_said(kind: str, rate: float) -> None:
    packet, sigma = segment(b"payload"), math.sqrt(PACKETS * rate * (1 - rate))
    impairments = switched(amount=0.25, **{kind: rate})
    plain = sum(impairments.passages(packet, 0.0) == [Passage(packet)] for _ in range(PACKETS))
    assert abs(PACKETS - plain - PACKETS * rate) < 4 * sigma
    assert impairments.counts[kind] == PACKETS - plain
    if kind == "corrupt":
        corrupted = impairments.counts[kind]
        assert abs(impairments.counts["repaired"] - corrupted / 4) < 4 * math.sqrt(corrupted * 3 / 16)


def test_the_same_befalls_the_same_packets_by_the_same_seed() -> None:
    rates = dict.fromkeys(KINDS, 0.3)
    packets = [segment(bytes([n % 256]) * 20) for n in range(200)]

    def all_of(way: int, seed: int) -> list[list[Passage]]:
        impairments = switched(way, seed, 0.5, **rates)
        return [impairments.passages(packet, 0.0) for packet in packets]

    assert all_of(0, 1) == all_of(0, 1)
    assert all_of(0, 1) != all_of(0, 2)
    assert all_of(0, 1) != all_of(1, 1)


def test_what_is_switched_on_ends_at_its_time_or_by_a_new_word() -> None:
    impairments, packet = Impairments(), segment(b"payload")
    impairments.switch("drop", 1.0, 1, until_s=5.0)
    assert impairments.passages(packet, 4.9) == []
    assert impairments.passages(packet, 5.0) == [Passage(packet)]
    impairments.switch("drop", 0.0, 1, until_s=9.0)
    assert impairments.passages(packet, 4.9) == [Passage(packet)]


def test_packets_without_a_whole_tcp_payload_are_not_corrupted() -> None:
    whole = segment(b"payload")
    fragment = whole[:6] + b"\x20\x00" + whole[8:]
    datagram = whole[:9] + b"\x11" + whole[10:]
    for packet in (segment(b""), fragment, datagram, b"\x60" + whole[1:], whole[:39], b""):
        assert payload_begin(packet) is None
    assert payload_begin(whole) == 40
    assert payload_begin(segment(b"x", 2, 3)) == 60


@pytest.mark.parametrize(
    "wrong", [("melt", 0.5, 0.0), ("drop", 1.5, 0.0), ("drop", -0.1, 0.0), ("corrupt", 0.5, 2.0)]
)
def test_what_cannot_be_done_is_refused(wrong: tuple[str, float, float]) -> None:
    kind, rate, amount = wrong
    with pytest.raises(ValueError, match=kind):
        Impairments().switch(kind, rate, 1, math.inf, amount)
