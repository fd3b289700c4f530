"""Messages ↔ frames: every message comes back as it was, and nothing else comes through."""

from __future__ import annotations

import random
import time
import typing

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.net.transport import rpc, wire
from geotrain.outer import messages
from geotrain.outer.messages import (
    Answer,
    ChunkDelta,
    ChunkWeights,
    Finished,
    Join,
    UpdatePart,
    Welcome,
)
from tests.support.broken_frames import mutations

ALL = (*typing.get_args(messages.Message), rpc.Ack, rpc.NotYet, rpc.Pull, rpc.AskLease, rpc.ReleaseLeases,
       rpc.AskBack, rpc.SayLeave, rpc.Control, rpc.Refusal)  # fmt: skip
LIMIT = 1 << 24

st.register_type_strategy(int, st.integers(-(1 << 61), 1 << 61))
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
st.register_type_strategy(str, st.text(max_size=40))


def there_and_back(message: object) -> object:
    reader = wire.FrameReader(type(message), limit_bytes=LIMIT)
    for frame in wire.frames(message):
        reader.feed(frame)
    return reader.message


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_message_comes_back_as_it_was(kind):
    @given(st.from_type(kind))
    def check(message):
        assert there_and_back(message) == message

    check()


@pytest.mark.parametrize(
    "size", [0, 1, wire.DATA_FRAME_BYTES, wire.DATA_FRAME_BYTES + 1, 3 * wire.DATA_FRAME_BYTES + 7]
)
def test_payloads_are_cut_into_chunks(size):
    payload = random.Random(size).randbytes(size)
    part = UpdatePart("a", "1", 0, 1, 0, (ChunkDelta(0, 0, payload), ChunkDelta(1, 0, b""), ChunkDelta(2, 5, b"x")))
    frames = list(wire.frames(part))
    assert max(len(f) for f in frames) <= wire.DATA_FRAME_BYTES + wire.CRC_BYTES
    assert len(frames) == 1 + -(-size // wire.DATA_FRAME_BYTES) + 1
    assert there_and_back(part) == part


def test_sizes_are_known_from_the_header():
    answer = Answer(0, 3, (ChunkWeights(0, 1, bytes(2_000_000)),))
    reader = wire.FrameReader(Answer, limit_bytes=2_000_000)
    reader.feed(next(iter(wire.frames(answer))))
    assert [len(w.payload) for w in reader.header.weights] == [2_000_000]
    with pytest.raises(wire.WireError, match="payloads of more than 1999999 bytes are refused"):
        wire.FrameReader(Answer, limit_bytes=1_999_999).feed(next(iter(wire.frames(answer))))


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ([wire.VERSION, "Finished", ["a"]], "Finished: 2 fields expected"),
        ([wire.VERSION, "Finished", ["a", "2"]], r"Finished\.job: an integer expected, not str"),
        ([wire.VERSION, "Finished", ["a", True]], r"Finished\.job: an integer expected, not True"),
        ([wire.VERSION, "Finished", ["a", 2.0]], r"Finished\.job: an integer expected, not 2\.0"),
        ([wire.VERSION, "Finished", ["a", 1 << 63]], r"Finished\.job: an integer expected"),
        ([wire.VERSION, "Finished", [b"a", 1]], r"Finished\.worker: a text of at most 4096 characters"),
        ([wire.VERSION, "Finished", ["a" * 4097, 1]], r"Finished\.worker: a text of at most 4096 characters"),
        ([wire.VERSION - 1, "Finished", ["a", 1]], "same version of GeoTrain"),
        ([wire.VERSION, "Leave", ["a"]], "type 'Leave' is not expected here, only Finished"),
        ({"a": 1}, "not a message"),
    ],
)
def test_what_is_wrong_is_said(raw, reason):
    with pytest.raises(wire.WireError, match=reason):
        wire.unpack(wire._sealed(msgpack.packb(raw)), Finished)


def test_a_damaged_frame_is_told_from_a_wrong_one():
    frame = bytearray(wire.pack(Welcome(1, 2)))
    frame[-1] ^= 1
    with pytest.raises(wire.DamagedError, match="checksum"):
        wire.unpack(bytes(frame), Welcome)


def test_frames_too_many_too_few_and_of_the_wrong_size_are_refused():
    part = UpdatePart("a", "1", 0, 1, 0, (ChunkDelta(0, 0, b"12345678"),))
    header, data_frame = wire.frames(part)
    reader = wire.FrameReader(UpdatePart, limit_bytes=8)
    reader.feed(header)
    with pytest.raises(wire.WireError, match="ended early: 0 of 1 payloads"):
        _ = reader.message
    with pytest.raises(wire.WireError, match="a data frame of 9 bytes where 8 are missing"):
        reader.feed(wire._sealed(b"123456789"))
    reader.feed(data_frame)
    with pytest.raises(wire.WireError, match="more frames"):
        reader.feed(data_frame)


def test_garbage_raises_wire_errors_only_and_fast():
    """At least 20,000 inputs a minute."""
    count, refused = 5000, 0
    inputs = list(mutations(5, count))
    began = time.process_time()
    for frames in inputs:
        reader = wire.FrameReader(Join, UpdatePart, Answer, rpc.Pull, limit_bytes=1000)
        try:
            for frame in frames:
                reader.feed(frame)
            _ = reader.message
        except wire.WireError:
            refused += 1
    assert count / (time.process_time() - began) > 20_000 / 60
    assert refused > count / 2


@given(st.binary(max_size=200))
def test_any_bytes(data):
    for frame in (data, wire._sealed(data)):
        with pytest.raises(wire.WireError):
            wire.unpack(frame, *ALL)
