"""The production's servers without tensors behind their payloads: all they decide and say, nothing they compute."""

from __future__ import annotations

from typing import Any

from torch import Tensor, zeros

from geotrain.outer.codec import Codec
from geotrain.outer.global_server import GlobalServer
from geotrain.outer.messages import FragmentDelta, FragmentWeights
from geotrain.outer.region_server import RegionServer
from geotrain.outer.server import Member, Server


class _NoBytes(Codec):
    """Every payload is empty; what a message weighs is the network's affair."""

    def __init__(self) -> None:
        self.name = "nothing"

    def encoded_bytes(self, numel: int) -> int:
        return 0


class _Timed(Server):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.up = _NoBytes()
        self.norms = None  # of nothing
        self._nothing = [zeros(f.numel) for f in self.layout.fragments]

    def decode_update(self, name: str, member: Member, deltas: list[FragmentDelta]) -> Tensor:
        return self._nothing[deltas[0].fragment]

    def encode_weights(self, member: Member, part: int, fragment: int) -> FragmentWeights:
        return FragmentWeights(fragment, self.fragments[fragment].version, b"")


class TimedGlobalServer(_Timed, GlobalServer):
    pass


class TimedRegionServer(_Timed, RegionServer):
    def encode_progress(self, fragment: int, delta: Tensor) -> bytes:
        return b""

    def check_weights(self, weights: FragmentWeights) -> None:
        pass

    def decode_weights(self, weights: FragmentWeights) -> Tensor:
        return self._nothing[weights.fragment]
