"""Holds the servers of a simulated life to `tests.support.specification`, message by message: weights, versions, and
where each sample is. Nothing that was acknowledged may be missing after a death, nor be there twice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from geotrain.common.names import GLOBAL
from geotrain.config import OuterConfig, RegionMomentumConfig
from geotrain.outer.codec import make_codec
from geotrain.outer.events import Merged
from geotrain.outer.messages import (
    Answer,
    Join,
    Lease,
    LeaseRequest,
    Leave,
    MemberSilent,
    Release,
    Send,
    SkipSamples,
    TakeBack,
    Trained,
    UpdatePart,
    Welcome,
)
from geotrain.outer.server.server import Handled, Server
from geotrain.outer.shards.protocol import HeldAnswer, HeldPart
from geotrain.outer.shards.remote import RemoteShards
from geotrain.outer.shards.shard import ServerShard
from geotrain.parameters.parameter_map import ParameterMap, StridedSlice, numel, scatter
from geotrain.staging.interface import from_bytes
from tests.support.recorded_world import check_shards
from tests.support.specification import Specification, Vector, close

STEP = 2  # samples of an inner step


class Account:
    """Is told what each server takes and sends. Raises AssertionError where a server differs.

    regions: region → its workers. start: the first weights, by fragment, which is one chunk here.
    """

    def __init__(
        self,
        config: OuterConfig,
        parameter_map: ParameterMap,
        regions: dict[str, tuple[str, ...]],
        start: list[Tensor],
        samples: int,
    ) -> None:
        self.config, self.parameter_map, self.regions = config, parameter_map, regions
        self.spec = Specification(config, regions, start, samples, decay=0.0)
        self.codec = make_codec(config.local)
        self.deltas: dict[tuple[str, str, int], dict[int, Tensor]] = {}  # worker, incarnation, sequence → by chunk
        self.taken: set[tuple[str, int, int]] = set()  # worker, fragment, job of every delta that was applied
        # region, fragment → all weights that it has had
        self.was: defaultdict[tuple[str, int], list[Tensor]] = defaultdict(list)

    def watch(self, server: Server, lives: Callable[[], bool], fail: Callable[[str], None]) -> None:
        """Be told what this incarnation of a server does, as long as it lives. fail: is called with what is wrong."""
        take, go_on = server.take, server.go_on

        def watched(message: Any) -> Handled:
            before = server.members[message.member].incarnation if isinstance(message, Join) else ""
            handled = take(message)
            told = message.part if isinstance(message, HeldPart) else message
            judge(self._took, told.answer if isinstance(told, HeldAnswer) else told, handled, before)
            judge(self._sent, handled.sends)
            return handled

        def went_on() -> Handled:
            handled = go_on()
            judge(self._sent, handled.sends)
            judge(check_shards)
            return handled

        def judge(look: Any, *told: Any) -> None:
            try:
                if lives():
                    look(server, *told)
            except (AssertionError, KeyError) as error:
                fail(f"{server.name}: {error!r} as it was told {told!r:.200}")

        server.take, server.go_on = watched, went_on  # type: ignore[method-assign]

    def trains(self, parts: Sequence[UpdatePart], slicing: Sequence[Sequence[tuple[StridedSlice, ...]]]) -> None:
        """A worker makes an update, which its ranks are about to send."""
        deltas = {d.chunk: torch.zeros(self.parameter_map.fragments[d.chunk].numel) for d in parts[0].deltas}
        for part, cuts in zip(parts, slicing, strict=True):
            for delta in part.deltas:
                cut = cuts[delta.chunk]
                scatter(self.codec.decode(from_bytes(delta.payload), numel(cut)), cut, deltas[delta.chunk])
        self.deltas[parts[0].member, parts[0].incarnation, parts[0].sequence] = deltas

    def adopts(self, worker: str, fragment: int, weights: Tensor) -> None:
        """A worker has weights from its region, which must have had them."""
        region = next(name for name, workers in self.regions.items() if worker in workers)
        had = self.was[region, fragment]
        assert any(torch.allclose(x.float(), weights, atol=1e-4) for x in had), f"{region} never had these weights"

    def differing(self, server: str, shard: ServerShard) -> list[str]:
        """Say which weights of a shard in a process of its own are not, at the end, what they should be."""
        wanted = self.spec.top if server == GLOBAL else self.spec.region[server]
        apart = {chunk: float((v.x.double() - wanted[chunk].x).abs().max()) for chunk, v in shard.vectors.items()}
        return [f"{server}: chunk {chunk} is {far} off" for chunk, far in apart.items() if not far < 1e-4]

    # -- what servers take, and send

    def _took(self, server: Any, message: Any, handled: Handled, before: str) -> None:
        if server.name == GLOBAL:
            self._top_took(server, message, handled.reply, before)
        elif isinstance(message, Answer):
            if any(isinstance(event, Merged) for event in handled.events):
                self._merged(server, message)
        else:
            self._region_took(server, message, handled.reply)

    def _top_took(self, top: Any, message: Any, reply: Any, before: str) -> None:
        ledger = self.spec.ledger
        match message:
            case UpdatePart() if reply:
                self.spec.global_update(message.member, message)
                self._check(top, [d.chunk for d in message.deltas], self.spec.top)
            case Join():
                if before != message.incarnation:
                    self._back(top, message.member, message.leases)
                ledger.lives(message.leases, reply.gone)
            case TakeBack():
                ledger.lives(message.leases, reply.gone)
            case MemberSilent() if top.members[message.member].incarnation == message.incarnation:
                self._back(top, message.member)
            case Leave():
                self._back(top, message.member)
            case Release() if not top.rule.in_rounds:
                for number in message.leases:
                    ledger.given_back(number)
            case SkipSamples():
                for first, last in zip(message.firsts, message.lasts, strict=True):
                    for sample in range(first // STEP * STEP, -(-(last + 1) // STEP) * STEP):
                        ledger.place[sample] = "aside"
            case LeaseRequest() if isinstance(reply, Lease):
                ledger.granted(reply)
        if isinstance(message, UpdatePart | Trained):
            for number in message.leases:
                ledger.trained(number)
        table = top.lease_table
        assert table.committed_samples == ledger.committed, f"{table.committed_samples} are committed"
        assert set(table.open) == ledger.open, f"{set(table.open)} are out, {ledger.open} should be"

    def _back(self, top: Any, member: str, but: tuple[int, ...] = ()) -> None:
        """What the member held goes to others."""
        ledger = self.spec.ledger
        if not top.rule.in_rounds:
            open_now = ledger.open - set(but)
            for number in open_now:
                if ledger.leases[number].worker in self.regions[member]:
                    ledger.given_back(number)

    def _region_took(self, region: Any, message: Any, reply: Any) -> None:
        if isinstance(message, Welcome):
            assert reply == 0, "acknowledged updates are lost"
        if isinstance(message, UpdatePart) and reply:
            deltas = self.deltas[message.member, message.incarnation, message.sequence]
            trained = {(message.member, fragment, message.job) for fragment in deltas}
            again = self.taken & trained if region.rule.in_rounds else set()  # by a former incarnation
            self.taken |= trained
            if isinstance(self.config.rule, RegionMomentumConfig):
                self.spec.decay = region.rule.decay
            new = {f: delta for f, delta in deltas.items() if (message.member, f, message.job) not in again}
            self.spec.worker_update(region.name, message.member, new)
            self._check(region, deltas, self.spec.region[region.name])

    def _merged(self, region: Any, answer: Answer) -> None:
        if answer.sequence:
            for weights in answer.weights:
                self.spec.region_merges(region.name, weights)
        else:
            self.spec.region_begins(region.name, list(answer.weights))
        self._check(region, [w.chunk for w in answer.weights], self.spec.region[region.name])

    def _sent(self, server: Server, sends: tuple[Send, ...]) -> None:
        for send in sends:
            if send.to == GLOBAL and isinstance(send.message, UpdatePart):
                self.spec.region_sends(server.name, send.message)

    def _check(self, server: Any, chunks: Iterable[int], wanted: Sequence[Vector]) -> None:
        for chunk in chunks:
            told = wanted[chunk]
            if server.name != GLOBAL:
                self.was[server.name, chunk].append(told.x)
            elif server.versions[chunk] != told.version:
                raise AssertionError(f"fragment {chunk}: version {server.versions[chunk]}, not {told.version}")
            if not isinstance(server.shards, RemoteShards):
                close(server.shards.of[chunk].vectors[chunk].x, told.x)
