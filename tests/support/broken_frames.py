"""Input that nobody should send: for what reads frames."""

from __future__ import annotations

import random
import typing

from geotrain.net.transport import rpc, wire
from geotrain.outer.messages import Answer, ChunkDelta, ChunkWeights, Join, UpdatePart
from geotrain.parameters.parameter_map import StridedSlice


def mutations(seed: int, count: int) -> typing.Iterator[list[bytes]]:
    """Garbage, and true messages with something wrong: frames cut, flipped, resealed, swapped."""
    rng = random.Random(seed)
    slices = ((StridedSlice(0, 4, 8, 2), StridedSlice(100, 7)), ())
    samples: list[object] = [
        Join("r", "c", "l", "m", "a", "1", 0, 1, slices, slices, (1, 2)),
        UpdatePart(
            "a", "1", 0, 7, 0, (ChunkDelta(0, 3, bytes(50)), ChunkDelta(1, 3, bytes(9))), metrics={"loss": 1.0}
        ),
        Answer(0, 3, (ChunkWeights(0, 1, bytes(40), True),)),
        rpc.Pull("a", "1", 0, 1, 3, 2.0),
    ]
    for _ in range(count):
        frames = [bytearray(f) for f in wire.frames(rng.choice(samples))]
        for _ in range(rng.randint(1, 4)):
            frame = rng.choice(frames)
            kind = rng.randrange(5)
            if kind == 0 and len(frame) > 5:  # a bit flips, and the checksum is made to fit
                frame[rng.randrange(4, len(frame))] ^= 1 << rng.randrange(8)
            elif kind == 1 and len(frame) > 6:
                del frame[rng.randrange(4, len(frame)) :]
            elif kind == 2:
                frame[4:] = rng.randbytes(rng.randrange(60))
            elif kind == 3:
                frame[4:4] = rng.choice(
                    [b"\xdd\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff", b"\xc6\xff\xff\xff\xf0", b"\x91" * 40]
                )
            else:
                rng.shuffle(frames)
        yield [bytes(wire._sealed(bytes(f[4:]))) if rng.random() < 0.9 else bytes(f) for f in frames]
