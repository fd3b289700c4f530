"""Rules of the outer loop: how a server applies a delta, when a region sends its progress up, and how it merges the
global weights that come back. A file for each rule.

A rule works on one fragment at a time: one half of it on its counts, the other on the vectors of a chunk (`rule.py`).
Classes named `…Region` run on region servers, classes named `…Global` on the global server (the only server of a flat
run).
"""

from __future__ import annotations

from typing import cast

from geotrain.config import HalosConfig, OuterConfig, PluggedRule, RuleConfig, SyncConfig
from geotrain.outer.rules.halos import HalosGlobal, HalosRegion
from geotrain.outer.rules.region_momentum import AveragingGlobal, MomentumRegion, momentum_decay
from geotrain.outer.rules.rule import AsyncRegion, Counts, RegionRule, Rule, Vectors
from geotrain.outer.rules.sync import SyncGlobal, SyncRegion

__all__ = ["AsyncRegion", "AveragingGlobal", "Counts", "RegionRule", "Rule", "Vectors", "global_rule", "region_rule"]


def region_rule(
    outer: OuterConfig, members: tuple[str, ...], updates: float, decay: float | None = None
) -> RegionRule:
    """The rule of a region server.

    members: names of the region's workers. updates: how many the region will apply in the whole run, from
    `updates_in_run`. decay: of the momentum at each update; None: it follows from `updates`. Only studies state one.
    """
    match config := outer.rule:
        case SyncConfig():
            return SyncRegion(members)
        case HalosConfig():
            return HalosRegion(config)
        case PluggedRule():
            return cast(RegionRule, config.region_rule(members, updates))
        case _:
            k = momentum_decay(updates, config.momentum_share) if decay is None else decay
            return MomentumRegion(config, k, outer.answers(updates / len(members)))


def global_rule(config: RuleConfig, members: tuple[str, ...]) -> Rule:
    """The rule of the global server. members: names of the regions or, in a flat run, of all workers."""
    match config:
        case SyncConfig():
            return SyncGlobal(config, members)
        case HalosConfig():
            return HalosGlobal(config)
        case PluggedRule():
            return cast(Rule, config.global_rule(members))
        case _:
            return AveragingGlobal()
