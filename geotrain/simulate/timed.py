"""The production's servers without tensors and payloads: all they decide and say, nothing they compute. Their book is
the production's, the vault behind it holds nothing."""

from __future__ import annotations

from typing import Any

from geotrain.outer.codec import Codec
from geotrain.outer.messages import Answer, Join, UpdatePart
from geotrain.outer.server.global_server import GlobalServer
from geotrain.outer.server.region_server import RegionServer
from geotrain.outer.server.server import Server
from geotrain.outer.shards.shard import Decoded, Order, Vault
from geotrain.outer.shards.shards import Vaults


class _EmptyVault(Vault):
    def answer(self, member: str, sequence: int, part: int, piece: int) -> tuple[bytes, bool]:
        return b"", False


class _EmptyVaults(Vaults):
    """Orders and payloads go nowhere: a simulated day has millions."""

    def obey(self, order: Order) -> list[Decoded]:
        return []

    def hear(self, message: Join | UpdatePart | Answer) -> list[Decoded]:
        return []

    def hear_update(self, part: UpdatePart) -> UpdatePart:
        return part

    as_it_goes = hear_update


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
        self.vaults = _EmptyVaults(
            [_EmptyVault(self.name, self.layout, self.layout.pieces, self.rule, self.up, self.down)]
        )
        self.norms = None  # of nothing


class TimedGlobalServer(_Timed, GlobalServer):
    pass


class TimedRegionServer(_Timed, RegionServer):
    pass
