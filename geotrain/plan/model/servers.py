"""Needs of one server: memory, disk, time of an update and of a recovery. The dry run prints it, the simulator
counts it, docs/operations.md has tables of it; `tests/plan/test_servers.py` holds the bytes against live tensors.

All are for the whole server; its shards divide what grows with parameters. Times are those of updates that come one
after another, from end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from geotrain.config import CodecConfig, OuterConfig
from geotrain.net.storage.disk_mirror_store import BUFFERS
from geotrain.net.storage.journal import JOURNAL_PER_STATE, MIN_JOURNAL_BYTES
from geotrain.outer.codec import make_codec, residual_dtype
from geotrain.outer.downlink import sends_changes
from geotrain.outer.rules import AsyncRegion, Rule, global_rule, region_rule
from geotrain.parameters.parameter_map import Chunk, ParameterMap, fragments_due
from geotrain.plan.model.server_rates import MEASURED, ServerRates
from geotrain.plan.model.sizes import Sizes

PROCESS_BYTES = 300 << 20  # Python, torch, gRPC; measured


@dataclass(frozen=True)
class ServerNeeds:
    """The needs of one server. kept: bytes of what it holds all the time, at most, by what it is. passing: of what
    comes and goes. snapshot: bytes of one. mirrors: bytes of those that are on the disk. disk: theirs, of all
    snapshots, while one is written, and of the journal.

    update_s: one update of every parameter by one member, from the first byte in to the last byte out. send_s: of a
    region, what sending all of its progress up and merging the answer costs; up_bytes: of that. recovery_s: from a
    kill until it listens, with an empty journal; replay_s: besides, with the longest journal.
    """

    role: Literal["region", "global"]
    kept: dict[str, int]
    passing: dict[str, int]
    snapshot_bytes: int
    mirrors_bytes: int
    disk_bytes: int
    update_s: float
    send_s: float
    up_bytes: int
    recovery_s: float
    replay_s: float

    @property
    def memory_bytes(self) -> int:
        return sum(self.kept.values()) + sum(self.passing.values())


@dataclass(frozen=True)
class Place:
    """A server's place in the hierarchy: its members, their codecs, and those of its link to the global server.
    validates: whether workers evaluate the global weights. on_disk: whether mirrors are."""

    role: Literal["region", "global"]
    rule: Rule
    members: int
    up: CodecConfig
    down: CodecConfig
    above: tuple[CodecConfig, CodecConfig] | None = None
    validates: bool = False
    on_disk: bool = False


def place_of(role: Literal["region", "global"], outer: OuterConfig, members: int, validates: bool = False) -> Place:
    names, on_disk = tuple(f"m{i}" for i in range(members)), outer.mirrors == "disk"
    if role == "region":
        rule = region_rule(outer, names, updates=1e3)
        return Place(role, rule, members, outer.local, outer.local, (outer.up, outer.down), validates, on_disk)
    return Place(role, global_rule(outer.rule, names), members, outer.up, outer.down, None, validates, on_disk)


def server_needs(
    place: Place, outer: OuterConfig, parameter_map: ParameterMap, snapshots: int, rates: ServerRates = MEASURED
) -> ServerNeeds:
    """Compute the needs of one server. snapshots: how many are kept (`checkpoint.keep`)."""
    bf16_state = outer.server_state == "bf16"
    numel, chunks, at_once = parameter_map.numel, parameter_map.chunks, _at_once(parameter_map, outer)
    due = [chunk for chunk in chunks if chunk.fragment in at_once]
    width = 2 if bf16_state else 4
    base = 4 * numel if isinstance(place.rule, AsyncRegion) else 0
    momenta = len(getattr(place.rule, "bf16_vectors", ()))
    vectors = 4 * numel + base + width * numel * momenta
    changes = sends_changes(place.down)
    state = {"vectors": vectors, "mirrors of members": 4 * numel * place.members if changes else 0}
    answer, in_flight = coded(place.down, chunks), 0
    if place.above is not None:
        up, down = place.above
        residual = residual_dtype(up, bf16_state)
        state["residual"] = residual.itemsize * numel if residual else 0
        state["mirror"] = 4 * numel if sends_changes(down) else 0
        in_flight = coded(up, chunks)
    coming = in_flight + place.members * answer
    saved = coming if changes else in_flight
    if place.rule.in_rounds:
        # A fragment is on its way up; or n deltas wait for the last one, their senders having adopted their answers.
        coming = max(in_flight, *(4 * numel * n + (place.members - n) * answer for n in range(place.members)))
        saved = coming if changes else max(in_flight, 4 * numel * (place.members - 1))
    snapshot = sum(state.values()) + saved
    on_disk = [part for part in state if part.startswith("mirror")] if place.on_disk else []
    mirrors = sum(state.pop(part) for part in on_disk)
    other = {"payloads and answers": coming}
    if place.validates:
        other["validation"] = (4 if place.role == "region" else 2) * numel
    share = max(f.numel for f in parameter_map.fragments) / numel
    largest = max(chunk.numel for chunk in chunks)
    passing = {
        # A payload's data frames are joined when the last one is here.
        "arriving": 2 * place.members * coded(place.up, due),
        "decoding": 4 * largest * len(due),
        "computing": 4 * largest,  # a vector's difference or mean
        # A snapshot reads one besides.
        "mirrors in use": min(mirrors, 4 * largest * (BUFFERS + 1)),
        "snapshot's copies": int(share * snapshot),
        "process": PROCESS_BYTES,
    }
    journal = max(MIN_JOURNAL_BYTES, JOURNAL_PER_STATE * 4 * numel)
    one_update_s = update_s(place, coded(place.up, chunks), numel, coded(place.down, chunks), rates)
    recovery_s = snapshot / 1e9 * rates.recovery_s_per_gb
    beyond_s, wide_up = 0.0, 0
    if place.above is not None:
        wide_up, wide_down = (coded(codec, chunks) for codec in place.above)
        beyond_s = send_s(numel, wide_up, rates) + merge_s(place, numel, wide_down, rates)
    replay_s = journal / max(1, coded(place.up, chunks)) * one_update_s
    disk = mirrors + (snapshots + 1) * snapshot + snapshots * journal
    sizes = snapshot, mirrors, disk
    return ServerNeeds(
        place.role, state | other, passing, *sizes, one_update_s, beyond_s, wide_up, recovery_s, replay_s
    )


def update_s(place: Place, in_bytes: float, numel: float, out_bytes: float, rates: ServerRates = MEASURED) -> float:
    """Compute the seconds of a member's update of so many parameters."""
    parameter = rates.of_parameter
    changes = sends_changes(place.down)
    # A change is coded as a region's progress is, and decoded into the mirror.
    answer = parameter["up_encode"] + parameter["decode_and_norm"] if changes else parameter["answer"]
    mirror = parameter["mirror"] if place.on_disk and changes else 0.0
    ns = _taken_in_ns(in_bytes, rates) + _sent_ns(out_bytes, rates)
    # It is decoded while the journal flushes.
    ns -= min(parameter["decode_and_norm"] * numel, rates.of_byte["journal_flush"] * in_bytes)
    return (ns + (parameter["decode_and_norm"] + parameter["rule"] + answer + mirror) * numel) / 1e9


