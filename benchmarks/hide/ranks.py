"""One rank of the benchmark of hidden communication: `python -m benchmarks.hide.ranks`, with its job as JSON."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from benchmarks.small_runs import deepspeed_block, llama
from geotrain.parameters.parameter_map import parameter_count

VOCABULARY = 256


@dataclass(frozen=True)
class Size:
    """hidden, layers, ffn of the model; sequence, samples of a micro-batch, micro-batches of a replica's step."""

    hidden: int
    layers: int
    ffn: int
    sequence: int
    samples: int
    micro_batches: int


@dataclass(frozen=True)
class Way:
    """A way to communicate. form: of ACCO; None: ZeRO-1. bits: of gradients and weights' changes; None: values.
    by_deepspeed: DeepSpeed's own engine, with its overlap."""

    form: Literal["exact", "delayed"] | None = None
    bits: tuple[int, int] | None = None
    by_deepspeed: bool = False


ZERO, DEEPSPEED, DEFAULT = "zero1", "deepspeed", "delayed_8_4"
WAYS = {
    ZERO: Way(),
    DEEPSPEED: Way(by_deepspeed=True),
    "zero1_8_4": Way(bits=(8, 4)),
    "zero1_4_4": Way(bits=(4, 4)),
    "exact": Way("exact"),
    "delayed": Way("delayed"),
    DEFAULT: Way("delayed", (8, 4)),
    "delayed_4_4": Way("delayed", (4, 4)),
}


@dataclass(frozen=True)
class Job:
    """A job of the ranks. hold_s: seconds of a micro-batch, nearly all of them waited. bf16: compute in it, and
    otherwise in fp32. bytes_per_s: of ideal links, one of each rank, which pace its collectives; infinite: they are
    counted only. steps: of a block that is timed."""

    what: Literal["time", "hidden"]
    size: Size
    ways: tuple[str, ...] = ()
    rounds: int = 0
    steps: int = 3
    hold_s: float = 0.0
    bf16: bool = True
    bytes_per_s: float = math.inf
    optimizer: Literal["muon", "adamw"] = "muon"
    ranks: int = 2

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Job:
        raw = json.loads(text)
        return Job(**{**raw, "size": Size(**raw["size"]), "ways": tuple(raw["ways"])})


def main() -> None:
    job, rank, address, (host, port), answer = (
        Job.from_json(sys.argv[1]),
        int(sys.argv[2]),
        sys.argv[3],
        sys.argv[4].split(":"),
        Path(sys.argv[5]),
    )
    import psutil

    named = {a.address: name for name, addresses in psutil.net_if_addrs().items() for a in addresses}
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(job.ranks), LOCAL_RANK="0", MASTER_ADDR=host, MASTER_PORT=port)
    # all ranks stand on this machine, with the slow link of gloo between them: not on one GPU, which NCCL refuses
    os.environ.update(GLOO_SOCKET_IFNAME=named[address], DS_ACCELERATOR="cpu")
    pace(job, rank)
    found = Rank(job, rank).measure()
    if rank == 0:
        answer.write_text(json.dumps(found))


