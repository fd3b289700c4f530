"""A worker of the virtual world: lease → inner steps → delta → weights, as `geotrain.worker.trainer` does it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any, Protocol, TypeVar

from geotrain.config import OuterConfig
from geotrain.outer.exchange import Exchange, Weights
from geotrain.outer.messages import ChunkDelta, ChunkWeights, Finished, Identity, Lease, LeaseRequest
from geotrain.parameters.parameter_map import ParameterMap, fragments_due
from geotrain.simulate.clock import Clock, Script, VirtualProcess
from geotrain.simulate.nodes import VirtualClient
from geotrain.simulate.spec import WorkerSpec
from geotrain.staging.interface import Pending, Ready

T = TypeVar("T")


class Learner(Weights, Protocol):
    """Training of a simulated worker between its exchanges."""

    every_step: bool  # whether it matters at which inner step weights are adopted

    def born(self) -> None:
        """Begin a new incarnation."""

    def train(self, lease: Lease, first: int, steps: int) -> None:
        """Begin inner steps first … first + steps − 1 (counted from 0) of the lease, with the weights as they are:
        none are adopted until the steps' time has passed."""

    def job_done(self, lease: Lease) -> dict[str, float]:
        """Return the metrics of the job's last update."""


class Idle:
    """A learner for timing only: nothing is learned, no delta weighs anything. parameter_map: of the stand-in
    tensors."""

    every_step = False

    def __init__(self, parameter_map: ParameterMap) -> None:
        self.pushes = self.holds = tuple(parameter_map.whole(chunk.index) for chunk in parameter_map.chunks)
        self._names = [fragment.parameters[0].name for fragment in parameter_map.fragments]
        self._versions = [0] * len(parameter_map.chunks)

    def parameters(self, fragments: tuple[int, ...]) -> Collection[str]:
        return [self._names[f] for f in fragments]

    def make_delta(self, chunk: int, seed: int) -> Pending[ChunkDelta]:
        return Ready(ChunkDelta(chunk, self._versions[chunk], b""))

    def when_made(self, call: Callable[[], Pending[T]]) -> Pending[T]:
        return call()

    def on_weights(self, weights: ChunkWeights, start: bool = False) -> None:
        self._versions[weights.chunk] = weights.version

    def born(self) -> None:
        pass

    def train(self, lease: Lease, first: int, steps: int) -> None:
        pass

    def job_done(self, lease: Lease) -> dict[str, float]:
        return {}


class OneRank:
    """The ranks of a simulated worker, which are one. shares: parts of the model by a name in each fragment."""

    rank, world_size = 0, 1

    def __init__(self, spec: WorkerSpec, shares: Mapping[str, float]) -> None:
        self.spec, self.shares = spec, shares
        self._settle_s = self._refresh_s = 0.0

    def agree(self, flag: bool) -> bool:
        return flag

    def settle(self) -> None:
        self._settle_s = self.spec.settle_s  # once after a step: a second time nothing is under way

    def refresh(self, changed: Collection[str]) -> None:
        if self.spec.refresh_s:
            share = 1.0 if self.spec.refreshes_all else sum(self.shares[name] for name in changed)
            self._refresh_s += share * self.spec.refresh_s

    def stopped_s(self) -> float:
        """Return for how long this step's exchanges stop the worker."""
        stopped_s = self._settle_s + self._refresh_s
        self._settle_s = self._refresh_s = 0.0
        return stopped_s


def never() -> bool:
    """Say no. A function with a name: worlds are kept in pickles."""
    return False


