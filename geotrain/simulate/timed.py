"""The production's servers without tensors and payloads, for timing: the coordinator is the production's, the shard
behind it holds nothing."""

from __future__ import annotations

from typing import Any

from geotrain.outer.codec import Codec
from geotrain.outer.messages import Answer, ChunkWeights, Join, UpdatePart
from geotrain.outer.server.global_server import GlobalServer
from geotrain.outer.server.region_server import RegionServer
from geotrain.outer.server.server import Server
from geotrain.outer.shards.local import LocalShards
from geotrain.outer.shards.protocol import Command, Decoded
from geotrain.outer.shards.shard import ServerShard


class _EmptyShards(LocalShards):
    """Drop commands and payloads: a simulated day has millions."""

    def execute(self, command: Command) -> None:
        pass

    def decode(self, member: str, fragment: int, sequence: int) -> list[Decoded]:
        return []

    def receive(self, message: Join | Answer) -> list[Decoded]:
        return []

    def receive_part(self, part: UpdatePart) -> UpdatePart:
        return part

    def going_up(self, update: UpdatePart) -> UpdatePart:
        return update

    def answer(self, member: str, part: int, fragment: int, version: int) -> tuple[ChunkWeights, ...]:
        return tuple(ChunkWeights(chunk, version, b"") for chunk in self.parameter_map.chunk_numbers[fragment])


class _NoBytes(Codec):
    """A codec whose payloads are empty: the network counts the bytes of messages."""

    def __init__(self) -> None:
        self.name = "nothing"

    def encoded_bytes(self, numel: int) -> int:
        return 0


class _Timed(Server):
    reports_updates = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.up = _NoBytes()
        self.shards = _EmptyShards(
            [ServerShard(self.name, self.parameter_map, self.parameter_map.chunks, self.rule, self.up, self.down)]
        )
        self.norms = None  # of nothing


class TimedGlobalServer(_Timed, GlobalServer):
    pass


class TimedRegionServer(_Timed, RegionServer):
    pass
