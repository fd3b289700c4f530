"""The loop of one rank with a real engine and real state machines, without sockets."""

from __future__ import annotations

import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from geotrain.config import (
    AccoConfig,
    ConfigError,
    FragmentConfig,
    MonitorConfig,
    OuterConfig,
    OverlapConfig,
    ParallelConfig,
    RunConfig,
    codec_config,
    rule_config,
)
from geotrain.worker.loop import RunMember
from tests.support.inner_worlds import (
    BATCH,
    LLAMA,
    SEQUENCE,
    VOCABULARY,
    deepspeed_block,
    run_config,
    run_world,
    start,
    stop,
    write,
)
from tests.support.local_servers import LocalClient, LocalServers
from tests.support.outer_configs import outer_config
from tests.support.outer_world import weights_of

VALIDATED = "halos, validated"
BALANCED = "identity, balanced"
STEPS = 12  # inner steps of a whole run
FP32 = codec_config("fp32")
PLAIN = dict(up=FP32, down=FP32, local=FP32)
TAKES_THE_WORKERS_WEIGHTS = OuterConfig(rule=rule_config("sync", lr=1.0, momentum=0.0), local_steps=4, **PLAIN)
OUTER = {
    "identity": TAKES_THE_WORKERS_WEIGHTS,
    "identity in fragments": TAKES_THE_WORKERS_WEIGHTS.model_copy(
        update={"fragments": FragmentConfig(layers_per_fragment=1)}
    ),
    "halos": outer_config(local_steps=3, updates_per_send=2),
    "streaming, overlapped": outer_config(
        local_steps=4,
        updates_per_send=1,
        merge_alpha=1.0,
        gain=0.0,
        fragments=FragmentConfig(layers_per_fragment=1),
        overlap=OverlapConfig(steps=2, adopt="rebase"),
        **PLAIN,
    ),
}
OUTER[VALIDATED] = OUTER["halos"]
OUTER[BALANCED] = TAKES_THE_WORKERS_WEIGHTS
OUTER["streaming, late"] = OUTER["streaming, overlapped"].model_copy(
    update={"overlap": OverlapConfig(steps=2, late="continue", adopt="rebase")}
)


MODEL = {**LLAMA, "num_hidden_layers": 2}


def run_of(outer: OuterConfig, acco: AccoConfig | None = None, **more: Any) -> RunConfig:
    run = run_config(MODEL, deepspeed_block(1), acco=acco)
    data = run.data.model_copy(update={"train_samples": STEPS * BATCH})
    return run.model_copy(update={"outer": outer, "data": data, **more})


def loader_of() -> Any:
    """A loader of random tokens, the same at each call."""
    from geotrain.data.loader import LeasedLoader, SampleSource

    tokens = torch.randint(0, VOCABULARY, (40 * SEQUENCE,), generator=torch.Generator().manual_seed(3)).numpy()
    return LeasedLoader(SampleSource(tokens, SEQUENCE, 1, VOCABULARY, "test"), BATCH, 2, 0, 1)


def member_of(run: RunConfig, servers: LocalServers, client: LocalClient, folder: str, **more: Any) -> RunMember:
    """The only worker of these servers, which saves into the folder."""
    saving = run.model_copy(update={"checkpoint": run.checkpoint.model_copy(update={"folder": folder})})
    return RunMember(saving, "w", servers.identity, servers.parameter_map, client, **more)


def try_both() -> dict[str, Any]:
    return {**try_outer_loops(), **{form: try_acco(form) for form in ACCO}, "lost": try_a_lost_state()}


