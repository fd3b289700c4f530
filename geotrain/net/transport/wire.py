"""Encodes messages as frames, and decodes them. The dataclasses of `geotrain.outer.messages` and
`geotrain.net.transport.rpc` define the format: their fields and type hints drive encoding, decoding and validation,
so there is no other schema.

A message is one *header* frame, and *data* frames when it carries payloads (fields of type bytes):

    header      crc32 (4 bytes, little endian) + msgpack [VERSION, "Type", [field, …]], a payload given as its length
    data frame  crc32 + at most DATA_FRAME_BYTES of the payloads, which stand end to end; a data frame never spans two
                payloads

So a message of gigabytes is never built in one block, and a receiver knows every size before it allocates memory.
"""

from __future__ import annotations

import struct
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from math import isfinite
from typing import Any, Union, get_args, get_origin

import msgpack
import numpy as np
from zlib_ng.zlib_ng import crc32

from geotrain.outer.messages import PayloadSize

VERSION = 5
DATA_FRAME_BYTES = 1 << 20
MAX_HEADER_BYTES = 1 << 20
MAX_FRAME_BYTES = 4 + max(DATA_FRAME_BYTES, MAX_HEADER_BYTES)
MAX_TEXT = 4096  # characters of a str field
MAX_INT = 1 << 62
CRC_BYTES = 4
Payload = bytes | memoryview
LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = LENGTH.size + MAX_FRAME_BYTES


class WireError(ValueError):
    """Raised for bytes that are no message that is allowed here. Says what was expected and what came."""


class DamagedError(WireError):
    """Raised for a frame that was damaged on its way. Unlike other WireErrors, sending it again may help."""


# ------------------------------------------------------------------------------------------------- writing


def frames(message: Any, first_frame: int = 0) -> Iterator[bytes]:
    """Yield the message as frames: a header, then the data frames of its payloads, from `first_frame` on."""
    for body in bodies(message, first_frame):
        yield _sealed(body)


def bodies(message: Any, first_frame: int = 0) -> Iterator[Payload]:
    """Yield the frames without their checksums. Data frames are views of the payloads: nothing is copied."""
    payloads: list[Payload] = []
    header = msgpack.packb([VERSION, type(message).__name__, _plain(message, payloads)])
    if len(header) > MAX_HEADER_BYTES:
        raise WireError(f"{type(message).__name__}: a header of {len(header)} bytes; at most {MAX_HEADER_BYTES}")
    yield header
    for payload in payloads:
        view = memoryview(payload)
        for start in range(0, len(view), DATA_FRAME_BYTES):
            if first_frame:
                first_frame -= 1
            else:
                yield view[start : start + DATA_FRAME_BYTES]


def crc_of(frame: bytes) -> int:
    """Read the checksum at the beginning of a frame. A header's shows whether two messages are the same one."""
    return int.from_bytes(frame[:CRC_BYTES], "little")


def pack(message: Any) -> bytes:
    """Encode a message without payloads as its only frame. Raises WireError."""
    header, *data_frames = frames(message)
    if data_frames:
        raise WireError(f"{type(message).__name__} carries a payload and needs a stream")
    return header


def _sealed(body: Payload) -> bytes:
    return b"".join((checksum(body), body))


def checksum(body: Payload) -> bytes:
    return crc32(body).to_bytes(CRC_BYTES, "little")


def _plain(value: Any, payloads: list[Payload]) -> Any:
    if is_dataclass(value):
        return [_plain(getattr(value, f.name), payloads) for f in fields(value)]
    if isinstance(value, Payload):
        payloads.append(value)
        return len(value)
    if isinstance(value, tuple):
        return [_plain(item, payloads) for item in value]
    return value


# ------------------------------------------------------------------------------------------------- reading