class Rank:
    def __init__(self, job: Job, rank: int) -> None:
        import torch

        from geotrain.config import ParallelConfig
        from geotrain.data.corpus import documents
        from geotrain.inner.runtime import parallel

        torch.set_num_threads(1)
        self.job, self.rank = job, rank
        parallel.join(120.0)
        self.mesh = parallel.initialize(ParallelConfig(), 120.0)
        text = "\n".join(documents(1_000_000)).encode()
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def measure(self) -> Any:
        import torch.distributed as dist

        found = getattr(self, self.job.what)()
        dist.barrier()
        return found

    # ------------------------------------------------------------------------------------------------- parts

    def batches(self, step: int) -> list[Any]:
        """The micro-batches of a step of this rank, int64 [samples, sequence + 1] each."""
        import torch

        size = self.job.size
        drawn = torch.Generator().manual_seed(1_000_003 * self.rank + step)
        starts = torch.randint(
            0, len(self.text) - size.sequence - 1, (size.micro_batches, size.samples), generator=drawn
        )
        return [
            torch.stack([self.text[i : i + size.sequence + 1] for i in of_one]).long() for of_one in starts.tolist()
        ]

    def engine(self, name: str) -> Any:
        """The engine of one way; several may live side by side, as they share the process groups of the ranks."""
        from geotrain.config import AccoConfig, ParallelConfig, architecture_from_hf
        from geotrain.inner.acco.engine import AccoEngine
        from geotrain.inner.build import complete_block, keep_matrices_whole
        from geotrain.inner.engine.engine import GeoEngine
        from geotrain.inner.model.model import build_model, placements
        from geotrain.inner.runtime import platform
        from geotrain.inner.runtime.parallel import EXPERTS
        from geotrain.optimizers.groups import parameter_groups
        from geotrain.optimizers.inner_optimizer import InnerOptimizer
        from geotrain.optimizers.muon import owned_matrices
        from geotrain.parallelism.checks import reduction_bucket
        from geotrain.parallelism.optimizer_settings import AdamWSettings, MuonSettings
        from geotrain.parameters.initial import initial_tensor
        from geotrain.parameters.parameter_map import canonical_parameters

        way, size, muon = WAYS[name], self.job.size, self.job.optimizer == "muon"
        a, block = architecture_from_hf(model_config(size)), self.block(way)
        muon &= not way.by_deepspeed  # whose shards cut matrices
        settings = (MuonSettings if muon else AdamWSettings)(lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
        with platform.quiet_construction():
            model = build_model(a, ParallelConfig(), self.mesh, size.sequence, self.job.bf16, "none", 0)
            placed = placements(model, a, ParallelConfig(), self.mesh)
            if way.by_deepspeed:
                for parameter, place in placed:
                    parameter.data.normal_(0, 0.02) if place.decays else parameter.data.fill_(1)
                groups = parameter_groups(placed, settings, EXPERTS)
                return DeepSpeedsOwn(model, InnerOptimizer(groups, settings), block, self.mesh)
            bucket = None if way.form else reduction_bucket(block, parameter_count(a))
            groups = parameter_groups(placed, settings, EXPERTS, bucket)
            if muon:
                keep_matrices_whole(groups, self.mesh, way.form is not None, model)
            optimizer = InnerOptimizer(groups, settings)
            config = complete_block(block, parameter_count(a))
            parts = (model, optimizer, config, self.mesh, placed, a, size.sequence)
            if way.form:
                acco = AccoConfig(form=way.form, synchronous_steps=0, timeout_s=120.0)
                engine: Any = AccoEngine(*parts, acco=acco)
            else:
                engine = GeoEngine(*parts)
            if muon:
                optimizer.bind(owned_matrices(placed, a, engine.optimizer, True), None)
        write(engine, {p.name: initial_tensor(p, 0) for p in canonical_parameters(a)})
        return engine

    def block(self, way: Way) -> dict[str, Any]:
        from geotrain.config import architecture_from_hf

        size = self.job.size
        zero: dict[str, Any] = {"stage": 1}
        if way.by_deepspeed:  # each gradient to its owner only: half the bytes over gloo
            zero |= {"overlap_comm": True, "use_multi_rank_bucket_allreduce": False}
            zero["reduce_bucket_size"] = parameter_count(architecture_from_hf(model_config(size))) // 8
        if way.bits:
            zero |= dict(zip(("gradient_bits", "weight_bits"), way.bits, strict=True))
        batch = self.job.ranks * size.samples * size.micro_batches
        more: dict[str, Any] = {"bf16": {"enabled": self.job.bf16}, "steps_per_print": None}
        if self.job.bf16 and way.bits:
            more["data_types"] = {"grad_accum_dtype": "fp32"}
        return deepspeed_block(batch, size.samples, 2e-3, zero_optimization=zero, **more)

    # ------------------------------------------------------------------------------------------------ figures

    def compute_s(self, engine: Any) -> float:
        """Seconds of a step's forward and backward alone."""
        import torch.distributed as dist

        dist.barrier()
        begin = time.perf_counter()
        engine.set_gradient_accumulation_boundary(False)
        COMPUTE.begin_step()
        engine._run_schedule(self.batches(0), False)
        return time.perf_counter() - begin

    def time(self) -> dict[str, Any]:
        """Measure in every round the seconds of compute and of each way's step, and bytes that this rank sent."""
        import torch
        import torch.distributed as dist

        engines = {name: self.engine(name) for name in self.job.ways}
        plain, found = engines[ZERO], {name: {"step_s": [], "sent_bytes": 0.0} for name in engines}
        for engine in engines.values():
            COMPUTE.wait_in_layers(engine.module, self.job.hold_s)
            self.steps(engine, 1)
            engine.settle()
        computed, shares = [], []
        for turn in range(self.job.rounds):
            processor_s, began_s = time.process_time(), time.perf_counter()
            computed.append(self.compute_s(plain))
            used = torch.tensor((time.process_time() - processor_s) / (time.perf_counter() - began_s))
            dist.all_reduce(used)  # of all ranks, which share the machine
            shares.append(float(used) / len(os.sched_getaffinity(0)))
            for name, engine in list(engines.items())[:: -1 if turn % 2 else 1]:
                arrive = getattr(getattr(engine, "optimizer", None), "wait_for_weights", engine.settle)
                arrive()
                sent = LINK.sent_bytes
                found[name]["step_s"].append(self.timed(partial(self.steps, engine, 1), self.job.steps))
                arrive()
                found[name]["sent_bytes"] = (LINK.sent_bytes - sent) / (1 + self.job.steps)
        return {**found, "compute_s": statistics.median(computed), "processor_share": statistics.median(shares)}

    def hidden(self) -> dict[str, list[float]]:
        """Seconds of a step in every round, with ZeRO-1's communication after the compute, beside it, and without."""
        engine = self.engine(ZERO)
        self.steps(engine, 1)
        COMPUTE.wait_in_layers(engine.module, self.job.hold_s)
        optimizer = engine.optimizer
        launch = optimizer._launch
        buckets = {bucket: bucket._ranks for bucket in optimizer._forward}

        def step_after() -> None:
            optimizer._launch = lambda all_of_them=False: launch(True) if all_of_them else None
            self.steps(engine, 1)
            optimizer.wait_for_weights()
            optimizer._launch = launch

        def step_without() -> None:
            for bucket in buckets:
                bucket._ranks = 1
            self.steps(engine, 1)
            optimizer.wait_for_weights()
            for bucket, ranks in buckets.items():
                bucket._ranks = ranks

        def step_beside() -> None:
            self.steps(engine, 1)

        ways = {"after": step_after, "beside": step_beside, "without": step_without}
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(self.job.rounds + 1):
            for name, way in ways.items():
                found[name].append(self.timed(way, 3))
            optimizer.wait_for_weights()
        return {name: seconds[1:] for name, seconds in found.items()}

    def timed(self, step: Callable[[], None], steps: int) -> float:
        import torch.distributed as dist

        step()  # what it leaves behind, the first of the block finds
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - begin) / steps

    def steps(self, engine: Any, count: int) -> None:
        from geotrain.data.loader import StepBatch

        for step in range(count):
            batches = self.batches(step)
            COMPUTE.begin_step()
            engine.train_step(StepBatch(batches, batches.__getitem__), 1000)