def try_outer_loops() -> dict[str, Any]:
    """Train in one process, one setting after the other; returns losses and the servers' end state for each, and
    without any."""
    from geotrain.inner.build import build_engine
    from geotrain.inner.runtime.parallel import shut_down
    from geotrain.worker.trainer import Trainer

    results: dict[str, Any] = {}
    # In steps that wait for their own commit: they are ZeRO-1's.
    balanced = AccoConfig(synchronous_steps=STEPS, balance=True)
    validated = {"monitor": MonitorConfig(validate_every_samples=4 * BATCH)}
    for name, outer in [("alone", None), *OUTER.items()]:
        run = run_of(
            outer or TAKES_THE_WORKERS_WEIGHTS,
            balanced if name == BALANCED else None,
            **(validated if name == VALIDATED else {}),
        )
        engine: Any = build_engine(run, ParallelConfig(), run.deepspeed, timeout_s=60)
        losses: list[float] = []
        inner_step = engine.train_step

        def watched(batch: Any, step: int, inner_step: Any = inner_step, losses: Any = losses) -> Any:
            result = inner_step(batch, step)
            losses.append(result.loss)
            return result

        engine.train_step = watched
        loader = loader_of()
        expected: list[int] = []
        loader.expect = lambda start, samples, expected=expected: expected.append(start)  # type: ignore[method-assign]
        servers = LocalServers(run)
        if outer is None:  # the same batches with no outer loop at all
            write(
                engine, {name: view.clone() for name, view in servers.parameter_map.split(0, servers.top.weights(0))}
            )
            for step, batch in enumerate(loader.steps(0, STEPS * BATCH)):
                engine.train_step(batch, step)
        else:
            reports: list[dict[str, float]] = []
            with tempfile.TemporaryDirectory() as folder:
                client, validation = LocalClient(servers), next(iter(loader.steps(0, BATCH))).own
                member = member_of(run, servers, client, folder, report=reports.append)
                trainer = Trainer(member, engine, loader, validation=validation)
                checked = check_validations(engine, servers, client, validation)
                trainer.train(resume=False)
            masters = torch.cat([s.master for s in engine.shards()])
            results[name] = {
                "losses": losses, "jobs": len(reports), "expected": expected, "status": servers.top.status(),
                "lost": servers.region.uplink.lost_updates, "left": servers.top.finished,
                "weights": torch.cat(weights_of(servers.top)).norm().item(), "masters": masters.norm().item(),
                "validations": checked,
            }  # fmt: skip
        results.setdefault(name, {"losses": losses})
        engine.close()
        shut_down(leave_world=False)
    return results


class Died(Exception):
    pass


def try_a_lost_state() -> list[str]:
    """What a worker reports that comes back after a death, with its only checkpoint damaged."""
    from geotrain.worker.trainer import Trainer

    run = run_of(OUTER["halos"])
    run = run.model_copy(update={"checkpoint": run.checkpoint.model_copy(update={"every_jobs": 1})})
    servers, other, told, left = LocalServers(run), LocalServers(run), list[str](), iter(range(4))
    servers.region.origin = "one"
    engine: Any = start(MODEL, ParallelConfig(), run.deepspeed)
    train_step = engine.train_step

    def dies(*args: Any) -> Any:
        if next(left, None) is None:
            raise Died
        return train_step(*args)

    with tempfile.TemporaryDirectory() as folder:
        for step in dies, train_step:
            engine.train_step = step
            member = member_of(run, servers, LocalClient(servers), folder, trouble=told.append)
            trainer = Trainer(member, engine, loader_of())
            with pytest.raises(Died) if step is dies else nullcontext():
                trainer.train(resume=step is not dies)
            trainer.checkpoints.wait()
            other.region.origin = f"not {servers.region.origin}"
            with pytest.raises(ConfigError, match="is of another run"):
                Trainer(member_of(run, other, LocalClient(other), folder), engine, loader_of()).train(resume=False)
            for manifest in Path(folder, "w").glob("*/manifest.json"):
                manifest.write_bytes(b"")
    with mock.patch("os._exit", lambda code: told.append(f"ends with {code}")):
        trainer.loop.watch._report({0: "rank 0"}, lost=True)
    stop(engine)
    return [each.replace(folder, "") for each in told]


ACCO = ("exact", "delayed")
# θ = x − 1·(x − θ) of the worker's own weights, a step late: what was trained meanwhile is given up.
A_STEP_BACK = TAKES_THE_WORKERS_WEIGHTS.model_copy(
    update={"local_steps": 2, "overlap": OverlapConfig(steps=1, adopt="mix", mix=0.0)}
)


def try_acco(form: Any) -> dict[str, Any]:
    """Losses and masters through that outer loop; and of a twin without one, which waits for each step and so takes
    its masters by itself."""
    from geotrain.worker.trainer import Trainer

    run = run_of(A_STEP_BACK, AccoConfig(form=form, synchronous_steps=1))
    servers, loader = LocalServers(run), loader_of()
    engine = start(MODEL, ParallelConfig(), run.deepspeed, acco=form)
    write(engine, {name: view.clone() for name, view in servers.parameter_map.split(0, servers.top.weights(0))})
    losses, kept = [], []
    for step, batch in enumerate(loader.steps(0, STEPS * BATCH)):
        losses.append(engine.train_step(batch, step).loss)
        engine.settle()
        if step % 2 == 1:
            kept = [shard.master.clone() for shard in engine.shards()]
        elif kept:
            for shard, master in zip(engine.shards(), kept, strict=True):
                shard.master.copy_(master)
            engine.refresh()
    twin = losses, torch.cat([shard.master for shard in engine.shards()])
    stop(engine)

    engine = start(MODEL, ParallelConfig(), run.deepspeed, acco=form)
    thread, results, train_step = engine.optimizer.communication, [], engine.train_step
    reduce_scatter = thread.reduce_scatter
    thread.reduce_scatter = lambda flat: (time.sleep(0.05), reduce_scatter(flat))  # a step is long under way

    def watched(*args: Any) -> Any:
        results.append(train_step(*args))
        return results[-1]

    engine.train_step = watched
    with tempfile.TemporaryDirectory() as folder:
        client = LocalClient(servers)
        trainer = Trainer(member_of(run, servers, client, folder), engine, loader)
        trainer.loop._metrics = lambda: {}  # reading a loss waits for its step, and would hide who does not wait
        trainer.train(resume=False)
    ours = [result.loss for result in results], torch.cat([shard.master for shard in engine.shards()])
    stop(engine)
    return {"ours": ours, "twin": twin}


