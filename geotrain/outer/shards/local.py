"""A server's shards in the process of its coordinator."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from geotrain.outer.downlink import sends_changes
from geotrain.outer.messages import Answer, ChunkWeights, Join, Message, UpdatePart
from geotrain.outer.mirror_store import MirrorStore
from geotrain.outer.shards.protocol import Command, Decoded, FromShards, Shards, bare, with_payloads
from geotrain.outer.shards.shard import DISPENSABLE, ServerShard
from geotrain.parameters.parameter_map import ParameterMapError


class LocalShards(Shards):
    """Shards whose vectors are in this process. all: the shards. of: chunk → the shard that has it."""

    def __init__(self, shards: Sequence[ServerShard]) -> None:
        self.all, self.parameter_map = shards, shards[0].parameter_map
        self.of = {chunk.index: shard for shard in shards for chunk in shard.chunks}

    def unwrap(self, message: Message | FromShards) -> Message | None:
        return message  # type: ignore[return-value]  # members' messages are for coordinator and shards alike

    def execute(self, command: Command) -> None:
        for shard in self.all:
            shard.execute(command)

    def decode(self, member: str, fragment: int, sequence: int) -> list[Decoded]:
        decoded = [each for shard in self.all for each in shard.decode(member, fragment, sequence)]
        return sorted(decoded, key=lambda each: (each.chunk, each.part))

    def receive_part(self, part: UpdatePart) -> UpdatePart:
        for shard in self.all:
            shard.receive(part)
        return bare(part)

    def receive(self, message: Join | Answer) -> list[Decoded]:
        faults = [fault for shard in self.all for fault in shard.receive(message)]
        return sorted(faults, key=lambda fault: fault.chunk)

    def as_received(self, part: UpdatePart) -> UpdatePart:
        update = part.fragment, part.sequence
        tables = [self.of[d.chunk].members[part.member].updates[update] for d in part.deltas]
        held = [table[part.part, d.chunk] for table, d in zip(tables, part.deltas, strict=True)]
        return with_payloads(part, [each.content for each in held])

    def going_up(self, update: UpdatePart) -> UpdatePart:
        return with_payloads(update, [self.of[delta.chunk].in_flight[delta.chunk] for delta in update.deltas])

    def answer(self, member: str, part: int, fragment: int, version: int) -> tuple[ChunkWeights, ...]:
        chunks = self.parameter_map.chunk_numbers[fragment]
        return tuple(self.of[i].members[member].answers[fragment].weights[part, i] for i in chunks)

    def copied(self, member: str, part: int, versions: Sequence[int]) -> tuple[ChunkWeights, ...]:
        chunks = self.parameter_map.chunks
        return tuple(self.of[c.index].copied(member, part, c.index, versions[c.fragment]) for c in chunks)

    def fingerprints_of(self, member: str) -> dict[int, tuple[int, int]]:
        return dict(sorted(pair for shard in self.all for pair in shard.fingerprints_of(member).items()))

    def settled(self, member: str) -> bool:
        return True  # a command is executed when `execute` returns

    def was_sent(self, member: str) -> bool:
        return bool(self.fingerprints_of(member))

    def own_fingerprints(self) -> dict[int, int]:
        return dict(sorted(pair for shard in self.all for pair in shard.downlink.fingerprints.items()))

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return all tensors, and the names of those that a state cannot do without, which fits any number of
        shards."""
        tensors = {name: tensor for shard in self.all for name, tensor in shard.state().items()}
        return tensors, {"tensors": sorted(name for name in tensors if not name.startswith(DISPENSABLE))}

    def load(self, tensors: dict[str, Tensor], meta: dict[str, Any], members: Collection[str]) -> dict[str, Any]:
        """Load tensors. What members were sent is usable where none of it is missing. Raises ParameterMapError."""
        check_whole(tensors, meta)
        for chunk in (chunk for number, _ in meta["fragments"] for chunk in self.parameter_map.chunks_of[number]):
            x = tensors.get(f"chunk.{chunk.index}.x")
            if x is None or x.numel() != chunk.numel:
                raise ParameterMapError(
                    f"the state is not cut into chunks of {self.parameter_map.chunk_elements:,} elements; resume "
                    "with the outer.fragments.chunk_elements with which the run began"
                )
        changes = any(sends_changes(shard.down) for shard in self.all)
        sent = {
            name: saved
            for name, saved in (meta["sent"].items() if changes else ())
            if name in members and tensors.keys() >= _sent_tensors(name, saved)
        }
        fingerprints = meta["region"]["fingerprints"] if "region" in meta else {}
        for shard in self.all:
            shard.load(tensors, fingerprints, sent)
        return sent

    # -- what only shards in this process have

    def decode_ahead(self, part: UpdatePart) -> None:
        """Decode a part that is about to be received, as far as buffers are free. Changes no state."""
        for shard in self.all:
            shard.decode_ahead(part)

    def weights(self, fragment: int) -> Tensor:
        """The fragment's weights: fp32, 1-D; not to be written."""
        chunks = [self.of[c.index].vectors[c.index].x for c in self.parameter_map.chunks_of[fragment]]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks)

    def set_mirror_store(self, mirror_store: MirrorStore) -> None:
        """Keep all mirrors in this store, from the beginning: the shards have no state yet."""
        for shard in self.all:
            shard.mirror_store = shard.downlink.mirror_store = mirror_store

    def watch(self, will_change: Callable[..., None]) -> None:
        """Call `will_change` with tensors of `state` before they are changed in place, for a snapshot in writing."""
        for shard in self.all:
            shard.will_change = will_change


def check_whole(tensors: Collection[str], meta: Mapping[str, Any]) -> None:
    """Raise ParameterMapError where these are not all tensors that a state cannot do without. meta: its JSON data."""
    if lacking := {*meta.get("tensors", ())} - {*tensors}:
        raise ParameterMapError(f"{len(lacking)} tensors of the state are missing, such as {min(lacking)}")


def _sent_tensors(name: str, saved: dict[str, Any]) -> set[str]:
    """Names of the tensors of what a member was sent. saved: its entry of a server's state."""
    held = {f"held.{name}.{chunk}" for chunk, _, _ in saved["fingerprints"]}
    return held | {f"answer.{name}.{chunk}" for _, _, sent in saved["answers"] for chunk, _, _ in sent}
