"""Two workers of two ranks each, in one process, step by step: what joins their parts is asserted, not the parts.

Run and cluster file, coordinators, shards, codecs and the ranks' loops are the product's. Sockets are left out, and
ranks are threads. A third worker, in another region, is in the cluster file and has not come.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import geotrain
from geotrain.config import load_cluster, load_run
from geotrain.net.server.first_weights import initial_weights
from geotrain.net.server.server_process import global_server, region_server
from geotrain.outer.codec import Codec, make_codec
from geotrain.outer.messages import Answer, AnswerWanted, Join, Leave, UpdatePart, Welcome
from geotrain.own_loop.rank import TorchRank
from geotrain.parameters.parameter_map import parameter_map_of, scatter
from geotrain.staging.interface import from_bytes
from tests.support.local_servers import LocalClient, LocalServers, done
from tests.support.outer_world import InProcess
from tests.support.process_trees import until

H, BATCH, JOBS, ELEMENTS = 2, 4, 12, 256 + 16
UPDATES = JOBS * 2 / 3  # of the region with two of the three workers
SHARE, GAIN = 0.5, 0.7
# Three workers begin side by side; then each lease has its own place. b joins when a has asked for two leases.
RATES = {"a": [[0, 3], [2, 3], [8, 9], [12, 13], [16, 17], [20, 21]],
         "b": [[0, 3], [6, 7], [10, 11], [14, 15], [18, 19], [22, 23]]}  # fmt: skip
LEASES = {"a": [0, 8, 32, 48, 64, 80], "b": [16, 24, 40, 56, 72, 88]}


def write_files(folder: Path, local: dict[str, Any]) -> None:
    model = nn.Linear(16, 16)
    geotrain.save_parameters(folder / "model.safetensors", model)
    run = {
        "name": "two", "folder": str(folder / "out"), "model": {"weights": "model.safetensors"},
        "data": {"train_samples": JOBS * H * BATCH, "samples_per_step": BATCH}, "checkpoint": {"every_jobs": 4},
        "outer": {
            "local_steps": H, "local": local, "up": {"name": "int4"},
            "rule": {"name": "region_momentum", "updates_per_send": 2, "momentum_share": SHARE, "gain": GAIN},
        },
    }  # fmt: skip
    hosts = [{"host": "localhost", "slots": 2}]
    regions = [
        {"name": region, "workers": [{"name": name, "hosts": hosts} for name in names]}
        for region, names in {"eu": "ab", "us": "c"}.items()
    ]
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "cluster.json").write_text(json.dumps({"name": "c", "regions": regions}))


@dataclass
class Vectors:
    """What a server's only shard holds of the model's only chunk."""

    x: Tensor
    aux: dict[str, Tensor]
    residual: Tensor | None

    @staticmethod
    def of(server: Any) -> Vectors:
        shard = server.store
        if 0 not in shard.vectors:
            return Vectors(torch.empty(0), {}, None)
        v, residual = shard.vectors[0], shard.residuals.get(0)
        aux = {name: vector.clone() for name, vector in v.aux.items()}
        return Vectors(v.x.clone(), aux, None if residual is None else residual.clone())


@dataclass
class Change:
    """One part of what a server does with a message: its vectors before and after, and what it was told or sends."""

    update: UpdatePart
    before: Vectors
    after: Vectors
    norms: dict[int, float]  # of its sender's fragments


class Servers(LocalServers):
    """The region server of a and b below the global server, as their processes make them from the two files."""

    def __init__(self, folder: Path) -> None:
        self.run, cluster = load_run(folder / "run.json"), load_cluster(folder / "cluster.json")
        self.lock = threading.RLock()
        self.failed: BaseException | None = None  # of the first rank that failed
        self.parameter_map = parameter_map_of(self.run)
        self.applied: list[Change] = []  # by the region
        self.sent: list[Change] = []  # by the region, upwards
        self.averaged: list[Change] = []  # by the global server
        self.parts: dict[tuple[str, int], dict[int, UpdatePart]] = {}
        self.waiting: list[tuple[RankClient, Future[Answer], int, int]] = []
        top = global_server(self.run, cluster)
        top.set_weights(initial_weights(self.run, self.parameter_map))
        self.region = region_server(self.run, cluster, "eu")
        self.region.incarnation = "life-1"
        self.watch(self.region, "take", lambda handled: handled.reply is True, self.applied)
        self.watch(self.region, "go_on", lambda handled: handled.sends, self.sent)
        self.watch(top, "take", lambda handled: handled.reply is True, self.averaged)
        InProcess.__init__(self, top, {"eu": self.region})

    def watch(self, server: Any, name: str, changed: Callable[[Any], Any], changes: list[Change]) -> None:
        """Note the changes that this method makes with an update: one that came, or one that leaves."""
        method = getattr(server, name)

        def watched(*message: Any) -> Any:
            before, handled = Vectors.of(server), method(*message)
            updates = [m for m in (*message, *(s.message for s in handled.sends)) if isinstance(m, UpdatePart)]
            if changed(handled) and updates:
                sender = server.members.get(updates[0].member)  # None: itself
                norms = {f: own.norm for f, own in sender.fragments.items()} if sender else {}
                changes.append(Change(updates[0], before, Vectors.of(server), norms))
            return handled

        setattr(server, name, watched)

    def say(self, message: Any) -> Any:
        with self.lock:
            if isinstance(message, UpdatePart):
                self.parts.setdefault((message.member, message.sequence), {})[message.part] = message
            reply = super().say(message)
            for client, future, *update in list(self.waiting):
                client.give(future, *update)
            return reply

    def waits_for_last(self, name: str) -> bool:
        """Whether a worker, once it has joined, waits for the weights with which it ends."""
        with self.lock:
            return any(client.name == name and not sequence for client, _, _, sequence in self.waiting)

    def fail(self, error: BaseException) -> None:
        """Let nobody wait for an answer any more: a rank has failed."""
        with self.lock:
            self.failed = self.failed or error
            for _, future, *_ in self.waiting:
                future.set_exception(self.failed)
            self.waiting.clear()

    def decoded(self, update: UpdatePart, codec: Codec) -> Tensor:
        """The delta of a worker's whole update, from the payloads of its ranks."""
        delta = torch.full((ELEMENTS,), torch.nan)
        for part, sent in self.parts[update.member, update.sequence].items():
            slices = self.region.members[update.member].joined[part].pushes[0]
            numel = sum(s.length * s.count for s in slices)
            scatter(codec.decode(from_bytes(sent.deltas[0].payload), numel), slices, delta)
        return delta


