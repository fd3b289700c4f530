"""Rules and codecs of other packages (docs/extending.md).

An entry point of the group "geotrain.rules" or "geotrain.codecs" has the name that stands in the run file, and gives
a subclass of `PluggedRule` or `PluggedCodec` with that `name`: its fields are the settings. It is loaded when a run
file asks for it.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from pydantic import Field, SerializationInfo, SerializerFunctionWrapHandler, ValidatorFunctionWrapHandler

from geotrain.common.entry_points import registered
from geotrain.config.block import Block, Fraction, PositiveInt


class AsyncConfig(Block):
    """Settings that asynchronous rules share. Without a level of regions (`levels` = 1), neither has a meaning."""

    synchronous: ClassVar[bool] = False

    updates_per_send: PositiveInt = Field(4, description="K: updates a region applies before it sends up.")
    merge_alpha: Fraction = Field(0.5, description="α: weight of the global weights when a region merges.")


class PluggedRule(AsyncConfig):
    """The settings of another package's asynchronous rule, and how its two halves are made."""

    name: str

    @abstractmethod
    def region_rule(self, members: tuple[str, ...], updates: float) -> Any:
        """Make a `geotrain.outer.rules.RegionRule`.

        members: the region's workers. updates: that it will apply in the whole run.
        """

    @abstractmethod
    def global_rule(self, members: tuple[str, ...]) -> Any:
        """Make a `geotrain.outer.rules.Rule`. members: the regions or, in a flat run, all workers."""


class PluggedCodec(Block):
    """The settings of another package's codec, and how it is made."""

    name: str

    @abstractmethod
    def codec(self) -> Any:
        """Make a `geotrain.outer.codec.Codec`."""


Plugged = PluggedRule | PluggedCodec


def or_plugged(group: str, kind: type[Plugged]) -> Callable[[Any, ValidatorFunctionWrapHandler], Any]:
    """Make a validator beside a union of built-in blocks: takes what a package registered under a name first.

    kind: the class that a registered block must be a subclass of.
    """

    def validate(value: Any, built_in: ValidatorFunctionWrapHandler) -> Any:
        if isinstance(value, kind):
            return value
        named = isinstance(value, dict) and "name" in value
        block = registered(group, str(value["name"]), kind) if named else None
        return built_in(value) if block is None else block.model_validate_json(json.dumps(value))

    return validate


def serialize(value: Any, built_in: SerializerFunctionWrapHandler, info: SerializationInfo) -> Any:
    """Write a block that `or_plugged` read, whichever package it is of."""
    if isinstance(value, PluggedRule | PluggedCodec):
        return value.model_dump(mode=info.mode, by_alias=info.by_alias, exclude_defaults=info.exclude_defaults)
    return built_in(value)
