"""The data of a region's workers: leases that its server asks for, hands on, gives back, and asks for again."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any, Literal

from geotrain.common.names import GLOBAL
from geotrain.config import OuterConfig
from geotrain.outer.messages import Finished, Lease, LeaseRequest, NotJoined, Refused, Release, Send, TakenBack
from geotrain.outer.server.membership import JOIN_RETRY_S, Membership
from geotrain.outer.server.region_leases import MOST_BACK, RegionLeases


class RegionData:
    """Forwards workers' requests for data and remembers what came, until the update that contains its training is
    committed.

    membership, sends: of the region's server, which gives them once it has made them: the workers, and what it is
    about to send.
    """

    membership: Membership
    sends: list[Send]

    def __init__(self, workers: tuple[str, ...], config: OuterConfig, in_rounds: bool, fragments: int) -> None:
        self.leases, self.in_rounds, self.count = RegionLeases(workers, config, in_rounds), in_rounds, fragments
        self.wanted: dict[str, set[int]] = {name: set() for name in workers}  # jobs whose lease the worker waits for
        self.no_data_job: dict[str, int] = {}  # worker → its last job, if there was no data for that
        self.trained: set[int] = set()  # leases trained here, of which not all fragments have gone up with them
        self.gone_up: dict[int, set[int]] = {}  # lease → fragments that have
        # The global weights with which workers end that ask for the server's once more: the fragments of which they
        # have taken the place of the region's. None: nobody has asked.
        self.final: set[int] | None = None
        # Workers whose leases are asked for again. Lasts as long as the process: one request of each is under way.
        self.asking_back: set[str] = set()
        self.due = False  # whether the server has to look for what must be sent up

    # -- for its members' server (`Leases`)

    def holds(self, name: str) -> dict[int, Lease]:
        return self.leases.of(name)

    def said_step_s(self) -> Iterable[float]:
        return [member.step_s for member in self.membership.members.values()]

    def most_weight(self, member: str) -> int:
        return 1

    max_credible_weight = most_weight

    def check_own(self, name: str, leases: tuple[int, ...] = ()) -> None:
        if self.leases.given_back[name]:
            why = f"{name}: its data went back, as it counted as dead"
            if name in self.asking_back:
                raise Refused(f"{why}; the global server is asked whether others have it", JOIN_RETRY_S)
            raise NotJoined(f"{why}: join first", JOIN_RETRY_S)

    def begin_incarnation(self, name: str, named: tuple[int, ...]) -> None:
        # Leases of jobs that the former incarnation had begun go back. Those of others stay here: the link may be
        # slow, or cut just now.
        first = self.membership.next_job(name)
        self.wanted[name].clear()
        self.leases.asked.pop(name, None)
        self._give_back(name, [number for number, lease in self.leases.of(name).items() if lease.job < first])
        self.leases.given_back[name].clear()  # its former incarnation trained them, if anyone
        self._forget_training()

    def release_leases(self, name: str) -> None:
        self._give_back(name, self.leases.of(name))
        self.leases.forget(name)

    def give_up(self, name: str, leases: Collection[int]) -> None:
        self._release(self.leases.give_back(name, leases), failed=True)
        self._forget_training()

    # -- requests and leases

    def request(self, request: LeaseRequest) -> Lease | Finished | None:
        """Return the lease if it is here already; otherwise None, and the request goes up to the global server.

        Leases of the following jobs are asked for too, as far as the reserve reaches, so that a region that is cut
        off can train on.
        """
        worker, job = request.worker, request.job
        last = self.membership.check_request_of(request, self.wanted.get(worker, ()))
        self.check_own(worker)
        lease = self.leases.held[worker].get(job)
        if self.no_data_job.get(worker) == job:
            # Known already, as a reserve was asked for. Above, this request might wait behind one for a later job,
            # and that one for what the worker sends only when it is answered that there is no data.
            self.leases.asked[worker] = max(job, self.leases.asked.get(worker, 0))
            return Finished(worker, job)
        if lease is None:
            self.wanted[worker].add(job)
            self.sends.append(Send(GLOBAL, request))
        for ahead in self.leases.ask(worker, job, last, self.membership.members[worker].step_s):
            self.sends.append(Send(GLOBAL, replace(request, job=ahead)))
        return lease

    def receive(self, lease: Lease | Finished) -> Literal["again"] | None:
        """Take the reply to a request. A lease that nobody is there to train goes back at once: its worker has left,
        counts as dead, has done this job, or would not come to it. Returns whether the request is to be made anew,
        since the lease went back while it was under way."""
        worker, next_job = self.membership.member(lease.worker), self.membership.next_job(lease.worker)
        done = lease.job < next_job
        self.no_data_job.pop(lease.worker, None)
        if isinstance(lease, Finished) and not done:
            self.no_data_job[lease.worker] = lease.job
            self.due = True
            self._release(self.leases.give_back(lease.worker, self.leases.beyond(lease.worker, lease.job)))
        known = {*self.leases.of(lease.worker), *self.uncommitted()}
        if isinstance(lease, Lease) and lease.lease not in known:
            nobody = worker.away or done or not self.leases.follows(lease.worker, lease.job, next_job)
            # The reply was on its way as the lease went back: others are to have it.
            if lease.lease in self.leases.back:
                return None if nobody else "again"
            if nobody:
                self._release((lease.lease,))
                return None
            self.leases.held[lease.worker][lease.job] = lease
            self.final = None
        if lease.job in self.wanted[lease.worker] and not done:
            self.wanted[lease.worker].discard(lease.job)
            self.sends.append(Send(lease.worker, lease))
        return None

    def reclaim(self, back: TakenBack) -> None:
        """Hold a worker's leases again. Where others have some of them, what it has trained since would count twice:
        then this incarnation of it has to end."""
        self.membership.member(back.worker)
        self.asking_back.discard(back.worker)
        if self.leases.given_back[back.worker].keys() & set(back.gone):
            self._shut_out(back.worker)
        self.leases.back = [number for number in self.leases.back if number not in back.leases]
        self._release(self.leases.reclaim(back.worker, back.leases))
        self.trained |= {lease.lease for lease in self.leases.finished(back.worker, back.leases, self.count)}

    def recall(self) -> None:
        """Give back the leases for which no worker has asked."""
        for name in self.membership.members:
            self._release(self.leases.recall(name))

    def drop_gone(self, gone: Collection[int]) -> list[int]:
        """Drop leases that went to others while this region counted as dead: a worker that trains such begins anew.
        Returns those that were trained here.

        What was trained with them is one sum with what nobody else has trained, and goes up; the samples count once.
        """
        for name in self.membership.members:
            begun = [lease.job <= self.leases.asked.get(name, 0) for lease in self.leases.drop(name, gone)]
            if any(begun):
                self._shut_out(name)
        repeated = sorted(self.trained & set(gone))
        self.trained.difference_update(repeated)
        self._forget_training()
        return repeated

    def facts_lost(self) -> None:
        # A job of which a part was said and a part is lost would count as untrained for as long as its worker lives.
        for name in () if self.in_rounds else self.membership.members:
            self._shut_out(name, "its region's server came back from an older state")

    # -- training

    def ends(self, name: str) -> bool:
        """Whether this worker ends, as there was no data for its last job."""
        return (
            name in self.no_data_job and self.no_data_job[name] == self.leases.asked.get(name) and not self.in_rounds
        )

    @property
    def at_rest(self) -> bool:
        """Whether no worker here has anything to add to what is pending: nobody is at work, or there was no data left
        for some, and nobody holds a lease."""
        return self.membership.idle or (bool(self.no_data_job) and not any(self.leases.held.values()))

    def uncommitted(self) -> tuple[int, ...]:
        """Numbers of the leases that are trained here and not known to be committed."""
        return tuple(sorted(self.trained))

    def answered_for(self) -> tuple[int, ...]:
        """Numbers of the leases that were granted to this region and may be neither given to others nor lost."""
        return (*(number for worker in self.leases.held for number in self.leases.of(worker)), *self.uncommitted())

    def contain(self, worker: str, leases: Collection[int], fragment: int) -> tuple[list[int], int]:
        """Note that a fragment contains the training of the worker's leases. Returns those that it holds, and the
        samples of those that all fragments contain now."""
        mine, trained = self.leases.contain(worker, leases, fragment, self.count)
        self.trained |= {lease.lease for lease in trained}
        return mine, sum(lease.samples for lease in trained)

    def note_up(self, fragment: int, leases: Collection[int]) -> None:
        """Note that the global server has taken a fragment's update, which contains these leases."""
        for number in {*leases} & (self.trained | self.leases.contained.keys()):
            fragments = self.gone_up.setdefault(number, set())
            fragments.add(fragment)
            if len(fragments) == self.count:
                self.trained.discard(number)
                del self.gone_up[number]

    def note_lost(self, fragment: int) -> tuple[int, ...]:
        """Note that updates of a fragment are lost. Returns the leases that it contains, which its next update has to
        name once more: leases of which other fragments have gone up could not be committed otherwise."""
        held = [number for number, fragments in self.leases.contained.items() if fragment in fragments]
        leases = tuple(sorted({*self.trained, *held}))
        for number in leases:
            self.gone_up.get(number, set()).discard(fragment)
        return leases

    def not_up(self, numbers: Collection[int]) -> tuple[int, ...]:
        """Return the leases that one of these fragments contains and has not brought to the global server."""
        within = {**self.leases.contained, **{number: set(range(self.count)) for number in self.trained}}
        wanted = set(numbers)
        return tuple(sorted(n for n, of in within.items() if wanted & of - self.gone_up.get(n, set())))

    def start_over(self, gone: Collection[int]) -> None:
        """Give back all leases, as fragments begin again from the global weights. Of some a part of the training is
        gone: others train them anew, whatever their worker sends."""
        held = [number for worker in self.membership.members for number in self.leases.of(worker)]
        self.leases.start_over(gone)
        for name in self.membership.members:
            self.wanted[name].clear()
        if not self.in_rounds:
            self._release((*held, *sorted(self.trained.intersection(gone))))
        # Others train these anew. The rest of `trained` has gone up, whole or in part, and is not given up.
        self.trained.difference_update(gone)
        self.gone_up = {number: up for number, up in self.gone_up.items() if number not in gone}

    def begin_round_again(self, untaken: set[int]) -> None:
        """Forget the workers' deltas that are in no update that the global server has taken: those of the fragments
        `untaken`, and those that wait here for other workers'. A worker that is concerned finds its acknowledged
        update unknown when it joins: so it begins a new incarnation, with the first job that is not trained. The
        global server gives it the lease of that again.
        """
        for fragment in self.membership.core.numbers:
            of_all = [member.fragments[fragment] for member in self.membership.members.values()]
            # A round ends before the next begins: all have sent this round's, or some have and the others the last.
            taken = min(own.came for own in of_all) - (fragment in untaken)
            for own in of_all:
                if own.came > taken:
                    own.came = taken
                    own.sequence -= 1

    # -- state

    def state(self) -> dict[str, Any]:
        """Return plain JSON data, from which `load` restores what outlives the process."""
        return {
            **self.leases.state(), "spent": dict(self.no_data_job), "trained": sorted(self.trained),
            "up": [[number, sorted(up)] for number, up in sorted(self.gone_up.items())],
            "final": None if self.final is None else sorted(self.final),
        }  # fmt: skip

    def load(self, saved: dict[str, Any]) -> None:
        """Load what `state` returned."""
        self.leases.load(saved)
        self.no_data_job, self.trained = dict(saved["spent"]), set(saved["trained"])
        self.gone_up = {number: set(fragments) for number, fragments in saved["up"]}
        self.final = None if saved["final"] is None else set(saved["final"])

    # -- inside

    def _shut_out(self, name: str, why: str = "others got its data while it counted as dead") -> None:
        """Let this incarnation of the worker say no more; the next one begins from the region's weights."""
        member = self.membership.members[name]
        # Banned, not quarantined: its next incarnation may join at once.
        member.banned, member.fault = member.incarnation, why
        self.membership.forget(name)
        self.release_leases(name)
        self.leases.given_back[name].clear()
        self._forget_training()

    def _give_back(self, name: str, leases: Collection[int]) -> None:
        """Give the worker's leases back to the global server; in synchronous rounds they stay its own."""
        self._release(() if self.in_rounds else self.leases.give_back(name, leases))
        self._forget_training()

    def _forget_training(self) -> None:
        """Forget which fragments contain leases that no worker here has any more, as a restart would."""
        known = self.leases.known
        self.leases.contained = {n: within for n, within in self.leases.contained.items() if n in known}
        known = self.trained | self.leases.contained.keys()
        self.gone_up = {n: fragments for n, fragments in self.gone_up.items() if n in known}

    def _release(self, untrained: tuple[int, ...], failed: bool = False) -> None:
        if untrained:
            self.due = True
            if not self.in_rounds:  # where it stays the worker's
                self.leases.back = [*self.leases.back, *untrained][-MOST_BACK:]
            self.sends.append(Send(GLOBAL, Release(untrained, failed)))