class RankClient(LocalClient):
    """The client of one rank of several."""

    retries = 0

    def __init__(self, servers: Servers, name: str, rank: int) -> None:
        super().__init__(servers, name)
        self.two, self.rank = servers, rank

    def join(self, join: Join) -> Welcome:
        assert (join.part, join.parts) == (self.rank, 2)
        return super().join(join)

    def push(self, part: UpdatePart) -> Future[None]:
        with self.two.lock:
            if self.two.say(part):
                self.on_acknowledged(part.fragment, part.sequence)
        return done(None)

    def pull(self, fragment: int, sequence: int) -> Future[Answer]:
        future: Future[Answer] = Future()
        with self.two.lock:
            self.two.waiting.append((self, future, fragment, sequence))
            if self.two.failed is not None:
                self.two.fail(self.two.failed)
                return future
            if self.two.region.members[self.name].complete:
                self.two.say(AnswerWanted(self.name, self.incarnation, fragment, sequence))  # and gives what is there
        return future

    def give(self, future: Future[Answer], fragment: int, sequence: int) -> None:
        """Give the answer, once it is there."""
        if not self.two.region.members[self.name].complete:
            return  # the other rank has not joined
        answer = self.two.region.answer(self.name, self.incarnation, self.rank, fragment, sequence)
        if answer is not None:
            self.two.waiting.remove((self, future, fragment, sequence))
            future.set_result(answer)

    def lease(self, request: Any) -> Future[Any]:
        with self.two.lock:
            return super().lease(request)

    def leave(self) -> None:
        if self.rank == 0:
            self.two.say(Leave(self.name))

    def close(self) -> None: ...


