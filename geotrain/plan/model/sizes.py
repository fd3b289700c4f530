"""Computes the bytes of messages on the wire, by the real model and the codecs' own exact formula."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from geotrain.config import CodecConfig, OuterConfig, codec_config
from geotrain.outer.codec import make_codec
from geotrain.outer.downlink import sends_changes

PLAIN = codec_config("fp32")


@dataclass(frozen=True)
class LinkSizes:
    """Bytes of each fragment on one link: deltas up, answers down, and the first answer, the whole weights."""

    up: tuple[int, ...]
    down: tuple[int, ...]
    first: tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """Message sizes of a run. numels: elements of each fragment of its model."""

    config: OuterConfig
    numels: tuple[int, ...]

    @cached_property
    def wide(self) -> LinkSizes:
        """Return the message sizes between the global server and its members."""
        return self._on_link(self.config.up, self.config.down)

    @cached_property
    def local(self) -> LinkSizes:
        """Return the message sizes between a region server and its workers."""
        return self._on_link(self.config.local, self.config.local)

    def _on_link(self, up: CodecConfig, down: CodecConfig) -> LinkSizes:
        first = PLAIN if sends_changes(down) else down
        return LinkSizes(*(_coded(config, self.numels) for config in (up, down, first)))


@lru_cache(maxsize=256)
def _coded(config: CodecConfig, numels: tuple[int, ...]) -> tuple[int, ...]:
    """Bytes of fragments of so many elements."""
    codec = make_codec(config)
    return tuple(codec.encoded_bytes(n) for n in numels)
