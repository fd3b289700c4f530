"""The production's servers without tensors and payloads, for timing: the store behind them holds nothing."""

from __future__ import annotations

from typing import Any, TypeVar

from geotrain.outer.codec import Codec
from geotrain.outer.messages import Answer, ChunkWeights, Join, UpdatePart
from geotrain.outer.rules.rule import Inputs
from geotrain.outer.server.server import Server
from geotrain.outer.server.store import Decoded, Store

S = TypeVar("S", bound=Server)


class _EmptyStore(Store):
    """Drop vectors and payloads: a simulated day has millions."""

    def apply(self, member: str, fragment: int, sequence: int, version: int, inputs: Inputs) -> None:
        pass

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.given: dict[tuple[str, int], int] = {}  # member and fragment → version of the answer

    def freeze(self, member: str, fragment: int, sequence: int, version: int) -> None:
        self.given[member, fragment] = version

    def answer(self, member: str, part: int, fragment: int) -> tuple[ChunkWeights, ...]:
        version = self.given[member, fragment]
        return tuple(ChunkWeights(chunk, version, b"") for chunk in self.parameter_map.chunk_numbers[fragment])

    def forget(self, *args: Any, **kwargs: Any) -> None:
        pass

    def send_up(self, fragment: int, sequence: int, inputs: Inputs) -> None:
        pass

    def merge(self, fragment: int, first: bool, inputs: Inputs) -> None:
        pass

    def decode(self, member: str, fragment: int, sequence: int) -> list[Decoded]:
        return []

    def receive_join(self, join: Join) -> None:
        pass

    def receive_weights(self, answer: Answer) -> list[Decoded]:
        return []

    def receive_part(self, part: UpdatePart) -> UpdatePart:
        return part

    def going_up(self, update: UpdatePart) -> UpdatePart:
        return update


class _NoBytes(Codec):
    """A codec whose payloads are empty: the network counts the bytes of messages."""

    def __init__(self) -> None:
        self.name = "nothing"

    def encoded_bytes(self, numel: int) -> int:
        return 0


def timed(server: S) -> S:
    """Make a server that keeps no tensors, and reports no updates. Returns it."""
    core = server.core
    core.up = _NoBytes()
    core.store = _EmptyStore(core.name, core.parameter_map, (), core.rule, core.up, core.down)
    server.intake.norms = None  # of nothing
    server.answers.reports_updates = False
    return server