class FrameReader:
    """Assembles one message from its frames. allowed: the types it may have. limit_bytes: of all its payloads."""

    def __init__(self, *allowed: type, limit_bytes: int = 0) -> None:
        self._allowed = {kind.__name__: kind for kind in allowed}
        self._limit_bytes = limit_bytes
        self._kind: type | None = None
        self._raw: Any = None  # the header's fields, as msgpack gave them
        self._lengths: list[int] = []  # of the payloads, in bytes
        self._payloads: list[Payload] = []  # those that are whole
        self._arriving = memoryview(b"")  # the payload that is arriving
        self.opening = b""  # the header frame, once it was fed
        self._missing = 0  # bytes of the payload that is arriving
        self.data_frames = 0  # how many have been fed
        self.taken_bytes = 0  # how many bytes of payloads have been fed

    @property
    def header(self) -> Any:
        """The message with `PayloadSize` in place of its payloads; known once the first frame was fed."""
        lengths = iter(self._lengths)
        return self._build(lambda length: PayloadSize(next(lengths)))

    @property
    def complete(self) -> bool:
        return self._kind is not None and len(self._payloads) == len(self._lengths)

    @property
    def message(self) -> Any:
        """The whole message. Raises WireError when frames are missing."""
        if not self.complete:
            raise WireError(f"the message ended early: {len(self._payloads)} of {len(self._lengths)} payloads came")
        payloads = iter(self._payloads)
        return self._build(lambda length: next(payloads))

    def feed(self, frame: bytes) -> None:
        """Take the next frame. Raises WireError, in particular DamagedError.

        A damaged frame changes nothing: the reader can go on with a whole one. After any other error it is useless.
        """
        if len(frame) > MAX_FRAME_BYTES:
            raise WireError(f"a frame of {len(frame)} bytes; at most {MAX_FRAME_BYTES}")
        body = memoryview(frame)[CRC_BYTES:]
        if len(frame) < CRC_BYTES or checksum(body) != frame[:CRC_BYTES]:
            raise DamagedError(f"a frame of {len(frame)} bytes is damaged: its checksum differs")
        if self._kind is None:
            self._read_header(body)
            self.opening = frame
        elif self.complete:
            raise WireError("more frames than the message has")
        else:
            self._take(body)

    def _read_header(self, body: memoryview) -> None:
        try:
            raw = msgpack.unpackb(body, strict_map_key=True)
        except (ValueError, TypeError, RecursionError) as error:
            raise WireError(f"not a message: {type(error).__name__}: {error}") from None
        if not isinstance(raw, list) or len(raw) != 3 or raw[0] != VERSION:
            raise WireError(f"not a message of version {VERSION}; both ends must run the same version of GeoTrain")
        if not isinstance(raw[1], str) or raw[1] not in self._allowed:
            name = str(raw[1])[:40]
            raise WireError(f"a message of type {name!r} is not expected here, only {', '.join(self._allowed)}")
        kind, self._raw = self._allowed[raw[1]], raw[2]
        # The first pass over the fields validates them all and collects the payloads' lengths.
        _reader(kind)(self._raw, raw[1], self._count)
        self._kind = kind
        self._next_payload()

    def _count(self, length: Any) -> Any:
        """Note a payload's length, after checking that there is room for it."""
        if type(length) is not int or not 0 <= length <= self._limit_bytes - sum(self._lengths):
            raise WireError(f"payloads of more than {self._limit_bytes} bytes are refused here")
        self._lengths.append(length)
        return length

    def _take(self, body: memoryview) -> None:
        if not 0 < len(body) <= min(self._missing, DATA_FRAME_BYTES):
            raise WireError(f"a data frame of {len(body)} bytes where {self._missing} are missing")
        begin = len(self._arriving) - self._missing
        self._arriving[begin : begin + len(body)] = body
        self._missing -= len(body)
        self.data_frames += 1
        self.taken_bytes += len(body)
        if not self._missing:
            self._payloads.append(self._arriving.toreadonly())
            self._next_payload()

    def _next_payload(self) -> None:
        """Begin the next payload that has data frames; empty ones have none and are whole at once."""
        while not self.complete and not self._lengths[len(self._payloads)]:
            self._payloads.append(b"")
        if not self.complete:
            self._missing = self._lengths[len(self._payloads)]
            self._arriving = memoryview(np.empty(self._missing, dtype=np.uint8))  # type: ignore[arg-type]

    def _build(self, payload: Callable[[int], Any]) -> Any:
        if self._kind is None:
            raise WireError("the message has not begun")
        return _reader(self._kind)(self._raw, self._kind.__name__, payload)