class SimWorker:
    """A simulated worker, alive in its spec's spans. lost_s: seconds of training that died with it. job_starts_s:
    when each of its jobs began. ends: called after a job; whether the worker ends now, to live again though it has
    work."""

    def __init__(
        self,
        clock: Clock,
        spec: WorkerSpec,
        identity: Identity,
        outer: OuterConfig,
        learner: Learner,
        parameter_map: ParameterMap,
        shares: Mapping[str, float],
    ) -> None:
        self.rank = OneRank(spec, shares)
        self.clock, self.spec, self.identity, self.outer = clock, spec, identity, outer
        self.learner, self.parameter_map = learner, parameter_map
        self.lives, self.trained_steps, self.lost_s = 0, 0, 0.0
        self.job_starts_s: list[float] = []
        self.left, self.ends = False, never
        # What an incarnation knows is here and not in its script, so that another script can go on with it.
        self.lease: Lease | Finished | None = None
        self._following: Pending[Any] | None = None  # the lease after it
        self._done = 0  # inner steps of the lease
        self._past_s = 0.0  # trained in bursts that are over
        self._burst_s: float | None = None  # when the present one began
        self._burst_steps = 0
        self._job_s = 0.0  # trained before this job
        self._at_risk_s: dict[int, float] = {}  # lease → seconds of a job whose deltas are on their way
        self._undelivered: dict[int, int] = {}  # lease → fragments whose deltas with it are

    @property
    def trained_s(self) -> float:
        """Count the seconds spent in inner steps until now, lost ones included."""
        return self._past_s + (0.0 if self._burst_s is None else self.clock.now - self._burst_s)

    @property
    def in_steps(self) -> bool:
        """Whether inner steps are under way, and nothing else is waited for."""
        return self._burst_s is not None

    def die(self) -> None:
        self.lost_s += self.trained_s - self._job_s + sum(self._at_risk_s.values())
        self._at_risk_s.clear()
        self._undelivered.clear()
        self._job_s = self.trained_s
        self._past_s, self._burst_s = self.trained_s, None

    def live(self, uplink: VirtualClient) -> VirtualProcess:
        """Live one incarnation over this connection."""
        self.lives += 1
        self.learner.born()
        uplink.on_delivered = self._delivered
        about = self.spec.name, self.outer, self.rank, self.learner, uplink
        of_map = self.parameter_map.chunk_numbers, self.parameter_map.groups
        self.uplink, self.exchange = uplink, Exchange(*about, *of_map, self.clock.read)
        return VirtualProcess(self.clock, self._life())

    def go_on(self, process: VirtualProcess) -> None:
        """Go on with an incarnation that was pickled with all around it while inner steps were under way."""
        process.go_on(self._jobs())

    def _delivered(self, leases: tuple[int, ...]) -> None:
        for lease in leases:
            self._undelivered[lease] -= 1
            if not self._undelivered[lease]:
                del self._undelivered[lease], self._at_risk_s[lease]

    def _life(self) -> Script:
        name = self.spec.name
        job = yield from self.exchange.start(self.identity, f"{name}-{self.lives}")
        self.lease = yield self.uplink.lease(LeaseRequest(name, job))
        yield from self._jobs()

    def _jobs(self) -> Script:
        no_data = False  # was answered: it has sent all, and asked for the job after that
        while isinstance(lease := self.lease, Lease) or not no_data:
            if no_data := isinstance(lease, Finished):
                yield from self.exchange.finish()
                self.lease = yield self.uplink.lease(
                    LeaseRequest(self.spec.name, lease.job + 1, self.exchange.step_s)
                )
                continue
            assert isinstance(lease, Lease)
            if not self.in_steps:  # else it goes on
                self._following = self.uplink.lease(LeaseRequest(self.spec.name, lease.job + 1, self.exchange.step_s))
                self.exchange.begin(lease)
                self.job_starts_s.append(self.clock.now)
                self._job_s, self._done = self.trained_s, 0
            yield from self._train_job(lease)
            if self.ends():
                yield from self.exchange.finish()
                return
            assert self._following is not None
            self.lease = yield self._following
        self.left = True
        self.uplink.leave()

    def _train_job(self, lease: Lease) -> Script:
        for step, due in stops(self.parameter_map.groups, lease.steps):
            while self._done < step:
                if not self.in_steps:
                    left = step - self._done
                    self._burst_steps = 1 if self.learner.every_step else self.exchange.steps_at_rest(left)
                    self._burst_s = self.clock.now
                    self.learner.train(lease, self._done, self._burst_steps)
                steps = self._burst_steps
                yield steps * self.spec.step_s
                self._past_s, self._burst_s = self.trained_s, None
                self.trained_steps += steps
                self._done += steps
                now_due = due if self._done == step else ()
                metrics = {}
                if self._done == lease.steps:
                    metrics = self.learner.job_done(lease)
                    self._at_risk_s[lease.lease] = self.trained_s - self._job_s
                    self._undelivered[lease.lease] = len(self.parameter_map.fragments)
                    self._job_s = self.trained_s
                after = self._following
                self.exchange.ends = after is not None and after.done() and isinstance(after.result(), Finished)
                yield from self.exchange.after_step(now_due, metrics, steps)
                if stopped_s := self.rank.stopped_s():
                    yield stopped_s


@lru_cache(maxsize=4096)
def stops(groups: tuple[int, ...], period: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """List where deltas leave: (inner step of a job, fragments whose delta leaves after it); the last step is always
    there."""
    dues = ((step, fragments_due(groups, period, step)) for step in range(1, period + 1))
    return tuple((step, due) for step, due in dues if due or step == period)
