"""Bytes by fragment: both ends count the same frames, each for the fragment whose payload it carries."""

from __future__ import annotations

from geotrain.net.transport import rpc, wire
from geotrain.net.transport.fragment_bytes import FragmentBytes
from geotrain.outer.messages import Answer, ChunkDelta, ChunkWeights, UpdatePart

SIZES = {3: 2 * wire.DATA_FRAME_BYTES + 5, 1: 0, 0: 100}  # of payloads, by fragment; one is empty
COUNTED = {3: SIZES[3] + 3 * wire.CRC_BYTES, 0: 100 + wire.CRC_BYTES}


def received(frames: list[bytes], kind: type) -> FragmentBytes:
    counted, reader = FragmentBytes(), wire.FrameReader(kind, limit_bytes=1 << 30)
    reader.feed(frames[0])
    count = counted.receiving(reader.header)
    for frame in frames[1:]:
        reader.feed(frame)
        count(frame)
    assert reader.complete
    return counted


def test_deltas_count_upwards_on_both_ends():
    update = UpdatePart("eu", "incarnation", 0, 1, 0, tuple(ChunkDelta(f, 0, bytes(n)) for f, n in SIZES.items()))
    sender = FragmentBytes()
    frames = list(sender.sending(update))
    assert frames == list(wire.frames(update))
    assert sender.up == received(frames, UpdatePart).up == COUNTED
    assert not sender.down


def test_weights_count_downwards_and_an_attempt_that_breaks_off_as_far_as_it_came():
    answer = Answer(0, 1, tuple(ChunkWeights(f, 0, bytes(n)) for f, n in SIZES.items()))
    sender = FragmentBytes()
    frames = sender.sending(answer)
    for _ in range(2):
        next(frames)
    assert sender.down == {3: wire.DATA_FRAME_BYTES + wire.CRC_BYTES}
    assert received(list(wire.frames(answer)), Answer).down == COUNTED


def test_a_message_without_fragments_counts_for_none():
    sender = FragmentBytes()
    assert list(sender.sending(rpc.NotYet())) == list(wire.frames(rpc.NotYet()))
    assert not sender.up and not sender.down
