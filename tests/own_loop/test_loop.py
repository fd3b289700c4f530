"""A user's loop against real state machines, without sockets: leases, reading ahead, errors, what is saved."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch import nn

import geotrain
from geotrain.checkpoint.folders import CheckpointFolder
from geotrain.config import ConfigError, RunConfig, load_run
from geotrain.outer.codec import NonFiniteError
from geotrain.own_loop.loop import OwnStep
from geotrain.own_loop.masters import Masters
from geotrain.own_loop.rank import TorchRank
from geotrain.worker.loop import RunMember, WorkerLoop
from geotrain.worker.rank_watch import RankWatch
from tests.support.local_servers import LocalClient, LocalServers
from tests.support.own_network import LOCAL_STEPS, STEP, STEPS, network, write_run


def joined(
    run: RunConfig, model: nn.Module, servers: LocalServers | None = None, **more: Any
) -> tuple[WorkerLoop, LocalServers]:
    servers = servers or LocalServers(run)
    rank = TorchRank()
    rank.masters = Masters(servers.parameter_map, model, 0, 1)
    member = RunMember(run, "w", servers.identity, servers.parameter_map, LocalClient(servers))
    loop = WorkerLoop(member, rank, rank.masters.shards, rank.masters.device, **more)
    loop.start()
    return loop, servers


def step(loop: WorkerLoop) -> None:
    loop.after_step(OwnStep(1.0, 0.1, 0.1, 4))


@pytest.mark.parametrize("read_ahead", [False, True])
def test_all_samples_in_order_however_far_the_data_is_read_ahead(tmp_path: Path, read_ahead: bool) -> None:
    run = write_run(tmp_path, local_steps=5, rule={"name": "region_momentum"})  # the last job is shorter
    reports: list[dict[str, Any]] = []
    saved: list[int] = []
    model = network()
    loop, servers = joined(run, model, report=reports.append, save=saved.append)
    leases, trained, schedule = loop.leases(), [], []
    if read_ahead:
        trained = list(leases)
        assert len(trained) == 3 and not loop.finished
    while not loop.finished:
        if not read_ahead and loop.step == 0:
            trained.append(next(leases))
        schedule.append(loop.schedule_step)
        with torch.no_grad():
            model[0].weight += 1.0
        step(loop)
    assert list(leases) == []
    assert [(lease.start, lease.samples) for lease in trained] == [(0, 20), (20, 20), (40, 8)]
    assert schedule == list(range(STEPS)) and loop.schedule_step == STEPS == run.total_steps
    assert [report["job"] for report in reports] == [1, 2, 3] and [r["steps"] for r in reports] == [5, 5, 2]
    assert saved == [3] and servers.top.finished  # at the end; none of the jobs was the eighth
    with pytest.raises(RuntimeError, match="its steps are over"):
        step(loop)


def test_a_worker_that_is_to_be_formed_anew_ends_after_its_job_and_its_next_life_trains_the_rest(
    tmp_path: Path,
) -> None:
    run = write_run(tmp_path, rule={"name": "region_momentum"})
    servers, begun, saved = LocalServers(run), list[int](), list[int]()
    for asked in (True, False):
        loop, _ = joined(run, network(), servers, save=saved.append)
        loop.ends = lambda: asked  # noqa: B023
        while loop.lease is not None:
            begun += [loop.lease.start] if loop.step == 0 else []
            step(loop)
        assert loop.finished == servers.top.finished == (not asked)
        time.sleep(0.001)  # an incarnation is named by the time
    assert begun == list(range(0, STEP * STEPS, STEP * LOCAL_STEPS)) and saved == [1, STEPS // LOCAL_STEPS]


def test_what_it_is_asked_for_is_recorded(tmp_path: Path) -> None:
    loop, _ = joined(write_run(tmp_path), network())
    loop.client.on_profile(LOCAL_STEPS)
    while not loop.finished:
        step(loop)
    (trace,) = (tmp_path / "out/profiles").iterdir()
    marks = {event["name"] for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"geotrain.lease", "geotrain.encode", "geotrain.send", "geotrain.adopt"} <= marks


def test_ranks_are_compared_between_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[torch.device, int]] = []
    monkeypatch.setattr(RankWatch, "after_step", lambda self: compared.append((self._device, loop.step)))
    loop, _ = joined(write_run(tmp_path), network())
    while not loop.finished:
        step(loop)
    assert len(compared) == STEPS and {device for device, _ in compared} == {torch.device("cpu")}


def test_who_reads_ahead_and_waits_for_a_lease_is_in_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, _ = joined(write_run(tmp_path), network())
    assert loop._following is not None
    answer, seen = loop._following.result(), list[float]()
    waited = Future[Any]()
    waited.set_result(answer)
    monkeypatch.setattr(waited, "result", lambda: seen.append(loop.watch._step_s) or answer)
    loop._following = waited
    loop.watch.begin_step(STEP)
    next(loop.leases()), next(loop.leases())
    assert seen == [-1.0] and loop.watch._step_s > 0


def test_steps_reach_the_servers_and_answers_the_model(tmp_path: Path) -> None:
    model = network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)  # the servers' weights, here zeros, take their place at the join
    loop, servers = joined(write_run(tmp_path), model)
    assert all(not parameter.any() for parameter in model.parameters())
    while not loop.finished:
        with torch.no_grad():
            model[0].weight += 1.0
        step(loop)
    weights = {
        n: t
        for f in servers.parameter_map.fragments
        for n, t in servers.parameter_map.split(0, servers.top.weights(0))
    }
    assert torch.equal(weights["0.weight"], torch.full((5, 3), float(STEPS))) and not weights["2.bias"].any()


MIXES = {"overlap": {"adopt": "mix", "mix": 0.5}}


@pytest.mark.parametrize("adopt_last", [True, False])
@pytest.mark.parametrize(
    "outer",
    [
        {**MIXES, "rule": {"name": "sync", "lr": 0.5, "momentum": 0.0}},
        {**MIXES, "rule": {"name": "halos", "updates_per_send": 3}, "down": {"name": "int8"}},
    ],
    ids=["sync", "halos"],
)
def test_the_model_ends_as_the_runs_weights(tmp_path: Path, adopt_last: bool, outer: dict[str, Any]) -> None:
    """Where a worker keeps some of its own at each exchange, as here a half, or its region does, it ends elsewhere
    without."""
    model = network()
    loop, servers = joined(write_run(tmp_path, **outer), model, adopt_last=adopt_last)
    while not loop.finished:
        with torch.no_grad():
            model[0].weight += 1.0
        step(loop)
    ours = torch.cat([model.get_parameter(p.name).flatten() for p in servers.parameter_map.parameters])
    assert torch.equal(ours, servers.top.weights(0)) == adopt_last


@pytest.mark.parametrize("every", [1, 2])
def test_the_state_is_saved_after_so_many_jobs_each_and_before_leaving(tmp_path: Path, every: int) -> None:
    saved: list[tuple[int, bool]] = []
    run = write_run(tmp_path)
    run = run.model_copy(update={"checkpoint": run.checkpoint.model_copy(update={"every_jobs": every})})
    loop, servers = joined(run, network(), save=lambda job: saved.append((job, servers.top.finished)))
    while not loop.finished:
        step(loop)
    jobs = STEPS // LOCAL_STEPS
    assert saved == [*((job, False) for job in range(every, jobs + 1, every)), (jobs, False)]


Begin = Callable[..., geotrain.OuterLoop]


class Numbers:
    """A data set of five samples."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(index))


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Begin:
    """Makes the loop of the only worker. keys: of the run file, besides `write_run`'s."""

    def begun(model: nn.Module, keys: dict[str, Any], **more: Any) -> geotrain.OuterLoop:
        write_run(tmp_path)
        raw = json.loads((tmp_path / "run.json").read_text())
        for name, block in keys.items():
            raw[name] = {**raw.get(name, {}), **block}
        (tmp_path / "run.json").write_text(json.dumps(raw))
        cluster = {"name": "c", "regions": [{"name": "eu", "workers": [{"name": "eu-0"}]}]}
        (tmp_path / "cluster.json").write_text(json.dumps(cluster))
        client: Any = LocalClient(LocalServers(load_run(tmp_path / "run.json"), ("eu-0",)), "eu-0")
        client.close, client.retries = lambda: None, 0
        monkeypatch.setattr("geotrain.worker.connection.WorkerClient", lambda *_, **__: client)
        monkeypatch.setattr("geotrain.own_loop.loop.MOST_AHEAD", 8)
        return geotrain.OuterLoop(tmp_path / "run.json", "eu", model, **more)

    return begun