class ThreadRank(TorchRank):
    """One rank of a worker whose ranks are threads. values: what each has brought to the collective at hand."""

    def __init__(self, rank: int, barrier: threading.Barrier, values: list[Any]) -> None:
        self.rank, self.world_size, self.alone, self.is_metrics_rank = rank, len(values), False, rank == 0
        self.barrier, self.values, self._folders = barrier, values, {}

    def gather(self, value: Any) -> list[Any]:
        self.values[self.rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


@dataclass
class Worker:
    """A worker of two ranks, whose steps the test asks for one at a time."""

    name: str
    servers: Servers
    folder: Path
    rates: list[list[int]] = field(default_factory=list)  # of each job: the run's step at each of its steps
    leases: list[int] = field(default_factory=list)  # the first sample of each job
    samples: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))  # that each rank trained
    deltas: list[Tensor] = field(default_factory=list)  # of each job: weights adopted before it − weights after it
    reports: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.barrier, values = threading.Barrier(2, timeout=60.0), [None, None]
        self.clients = [RankClient(self.servers, self.name, rank) for rank in range(2)]
        self.models = [nn.Linear(16, 16) for _ in range(2)]
        self.places = [ThreadRank(rank, self.barrier, values) for rank in range(2)]
        self.threads = ThreadPoolExecutor(2)
        self.steps = [self.train(rank) for rank in range(2)]

    def both(self) -> bool:
        """The next step of both ranks: at first, joining. Returns whether there is another."""

        def step(rank: int) -> bool:
            try:
                return next(self.steps[rank], False)
            except BaseException as error:
                self.barrier.abort()
                self.servers.fail(error)
                raise

        return all(self.threads.map(step, range(2)))

    def train(self, rank: int) -> Iterator[bool]:
        """The script of one rank: weights move towards 1, at a rate that falls with the run's step."""
        model, first = self.models[rank], rank == 0
        HERE.client, HERE.rank = self.clients[rank], self.places[rank]
        with geotrain.OuterLoop(
            self.folder / "run.json", "eu", model, worker=self.name, report=self.reports.append,
            state={"optimizer": torch.optim.SGD(model.parameters())},
        ) as loop:  # fmt: skip
            yield True
            for own in loop.indices(None):
                self.samples[rank].extend(own)
                begins = loop.loop.step == 0
                if begins and first:
                    self.rates.append([])
                    self.leases.append(own[0])
                if begins:
                    adopted = flat(model)
                if first:
                    self.rates[-1].append(loop.step)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter += 0.01 * (1 - loop.step / loop.total_steps) * (1 - parameter)
                if first and not begins:
                    self.deltas.append(adopted - flat(model))
                loop.after_step(1.0)
                yield True


HERE = threading.local()  # client and rank of the thread that opens its loop


def flat(model: nn.Module) -> Tensor:
    """Its elements in their canonical order."""
    return torch.cat([p.detach().clone().view(-1) for _, p in sorted(model.named_parameters())])


@dataclass
class Played:
    """A whole run. committed: samples, after each step of a or b. seeds: of each encoding with random bits."""

    servers: Servers
    workers: dict[str, Worker]
    committed: list[int]
    seeds: list[int]


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    folder = tmp_path_factory.mktemp("two")
    write_files(folder, {"name": request.param})
    encode, seeds = Codec.encode, list[int]()

    def watched(codec: Codec, values: Tensor, **settings: Any) -> Any:
        if settings.get("residual") is not None:
            seeds.append(settings["seed"])
        return encode(codec, values, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Codec, "encode", watched)
        patch.setattr("geotrain.worker.connection.WorkerClient", lambda *_, **__: HERE.client)
        patch.setattr("geotrain.own_loop.loop.TorchRank", lambda: HERE.rank)
        servers = Servers(folder)
        workers = {name: Worker(name, servers, folder) for name in "ab"}
        for worker in workers.values():
            assert worker.both()
        committed, ends = [], dict[str, Future[bool]]()
        with ThreadPoolExecutor(2) as pool:
            while len(ends) < 2:
                for name in [name for name in workers if name not in ends]:
                    turn = pool.submit(workers[name].both)
                    until(lambda: turn.done() or servers.waits_for_last(name))  # noqa: B023
                    if not turn.done() or not turn.result():  # who has trained all waits for the run's last weights
                        ends[name] = turn
                if len(ends) < 2:
                    committed.append(servers.top.status()["committed_samples"])
            assert not any(end.result() for end in ends.values())
        yield Played(servers, workers, committed, seeds)


