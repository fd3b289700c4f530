"""The production's servers without tensors behind their payloads: all they decide and say, nothing they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor

from geotrain.outer.codec import Codec
from geotrain.outer.global_server import GlobalServer
from geotrain.outer.messages import FragmentDelta, FragmentWeights
from geotrain.outer.region_server import RegionServer
from geotrain.outer.server import Member, Server


class _Weightless:
    """In place of a vector: whatever is done with it, in place or not, gives it again. Even a tensor of one number
    costs microseconds an operation, and a simulated day has millions of them."""

    def _again(self, *_: Any, **__: Any) -> _Weightless:
        return self

    copy_ = clone = __sub__ = _again

    def numel(self) -> int:
        """None: the kernels leave it at that."""
        return 0

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> _Weightless:
        return _WEIGHTLESS


_WEIGHTLESS = _Weightless()
NOTHING = cast(Tensor, _WEIGHTLESS)


class _NoBytes(Codec):
    """Every payload is empty; what a message weighs is the network's affair."""

    def __init__(self) -> None:
        self.name = "nothing"

    def encoded_bytes(self, numel: int) -> int:
        return 0


class _Timed(Server):
    reports_updates = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.up = _NoBytes()
        self.norms = None  # of nothing

    def set_weights(self, vectors: list[Tensor]) -> None:
        super().set_weights([NOTHING for _ in vectors])

    def decode_update(self, name: str, member: Member, deltas: list[FragmentDelta]) -> Tensor:
        return NOTHING

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
        return NOTHING