def test_a_loop_claims_the_folder_of_its_state(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CheckpointFolder, "claim", claim := Mock())
    begin(network(), {}, state={"sgd": torch.optim.SGD(network().parameters())})
    assert claim.call_count == 1


@pytest.fixture
def outer(begin: Begin, request: pytest.FixtureRequest) -> geotrain.OuterLoop:
    """The loop of the only worker. A parameter is the run's ramp of the batch."""
    ramp = {"data": {"rampup_batch_size": request.param}} if hasattr(request, "param") else {}
    return begin(network(), ramp)


def test_after_a_validation_forwards_take_the_workers_own_weights(begin: Begin) -> None:
    """Forwards take a copy of the masters, which `refresh` makes, as under DeepSpeed."""
    model, validated = network(), list[bool]()

    def validate() -> float:
        assert torch.equal(model[0].weight, taken[0])
        validated.append(bool(torch.equal(model[0].weight, own[0])))
        return 0.5

    often = {"monitor": {"validate_every_samples": 8}, "data": {"validation_samples": 1}}
    outer = begin(model, {**often, "outer": {**MIXES, "rule": {"name": "sync", "lr": 0.5}}}, validate=validate)
    taken, own = [model[0].weight.detach().clone()], [model[0].weight.detach().clone()]
    outer._masters.refresh = lambda changed=None: taken.__setitem__(0, model[0].weight.detach().clone())
    with outer:
        for _ in outer.samples():
            assert torch.equal(model[0].weight, taken[0])
            with torch.no_grad():
                model[0].weight += 1.0
            taken[0] = own[0] = model[0].weight.detach().clone()
            outer.after_step(0.5)
    assert outer.finished and validated and not all(validated)


