"""Outer blocks for tests, with the rule's own settings written beside those of the block."""

from __future__ import annotations

from typing import Any

from geotrain.config import HalosConfig, OuterConfig, RegionMomentumConfig, SyncConfig, rule_config

RULES = {"halos": HalosConfig, "region_momentum": RegionMomentumConfig, "sync": SyncConfig}


def outer_config(
    rule: str = "region_momentum", defaults: dict[str, Any] | None = None, **settings: Any
) -> OuterConfig:
    """defaults: settings, too; those that another rule has are passed over."""
    own = {field.alias or name for name, field in RULES[rule].model_fields.items()}  # type: ignore[attr-defined]
    known = own | set(OuterConfig.model_fields)
    told = {key: value for key, value in (defaults or {}).items() if key in known} | settings
    of_rule = {key: told.pop(key) for key in own & set(told)}
    return OuterConfig(rule=rule_config(rule, **of_rule), **told)
