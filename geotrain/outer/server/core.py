"""What the components of one server share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from geotrain.config import CodecConfig, LimitsConfig
from geotrain.outer.codec import Codec
from geotrain.outer.events import Event
from geotrain.outer.messages import Send
from geotrain.outer.rules import Counts, Rule
from geotrain.outer.server.parts import ServerPart
from geotrain.outer.server.store import Store
from geotrain.parameters.parameter_map import ParameterMap


@dataclass
class Core:
    """Plain data of a server.

    name: as others address it. role: what its members are. part: of the server that this process is. up, down: codecs
    of the links to members. store: has its vectors. fragments: what it counts of those whose first weights are known;
    a ledger has a copy of the versions of its shards'. sends, events: what `Server.handle` is about to return.
    """

    name: str
    role: Literal["region", "worker"]
    part: ServerPart
    parameter_map: ParameterMap
    rule: Rule
    up: Codec
    down: CodecConfig
    limits: LimitsConfig
    store: Store
    fragments: dict[int, Counts] = field(default_factory=dict)
    sends: list[Send] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ledger = self.part.shard is None  # whether this process keeps the server's ledger
        self.all = range(len(self.parameter_map.fragments))  # the model's fragments
        self.numbers = self.part.numbers(len(self.all))  # the fragments of this process
