"""What a region sends up: its progress, at most one update of each fragment at a time, and the leases whose training
that contains."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from geotrain.common.names import GLOBAL
from geotrain.outer.messages import ChunkDelta, Send, Trained, UpdatePart, Welcome
from geotrain.outer.rules import RegionRule
from geotrain.outer.server.core import Core
from geotrain.outer.server.member import MOST_LEASES, attributes, set_attributes

SAVED = "sequences", "first_versions", "global_versions", "dropped"  # attributes that a snapshot keeps as they are


class Uplink:
    """Numbers of a region's updates, and those on their way."""

    def __init__(self, core: Core, rule: RegionRule) -> None:
        self.core, self.rule = core, rule
        every = len(core.all)
        self.sequences = [0] * every  # of the last update of each that was sent up
        # Fragment → update whose answer has not come yet, without its payloads, which are in the store; in the order
        # in which they were sent.
        self.in_flight: dict[int, UpdatePart] = {}
        # Fragment → leases whose training the region's weights contain, and that go up with its next update.
        self.contains: list[list[int]] = [[] for _ in range(every)]
        self.global_versions = [0] * every
        # Versions that the first weights get here: 0, or after `start_over` those before, as versions never fall.
        self.first_versions = [0] * every
        self.dropped = 0  # updates, counted by fragment, that it had and did not send up when it started over

    @property
    def pending(self) -> int:
        """How many updates, counted by fragment, are applied here and not sent up yet."""
        return sum(state.counts.get("pending", 0) for state in self.core.fragments.values())

    @property
    def lost_updates(self) -> int:
        """How many updates, counted by fragment, were applied here and never reach the global weights."""
        return self.dropped + sum(state.counts.get("lost", 0) for state in self.core.fragments.values())

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way, or waits for an update to go up."""
        return not self.in_flight and not any(self.rule.pending(state) for state in self.core.fragments.values())

    def take_up(self, fragment: int, leases: Collection[int]) -> None:
        """Note which leases the fragment's weights contain now: the region's next update of it says so, unless that
        on its way does."""
        update = self.in_flight.get(fragment)
        known = {*self.contains[fragment], *(update.contains if update else ())}
        self.contains[fragment] += [number for number in leases if number not in known]

    def drop(self, gone: Collection[int]) -> None:
        """Name these leases no more."""
        self.contains = [[n for n in numbers if n not in gone] for numbers in self.contains]
        for fragment, update in self.in_flight.items():
            contains = tuple(n for n in update.contains if n not in gone)
            self.in_flight[fragment] = replace(update, contains=contains)

    def note_said(self, said: Trained) -> None:
        """Note that the global server knows of leases that no update named."""
        left = self.contains[said.fragment]
        left[:] = [number for number in left if number not in said.leases]

    def unnamed(self) -> list[Trained]:
        """Return what is to be said where nothing is on its way: leases that are trained and will be in no update."""
        said: list[Trained] = []
        for fragment, leases in enumerate(self.contains):
            if leases and fragment in self.core.fragments and not self.rule.pending(self.core.fragments[fragment]):
                parts = [tuple(leases[at : at + MOST_LEASES]) for at in range(0, len(leases), MOST_LEASES)]
                said += [Trained(self.core.name, fragment, part) for part in parts]
        return said

    def send(self, fragment: int, speaks_as: str, metrics: dict[str, float]) -> tuple[UpdatePart, Send]:
        """Begin an update of what is pending of a fragment. Returns it, and it with its payloads, to be sent.

        speaks_as: the incarnation under which the region speaks.
        """
        inputs, weight = self.rule.on_send(self.core.fragments[fragment])
        self.sequences[fragment] += 1
        sequence = self.sequences[fragment]
        self.core.store.send_up(fragment, sequence, inputs)
        # What an update has no room for is named by the next: its training is in the weights already.
        contains, self.contains[fragment] = self.contains[fragment], self.contains[fragment][MOST_LEASES:]
        anchor, named = self.global_versions[fragment], tuple(contains[:MOST_LEASES])
        update = self._update(speaks_as, fragment, sequence, anchor, weight, named, metrics)
        self.in_flight[fragment] = update
        whole = self._whole(update)
        return whole, Send(GLOBAL, whole)

    def _whole(self, update: UpdatePart) -> UpdatePart:
        """Fill in what is true of an update as it is sent: its payloads, and the answers that are merged here."""
        # A fragment's answer is merged before its next update leaves: all but those in flight are.
        adopted = tuple(sequence - (f in self.in_flight) for f, sequence in enumerate(self.sequences))
        return self.core.store.going_up(replace(update, adopted=adopted))

    def _update(
        self, speaks_as: str, fragment: int, sequence: int, anchor: int, weight: int, contains: tuple[int, ...],
        metrics: dict[str, float],
    ) -> UpdatePart:  # fmt: skip
        """Build an update, without its payloads. anchor: version of the global weights it starts from."""
        deltas = tuple(ChunkDelta(chunk, anchor, b"") for chunk in self.core.parameter_map.chunk_numbers[fragment])
        header = self.core.name, speaks_as, fragment, sequence
        return UpdatePart(*header, part=0, deltas=deltas, weight=weight, contains=contains, metrics=metrics)

    def resend(self, speaks_as: str) -> list[Send]:
        """Return the updates in flight, under this incarnation's name, to be sent again after a join."""
        for fragment, update in self.in_flight.items():
            self.in_flight[fragment] = replace(update, incarnation=speaks_as)
        return [Send(GLOBAL, self._whole(update)) for update in self.in_flight.values()]

    def ahead(self, welcome: Welcome) -> str:
        """Say where the global server knows more of a fragment than was sent; "": nowhere."""
        for fragment in self.core.numbers:
            known, own = welcome.sequences[fragment] - 1, self.sequences[fragment]
            if known > own and fragment in self.core.fragments:
                return f"the global server knows {known} updates of fragment {fragment}, its own state {own}"
        return ""

    def renumber(self, welcome: Welcome) -> dict[int, int]:
        """Follow the global server's count of our updates. Returns fragment → how many it acknowledged and lost."""
        lost: dict[int, int] = {}
        for f in self.core.numbers:
            # The one before that in flight was answered, so the global server should expect that or a later one.
            missing = max(0, self.sequences[f] + (f not in self.in_flight) - welcome.sequences[f])
            if missing and f in self.in_flight:
                self.in_flight[f] = replace(self.in_flight[f], sequence=welcome.sequences[f])
            self.sequences[f] = max(welcome.sequences[f] - 1, self.sequences[f] - missing)
            # It has lost versions as well, and refuses an update that starts from a version that it never gave.
            if missing and welcome.versions:
                self.global_versions[f] = min(self.global_versions[f], welcome.versions[f])
                if update := self.in_flight.get(f):
                    least = min(update.deltas[0].anchor_version, self.global_versions[f])
                    deltas = tuple(replace(d, anchor_version=least) for d in update.deltas)
                    self.in_flight[f] = replace(update, deltas=deltas)
            if missing:
                lost[f] = missing
        return lost

    def start_over(self) -> tuple[int, set[int]]:
        """Forget all weights, and what was to go up. Returns how many updates that drops, and leases that they had.

        The numbers of the last updates that were answered are kept: those in flight count as never sent.
        """
        in_flight = [update.contains for update in self.in_flight.values()]
        gone = {number for numbers in (*self.contains, *in_flight) for number in numbers}
        dropped = self.pending + sum(update.weight for update in self.in_flight.values())
        self.dropped = self.lost_updates + dropped  # beside what was lost without the ledger
        for fragment in self.in_flight:
            self.sequences[fragment] -= 1
        for fragment in self.core.numbers:
            if fragment in self.core.fragments:
                self.first_versions[fragment] = self.core.fragments[fragment].version
        self.core.fragments.clear()
        self.in_flight.clear()
        self.contains = [[] for _ in self.contains]
        self.core.store.start_over()
        return dropped, gone

    def state(self) -> dict[str, Any]:
        """Return plain JSON data, from which `load` restores this."""
        return {
            **attributes(self, SAVED),
            "contains": [list(leases) for leases in self.contains],
            "in_flight": [
                [f, u.sequence, u.weight, list(u.contains), u.metrics, u.deltas[0].anchor_version]
                for f, u in self.in_flight.items()
            ],
        }

    def load(self, saved: dict[str, Any], speaks_as: str) -> None:
        """Load what `state` returned."""
        set_attributes(self, SAVED, saved)
        self.contains = [list(leases) for leases in saved["contains"]]
        for fragment, sequence, weight, contains, metrics, anchor in saved["in_flight"]:
            update = self._update(speaks_as, fragment, sequence, anchor, weight, tuple(contains), metrics)
            self.in_flight[fragment] = update