@pytest.mark.parametrize("parts", [1, 2])
def test_batches_visit_each_sample_once_in_an_epoch(
    outer: geotrain.OuterLoop, parts: int, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[float] = []
    with outer:
        for number, batch in enumerate(outer.batches(Numbers(), parts)):
            assert batch.shape == (STEP // parts, 3)
            seen += batch[:, 0].tolist()
            if number % parts == parts - 1:
                assert outer.step == number // parts
                outer.after_step(torch.tensor(0.5))
    assert outer.finished and len(seen) == STEP * STEPS
    assert capsys.readouterr().out.startswith("job 1, from sample 0: loss 0.5000, ")
    epochs = [seen[at : at + 5] for at in range(0, 45, 5)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs) and len({tuple(e) for e in epochs}) > 1
    (log,) = (outer.run.run_folder / "events").glob("*.jsonl")
    jobs = [event for event in map(json.loads, log.read_text().splitlines()) if event["event"] == "JobTrained"]
    assert [(job["job"], job["loss"], job["tokens"]) for job in jobs] == [(j, 0.5, 12) for j in (1, 2, 3, 4)]


@pytest.mark.parametrize("outer", [(2, 2, 12)], indirect=True)
def test_a_batch_grows_in_a_loop_of_ones_own(outer: geotrain.OuterLoop) -> None:
    """Six steps of two samples, then nine of four; the rate follows the samples."""
    sizes, steps, seen = list[int](), list[float](), list[float]()
    with outer:
        for number, batch in enumerate(outer.batches(Numbers(), 2)):
            seen += batch[:, 0].tolist()
            if number % 2:
                sizes.append(2 * len(batch))
                steps.append(outer.step)
                outer.after_step(0.5)
    assert sizes == [2] * 6 + [4] * 9 and steps == [0, 0.5, 1, 1.5, 2, 2.5, *range(3, 12)]
    assert outer.finished and outer.total_steps == 12
    assert all(sorted(seen[at : at + 5]) == [0, 1, 2, 3, 4] for at in range(0, 45, 5))
    (log,) = (outer.run.run_folder / "events").glob("*.jsonl")
    jobs = [event for event in map(json.loads, log.read_text().splitlines()) if event["event"] == "JobTrained"]
    assert [job["tokens"] for job in jobs] == [6, 6, 12, 12, 12]
    with pytest.raises(ConfigError, match="a step's 2 samples do not divide into 4 micro-batches"):
        next(outer.indices(None, 4))


def test_a_loop_that_ends_early_says_so(outer: geotrain.OuterLoop, capsys: pytest.CaptureFixture[str]) -> None:
    with outer:
        next(outer.samples())
    assert "eu-0: the loop ends before the run's data: 1 steps were given, 0 trained" in capsys.readouterr().err


def test_a_forgotten_after_step_is_an_error(outer: geotrain.OuterLoop) -> None:
    with outer, pytest.raises(RuntimeError, match="1 batches of 1 to a step were given, but after_step was called 0"):
        list(outer.batches(Numbers()))
    with pytest.raises(ConfigError, match="4 samples do not divide into 3"):
        next(outer.batches(Numbers(), 3))


def a_step(outer: geotrain.OuterLoop) -> None:
    next(outer.samples())
    outer.after_step()


def first_micro_batch(outer: geotrain.OuterLoop) -> None:
    next(outer.batches(Numbers(), 2))
    outer.after_step()


def a_step_with_prefetch(outer: geotrain.OuterLoop) -> None:
    next(outer.batches(Numbers(), num_workers=1))
    outer.after_step(), outer.after_step()


def leave_and_begin_again(outer: geotrain.OuterLoop) -> None:
    for _ in outer.batches(Numbers(), num_workers=1):  # reads ahead
        outer.after_step()
        break
    next(outer.batches(Numbers()))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda outer: outer.after_step(), "for step 1, but batches.* have given the data of 0"),
        (lambda outer: (a_step(outer), outer.after_step()), "for step 2, but .* have given the data of 1"),
        (first_micro_batch, "for step 1, but .* have given the data of 0"),
        (a_step_with_prefetch, "for step 2, but .* have given the data of 1"),
        (lambda outer: [outer.after_step() for i, _ in enumerate(outer.batches(Numbers())) if i < 11], "begins anew"),
        (leave_and_begin_again, r"begins anew, but of [2-9] steps that were read only 1 are trained"),
        (lambda outer: [outer.after_step() for _ in BatchSamplerShard(outer.indices(5), 2)],
         "8 steps were read, and 3 trained: .* do not shard its loader again"),
        (lambda outer: list(outer.indices(5)), "8 steps were read, and 0 trained: the loader reads ahead without"),
        (lambda outer: (next(outer.samples()), next(outer.samples())), "of 1 steps that were read only 0 are"),
        (lambda outer: next(outer.batches(iter([1]))), "a list_iterator has no __len__ .* give a map-style data set"),
        (lambda outer: next(outer.batches(Stream())), "a Stream has no __len__ .* or read the numbers from samples"),
    ],
)  # fmt: skip
def test_samples_that_nobody_saw_do_not_count_as_trained(outer: geotrain.OuterLoop, wrong: Any, words: str) -> None:
    with pytest.raises((RuntimeError, ConfigError), match=words):
        wrong(outer)
    outer.close()