def check_validations(engine: Any, servers: LocalServers, client: LocalClient, batches: Any) -> list[tuple[Any, ...]]:
    """Filled, at each validation, with its number, its loss, and that of the global weights as found by hand."""
    found: list[tuple[Any, ...]] = []
    told = client.validated

    def validated(result: Any) -> None:
        own = [shard.master.clone() for shard in engine.shards()]
        assert servers.region.frozen is not None
        weights = servers.region.store.copy[0].float()
        write(engine, {name: view.clone() for name, view in servers.parameter_map.split(0, weights)})
        found.append((result.number, result.loss, engine.evaluate(batches)))
        for shard, values in zip(engine.shards(), own, strict=True):
            shard.master.copy_(values)
        engine.refresh()
        told(result)

    client.validated = validated  # type: ignore[method-assign]
    return found


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return run_world(1, try_both)[0]


@pytest.mark.slow
@pytest.mark.parametrize("form", ACCO)
def test_deltas_and_adoption_with_acco_are_of_committed_steps(results, form):
    (losses, masters), (expected, expected_masters) = results[form]["ours"], results[form]["twin"]
    assert losses == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(masters, expected_masters, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["identity", "identity in fragments", BALANCED])
def test_an_outer_loop_that_adopts_the_workers_own_weights_changes_nothing(results, name):
    """One worker, outer learning rate 1, no momentum: x − 1·(x − θ) = θ, as with no outer loop."""
    assert results[name]["losses"] == pytest.approx(results["alone"]["losses"], rel=1e-5)


@pytest.mark.parametrize("name", list(OUTER))
def test_every_sample_ends_in_the_global_weights(results, name):
    status = results[name]["status"]
    assert status["committed_samples"] == status["train_samples"] == STEPS * BATCH
    jobs = range(OUTER[name].local_steps, STEPS, OUTER[name].local_steps)
    assert results[name]["expected"] == [first * BATCH for first in jobs], (
        "data of each next lease are asked for early"
    )
    assert status["open_leases"] == 0 and results[name]["left"] and results[name]["lost"] == 0
    assert len(results[name]["losses"]) == STEPS
    assert results[name]["jobs"] == -(-STEPS // OUTER[name].local_steps)


@pytest.mark.parametrize("name", ["streaming, overlapped", "streaming, late"])
def test_rebasing_loses_no_step_of_a_single_worker(results, name):
    """Each delta applied whole, α = 1: whatever was in flight, the global weights end where the worker ended."""
    assert results[name]["losses"] == pytest.approx(results["alone"]["losses"], rel=1e-3)
    assert results[name]["weights"] == pytest.approx(results[name]["masters"], rel=1e-5)


def test_the_outer_loop_matters(results):
    assert results["halos"]["losses"][4:] != pytest.approx(results["alone"]["losses"][4:], rel=1e-4)


def test_a_resume_without_its_state_is_reported(results):
    damaged = "/w/job-00000001: passed over: damaged manifest.json"
    begins = "has trained 1 jobs before, and begins without its saved state: no whole checkpoint is in /w"
    assert results["lost"][:2] == [damaged, begins]


def test_a_worker_that_hangs_ends(results):
    hangs, ends = results["lost"][2:]
    assert hangs.startswith("hangs: rank 0") and ends == "ends with 1"


def test_validation_sees_the_global_weights_and_changes_no_bit_of_training(results):
    assert results[VALIDATED]["losses"] == results["halos"]["losses"]
    assert results[VALIDATED]["weights"] == results["halos"]["weights"]
    validations = results[VALIDATED]["validations"]
    assert [number for number, _, _ in validations] == [1]  # the first update commits half of the run
    for _, loss, by_hand in validations:
        assert loss == by_hand
    latest = results[VALIDATED]["status"]["validation"]
    assert (latest["number"], latest["loss"], latest["worker"]) == (1, validations[0][1], "w")
    assert results["halos"]["validations"] == [] and results["halos"]["status"]["validation"] is None