def send_s(numel: float, up_bytes: float, rates: ServerRates = MEASURED) -> float:
    """Compute the seconds of a region's update of so many parameters to the global server."""
    return (rates.of_parameter["up_encode"] * numel + _sent_ns(up_bytes, rates)) / 1e9


def merge_s(place: Place, numel: float, down_bytes: float, rates: ServerRates = MEASURED) -> float:
    """Compute the seconds of merging the global server's answer."""
    on_disk = place.on_disk and place.above is not None and sends_changes(place.above[1])
    mirror = rates.of_parameter["mirror"] if on_disk else 0.0
    return (_taken_in_ns(down_bytes, rates) + (rates.of_parameter["merge"] + mirror) * numel) / 1e9


def _taken_in_ns(count_bytes: float, rates: ServerRates) -> float:
    """Compute the nanoseconds until a payload has arrived and is on the disk."""
    return sum(rates.of_byte[s] for s in ("frames_in", "journal_write", "journal_flush", "between")) * count_bytes


def _sent_ns(count_bytes: float, rates: ServerRates) -> float:
    """Compute the nanoseconds until a payload has been sent."""
    return (rates.of_byte["frames_out"] + rates.of_byte["between"]) * count_bytes


@dataclass(frozen=True)
class ServerSeconds:
    """Holds the seconds of a server for each fragment. update: for a member's update, from its first
    byte to its answer's last. send, merge: of a region, for its update to the global server, and for the answer."""

    update: tuple[float, ...] = ()
    send: tuple[float, ...] = ()
    merge: tuple[float, ...] = ()

    def over(self, share: float) -> ServerSeconds:
        """Compute the seconds of shards that work side by side. share: of the model, that the fullest has.

        It assumes that each fragment's pieces are dealt as evenly as all of them. Of a fragment that is not cut
        (`outer.fragments.pieces`) one shard does all the work: the server's load is right then, the answer later.
        """
        return ServerSeconds(*(tuple(s * share for s in each) for each in (self.update, self.send, self.merge)))


def server_seconds(place: Place, sizes: Sizes, rates: ServerRates = MEASURED) -> ServerSeconds:
    """Compute the seconds of each fragment of these sizes."""
    members = sizes.local if place.above else sizes.wide
    update = zip(members.up, sizes.numels, members.down, strict=True)
    updates = tuple(update_s(place, up, numel, down, rates) for up, numel, down in update)
    if place.above is None:
        return ServerSeconds(updates)
    wide = list(zip(sizes.numels, sizes.wide.up, sizes.wide.down, strict=True))
    return ServerSeconds(
        updates,
        tuple(send_s(numel, up, rates) for numel, up, _ in wide),
        tuple(merge_s(place, numel, down, rates) for numel, _, down in wide),
    )


def coded(codec: CodecConfig, chunks: Sequence[Chunk]) -> int:
    """Count the bytes of these chunks when coded."""
    bytes_of = cache(make_codec(codec).encoded_bytes)
    return sum(bytes_of(chunk.numel) for chunk in chunks)


def _at_once(parameter_map: ParameterMap, outer: OuterConfig) -> set[int]:
    """The fragments of the largest update."""
    groups = parameter_map.groups
    steps = (set(fragments_due(groups, outer.local_steps, step)) for step in range(1, outer.local_steps + 1))
    return max(steps, key=lambda due: sum(parameter_map.fragments[f].numel for f in due))