class Stream(torch.utils.data.IterableDataset[Any]):
    """A data set without a length."""

    def __iter__(self) -> Any:
        return iter([torch.zeros(3)])


def test_steps_may_be_read_in_turns_when_all_that_was_read_is_trained(outer: geotrain.OuterLoop) -> None:
    seen: list[int] = []
    with outer:
        while not outer.finished:
            seen.extend(next(outer.samples()))
            outer.after_step()
    assert seen == list(range(STEP * STEPS))


def test_what_a_run_file_must_say(tmp_path: Path) -> None:
    write_run(tmp_path)
    raw = json.loads((tmp_path / "run.json").read_text())
    llama = {"config": {"model_type": "llama"}}
    block = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8}
    for change, message in [
        ({"model": {}}, "config is required, or weights"),
        ({"model": {**raw["model"], **llama}}, "config: without effect beside weights"),
        ({"data": {"train_samples": 8}}, "model.config, data.train, data.sequence_length, deepspeed: required where"),
        ({"deepspeed": block}, "data.samples_per_step = 4, but deepspeed.train_batch_size = 8"),
    ]:
        (tmp_path / "run.json").write_text(json.dumps({**raw, **change}))
        with pytest.raises(ConfigError, match=message):
            load_run(tmp_path / "run.json")


def test_a_runs_folder_does_not_depend_on_where_a_loop_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path)
    raw = json.loads((tmp_path / "run.json").read_text())
    monkeypatch.chdir(tmp_path.parent)
    for folder, expected in ((None, tmp_path / "runs/own"), ("../there", tmp_path.parent / "there")):
        (tmp_path / "run.json").write_text(json.dumps({**raw, "folder": folder}))
        assert load_run(f"{tmp_path.name}/run.json").run_folder == expected
    changed = load_run(tmp_path / "run.json", ["folder=here"])
    assert changed.run_folder == tmp_path.parent / "here"


def test_an_own_loop_needs_neither_deepspeed_nor_megatron_nor_transformers() -> None:
    """Nor OpenTelemetry, where that is off."""
    program = (
        "import sys, geotrain; geotrain.OuterLoop, geotrain.save_parameters; "
        "import geotrain.monitor.monitor, geotrain.worker.connection; others = 'deepspeed', 'megatron', 'apex'; "
        "print([m for m in (*others, 'transformers', 'opentelemetry') if m in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert said.stdout == "[]\n"


def test_a_batch_that_spoils_each_worker_is_set_aside_and_the_run_ends_without_it(tmp_path: Path) -> None:
    run = write_run(tmp_path, local_steps=5, rule={"name": "region_momentum"})
    servers, spoilt, given = LocalServers(run), 23, list[int]()
    for life in range(3):
        model = network()
        loop, _ = joined(run, model, servers)
        assert loop.finished is False
        try:
            while loop.lease is not None:
                samples = range(loop.lease.start, loop.lease.start + loop.lease.samples)
                given += samples if loop.step == 0 else []
                with torch.no_grad():
                    model[0].weight += float("nan") if spoilt in samples else 1.0
                step(loop)
        except NonFiniteError:
            assert life < 2
        time.sleep(0.001)  # an incarnation is named by the time
    assert loop.finished and servers.top.finished and set(given) == set(range(STEP * STEPS))
    status = servers.top.status()
    assert (status["committed_samples"], status["set_aside"], status["complete"]) == (28, [[20, 39]], True)