class DeepSpeedsOwn:
    """DeepSpeed's own engine with overlap_comm: it reduces in the hooks of the last micro-batch's backward."""

    def __init__(self, model: Any, optimizer: Any, block: dict[str, Any], mesh: Any) -> None:
        import deepspeed

        config, self.module = {**block, "zero_allow_untested_optimizer": True}, model
        self.engine = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, mpu=mesh, dist_init_required=False
        )[0]

    def train_step(self, batch: Any, schedule_step: int) -> None:
        from geotrain.inner.runtime import platform

        with platform.megatron_runtime():
            for tokens in batch.own:
                loss = self.engine(tokens[:, :-1], None, None, labels=tokens[:, 1:]).mean()
                self.engine.backward(loss)
                LINK.wait_until_free()
                self.engine.step()

    def settle(self) -> None:
        pass


class Compute:
    """Seconds that compute takes: layers wait until they have taken theirs, by a clock that stands still while this
    thread waits for communication or steps the optimizer. What layers really compute is a part of these seconds."""

    def __init__(self) -> None:
        self._stood_still_s, self._depth, self._due_s = 0.0, 0, math.inf

    def begin_step(self) -> None:
        """Forget how late the last step's layers were."""
        self._due_s = math.inf

    def wait_in_layers(self, model: Any, hold_s: float) -> None:
        """Let each micro-batch take so long: a third in forward, the rest in backward, where a layer's gradients come
        after its wait."""
        third_s = hold_s / 3 / len(model.decoder.layers)
        model.decoder.layers[0].register_forward_pre_hook(self._begin)
        for layer in model.decoder.layers:
            layer.register_forward_hook(lambda *_: self._wait(third_s))
            layer.register_full_backward_pre_hook(lambda *_: self._wait(2 * third_s))

    def _begin(self, *_: Any) -> None:
        if self._due_s == math.inf:
            self._due_s = self._clock_s()

    def _clock_s(self) -> float:
        return time.perf_counter() - self._stood_still_s

    def _wait(self, share_s: float) -> None:
        self._due_s += share_s
        time.sleep(max(0.0, self._due_s - self._clock_s()))

    def apart(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function; on the thread that computes, the clock stands still in it."""

        def timed(*args: Any, **more: Any) -> Any:
            if self._depth or threading.current_thread() is not threading.main_thread():
                return call(*args, **more)
            begin, self._depth = time.perf_counter(), 1
            try:
                return call(*args, **more)
            finally:
                self._depth = 0
                self._stood_still_s += time.perf_counter() - begin

        return timed


COMPUTE = Compute()


class IdealLink:
    """A rank's link: what is sent leaves one after the other at a rate, whatever the real one is."""

    def __init__(self) -> None:
        self.bytes_per_s, self.sent_bytes, self._free_s, self._lock = math.inf, 0.0, 0.0, threading.Lock()

    def arrival_s(self, count: float) -> float:
        """Send so many bytes; returns when they have arrived, by `perf_counter`."""
        with self._lock:
            self.sent_bytes += count
            self._free_s = max(time.perf_counter(), self._free_s) + count / self.bytes_per_s
            return self._free_s

    @COMPUTE.apart
    def wait_until_free(self) -> None:
        """Wait for all that was sent."""
        time.sleep(max(0.0, self._free_s - time.perf_counter()))


LINK = IdealLink()


class Travelling:
    """A collective under way, done no sooner than its bytes have crossed the link."""

    def __init__(self, work: Any, arrival_s: float) -> None:
        self._work, self._arrival_s = work, arrival_s

    @COMPUTE.apart
    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        time.sleep(max(0.0, self._arrival_s - time.perf_counter()))


def pace(job: Job, rank: int) -> None:
    """Let the collectives of this process take as long as over ideal links, apart for each direction."""
    import deepspeed.comm as ds_comm
    from deepspeed.runtime.engine import DeepSpeedEngine

    from geotrain.inner.acco.communication_thread import CommunicationJob

    CommunicationJob.wait = COMPUTE.apart(CommunicationJob.wait)  # type: ignore[method-assign]
    DeepSpeedEngine.step = COMPUTE.apart(DeepSpeedEngine.step)  # type: ignore[method-assign]
    LINK.bytes_per_s, others = job.bytes_per_s, job.ranks - 1
    # Bytes that a rank must send, by the call's arguments: each tensor's parts to their owners, or its own to all.
    least: dict[str, Callable[..., float]] = {
        "all_to_all_single": lambda out, sent, out_sizes=None, sizes=None, *_: (
            sent.nbytes * others / job.ranks if sizes is None else sent.element_size() * (sum(sizes) - sizes[rank])
        ),
        "allgather_fn": lambda out, sent, *_: sent.nbytes * others,
        "all_gather_into_tensor": lambda out, sent, *_: sent.nbytes * others,
        "all_reduce": lambda tensor, *_: 2 * tensor.nbytes * others / job.ranks,
        "reduce": lambda tensor, dst, *_: tensor.nbytes * (dst != rank),
    }

    def paced(name: str, bytes_of: Callable[..., float]) -> Any:
        real = getattr(ds_comm, name)

        def call(*args: Any, async_op: bool = False, **more: Any) -> Any:
            named = [more[key] for key in ("dst",) if key in more]
            arrival_s = LINK.arrival_s(bytes_of(*args, *named))
            under_way = Travelling(COMPUTE.apart(real)(*args, async_op=async_op, **more), arrival_s)
            # On a CPU DeepSpeed stands still in its reductions. On an accelerator they have a stream of their own,
            # for which it waits after backward (`DeepSpeedsOwn`).
            if async_op or name == "reduce":
                return under_way
            under_way._work = None
            under_way.wait()
            return None

        return call

    for name, bytes_of in least.items():
        setattr(ds_comm, name, paced(name, bytes_of))


def model_config(size: Size) -> dict[str, Any]:
    return llama(size.hidden, size.layers, 4, size.ffn, VOCABULARY, size.sequence)


def write(engine: Any, weights: dict[str, Any]) -> None:
    """Set the engine's weights, by canonical name."""
    import torch

    for shard in engine.shards():
        rows = [
            torch.as_strided(weights[r.parameter].view(-1), (r.count, r.length), (r.stride or r.length, 1), r.start)
            for r in shard.runs
        ]
        shard.master.copy_(torch.cat([row.reshape(-1) for row in rows]))
    engine.refresh()


if __name__ == "__main__":
    main()
