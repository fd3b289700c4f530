"""How many bytes a message has on the wire, from the real model and the codecs' own exact formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from geotrain.config import CodecConfig, OuterConfig
from geotrain.outer.codec import make_codec
from geotrain.outer.downlink import sends_changes

PLAIN = CodecConfig(name="fp32")


@dataclass(frozen=True)
class LinkSizes:
    """Bytes of each fragment on one link: deltas up, answers down, and the first answer, the whole weights."""

    up: tuple[int, ...]
    down: tuple[int, ...]
    first: tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """numels: elements of each fragment of the model whose training is simulated."""

    config: OuterConfig
    numels: tuple[int, ...]

    @cached_property
    def wide(self) -> LinkSizes:
        """Between the global server and its members."""
        return _link_sizes(self.config.up, self.config.down, self.numels)

    @cached_property
    def local(self) -> LinkSizes:
        """Between a region server and its workers."""
        return _link_sizes(self.config.local, self.config.local, self.numels)


def _link_sizes(up: CodecConfig, down: CodecConfig, numels: Sequence[int]) -> LinkSizes:
    def coded(config: CodecConfig) -> tuple[int, ...]:
        codec = make_codec(config)
        return tuple(codec.encoded_bytes(n) for n in numels)

    return LinkSizes(coded(up), coded(down), coded(PLAIN if sends_changes(down) else down))