def test_rates_and_leases_are_of_the_run_and_not_of_the_worker(played: Played) -> None:
    for name, worker in played.workers.items():
        assert (worker.rates, worker.leases) == (RATES[name], LEASES[name])
        assert [report["start"] for report in worker.reports] == LEASES[name]
        assert [report["job"] for report in worker.reports] == list(range(1, 7))
        steps = [start + step * BATCH for start in LEASES[name] for step in range(H)]
        assert worker.samples == tuple([at + i for at in steps for i in half] for half in ((0, 1), (2, 3)))
    jobs = H * BATCH  # samples; every second update goes up, and commits both
    assert played.committed == [jobs * done for last in range(0, JOBS, 2) for done in (last, last + 2)]
    assert played.servers.top.phase == "ended" and played.servers.region.gone
    assert played.servers.region.worker_data.leases.jobs_each == UPDATES / 2  # as known before the run


def test_a_workers_update_is_what_its_ranks_trained_and_moves_the_momentum(played: Played) -> None:
    """m = k·m + (1−k)·Δ; x −= ½·(Δ + c·m), with k and c by the two files."""
    k = exp(-1 / (SHARE * UPDATES))
    c = GAIN / (20 * (1 - k))
    m, codec = torch.zeros(ELEMENTS), played.servers.region.core.up
    lost = dict.fromkeys("ab", torch.zeros(ELEMENTS))  # by codes, so far: it goes with the next update
    changes = played.servers.applied
    assert [(change.update.member, change.update.sequence) for change in changes] == [
        (name, sequence) for sequence in range(1, 7) for name in "ab"
    ]
    for change in changes:
        delta = played.servers.decoded(change.update, codec)
        name = change.update.member
        trained = played.workers[name].deltas[change.update.sequence - 1] + lost[name]
        torch.testing.assert_close(delta, trained, rtol=2**-7 if codec.error_feedback else 1e-6, atol=2**-20)
        if codec.error_feedback:
            lost[name] = trained - delta
        assert change.norms == pytest.approx({0: float(delta.norm())}, rel=1e-5)
        m = k * m + (1 - k) * delta
        torch.testing.assert_close(change.after.aux["momentum"], m)
        torch.testing.assert_close(change.after.x, change.before.x - (delta + c * m) / 2)


def test_what_a_region_sends_is_its_progress_and_its_loss_goes_with_the_next(played: Played) -> None:
    codec, left = make_codec(played.servers.run.outer.up), torch.zeros(ELEMENTS)
    assert len(played.servers.sent) == len(played.servers.averaged) == JOBS / 2
    for sent, averaged in zip(played.servers.sent, played.servers.averaged, strict=True):
        assert sent.update is averaged.update
        decoded = codec.decode(from_bytes(sent.update.deltas[0].payload), ELEMENTS)
        progress = sent.before.aux["base"] - sent.before.x
        assert sent.after.residual is not None
        torch.testing.assert_close(decoded + sent.after.residual, progress + left)
        left = sent.after.residual
        torch.testing.assert_close(averaged.after.x, averaged.before.x - decoded)  # the other has not joined
    assert left.abs().max() > 0


def test_every_encoding_rounds_with_random_bits_of_its_own(played: Played) -> None:
    parts = JOBS * 2 if played.servers.region.core.up.error_feedback else 0
    assert len(set(played.seeds)) == len(played.seeds) == parts + JOBS / 2


def test_bytes_on_both_links(played: Played) -> None:
    """Each rank sends its half; the region 4 bits an element, and a scale for each begun block of 128."""
    each = 2 if played.servers.region.core.up.error_feedback else 4
    sent = [len(part.deltas[0].payload) for parts in played.servers.parts.values() for part in parts.values()]
    assert sent == [ELEMENTS // 2 * each] * JOBS * 2
    assert [len(change.update.deltas[0].payload) for change in played.servers.sent] == [16 + ELEMENTS // 2] * 6


def test_every_rank_saves_its_own_state_after_every_fourth_job_and_the_last(played: Played) -> None:
    folder = played.servers.run.checkpoint_folder
    saved = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.pt"))
    assert saved == [f"{n}/job-0000000{j}/rank-0000{rank}.pt" for n in "ab" for j in (4, 6) for rank in (0, 1)]


def test_ranks_hold_the_same_copies(played: Played) -> None:
    for worker in played.workers.values():
        assert torch.equal(*map(flat, worker.models))