def unpack(frame: bytes, *allowed: type) -> Any:
    """Decode a message without payloads from its only frame. Raises WireError."""
    reader = FrameReader(*allowed)
    reader.feed(frame)
    return reader.message


# -------------------------------------------------------------------------------------- one reader for a type

# (what msgpack gave, the field's path for error messages, a function from a payload's length to the payload) → value
Read = Callable[[Any, str, Callable[[Any], Any]], Any]


@cache
def _reader(hint: Any) -> Read:
    """Make the function that turns what msgpack gives into a value of this type, or raises WireError."""
    if is_dataclass(hint):
        return _dataclass_reader(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _tuple_reader(_reader(arguments[0]))
    if hint == dict[str, float]:
        return _read_numbers
    if origin in (Union, types.UnionType) and len(arguments) == 2 and arguments[1] is type(None):
        inner = _reader(arguments[0])
        return lambda raw, at, payload: None if raw is None else inner(raw, at, payload)
    if hint is bytes:
        return lambda raw, at, payload: payload(raw)
    if hint not in PLAIN:
        raise TypeError(f"the wire has no form for {hint}")
    fits, what = PLAIN[hint]

    def read(raw: Any, at: str, payload: Callable[[Any], Any]) -> Any:
        if not fits(raw):
            shown = repr(raw) if isinstance(raw, int | float | bool) else type(raw).__name__
            raise WireError(f"{at}: {what} expected, not {shown}")
        return hint(raw)

    return read


def _dataclass_reader(kind: Any) -> Read:
    hints = typing.get_type_hints(kind)
    members = [(f.name, _reader(hints[f.name])) for f in fields(kind)]

    def read(raw: Any, at: str, payload: Callable[[Any], Any]) -> Any:
        if not isinstance(raw, list) or len(raw) != len(members):
            raise WireError(f"{at}: {len(members)} fields expected")
        return kind(*[member(v, f"{at}.{n}", payload) for (n, member), v in zip(members, raw, strict=True)])

    return read


def _tuple_reader(item: Read) -> Read:
    def read(raw: Any, at: str, payload: Callable[[Any], Any]) -> Any:
        if not isinstance(raw, list):
            raise WireError(f"{at}: a list expected, not {type(raw).__name__}")
        return tuple([item(value, at, payload) for value in raw])

    return read


# type → (whether a value from msgpack has it; how an error message names it). To Python a bool is an int, hence
# `type`.
PLAIN: dict[Any, tuple[Callable[[Any], bool], str]] = {
    str: (lambda raw: isinstance(raw, str) and len(raw) <= MAX_TEXT, f"a text of at most {MAX_TEXT} characters"),
    int: (lambda raw: type(raw) is int and -MAX_INT < raw < MAX_INT, "an integer"),
    float: (lambda raw: type(raw) in (int, float) and isfinite(raw), "a finite number"),
    bool: (lambda raw: type(raw) is bool, "true or false"),
}


def _read_numbers(raw: Any, at: str, payload: Callable[[Any], Any]) -> dict[str, float]:
    """Read a map of numbers that are shown to people. They need not be finite: a loss may be NaN."""
    if not isinstance(raw, dict) or not all(type(v) in (int, float) and type(k) is str for k, v in raw.items()):
        raise WireError(f"{at}: a map from texts to numbers expected")
    return {key: float(value) for key, value in raw.items()}
