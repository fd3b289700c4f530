"""One rank of the ACCO benchmark, which starts it as `python -m benchmarks.acco.ranks` with its job as JSON."""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.small_runs import deepspeed_block, llama, schedule_block
from geotrain.parameters.parameter_map import parameter_count

VOCABULARY = 256
WARM = 1  # steps of a block before its clock starts
HELD_OUT_TOKENS = 65_536
BLOCK = 5  # steps of a block


@dataclass(frozen=True)
class Size:
    """hidden, layers, ffn of the model; sequence, samples of a micro-batch, micro-batches of a replica's step."""

    hidden: int
    layers: int
    ffn: int
    sequence: int
    samples: int
    micro_batches: int


HEAVY = Size(192, 4, 512, 64, 1, 9)  # 2 M parameters: something to send
SMALL = Size(64, 4, 128, 64, 4, 5)  # 0.16 M: many steps in little time
LONG = Size(384, 3, 928, 128, 8, 4)  # 5.1 M; few wide layers: most of a core's time goes into matrices


@dataclass(frozen=True)
class Job:
    """A job of the two ranks. hold_s: least seconds of a micro-batch, in part waited. slower: how many times as
    long it takes rank 1. bf16: compute in it, and otherwise in fp32."""

    what: Literal["compute", "time", "unequal", "loss", "hidden"]
    size: Size
    variants: tuple[str, ...] = ()
    rounds: int = 0
    steps: int = 0
    seed: int = 0
    hold_s: float = 0.0
    slower: int = 1
    bf16: bool = True

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Job:
        raw = json.loads(text)
        return Job(**{**raw, "size": Size(**raw["size"]), "variants": tuple(raw["variants"])})


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
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR=host, MASTER_PORT=port)
    # both ranks stand on this machine, with the slow link of gloo between them: not on one GPU, which NCCL refuses
    os.environ.update(GLOO_SOCKET_IFNAME=named[address], DS_ACCELERATOR="cpu")
    found = Rank(job, rank, named[address]).measure()
    if rank == 0:
        answer.write_text(json.dumps(found))


class Rank:
    def __init__(self, job: Job, rank: int, interface: str) -> None:
        import torch

        from geotrain.config import ParallelConfig
        from geotrain.data.corpus import documents
        from geotrain.inner.runtime import parallel

        torch.set_num_threads(1)
        self.job, self.rank, self.interface = job, rank, interface
        parallel.join(120.0)
        self.mesh = parallel.initialize(ParallelConfig(), 120.0)
        text = "\n".join(documents(12_000_000)).encode()
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.pause_s = 0.0  # after each micro-batch

    def measure(self) -> Any:
        import torch.distributed as dist

        found = getattr(self, self.job.what)()
        dist.barrier()
        return found

    # ------------------------------------------------------------------------------------------------- parts

    def batch(self, sample: int, held_out: bool = False) -> Any:
        """One micro-batch, int64 [samples, sequence + 1]; the last 2 % of the text are held out."""
        import torch

        size, border = self.job.size, int(0.98 * len(self.text))
        low, high = (border, len(self.text)) if held_out else (0, border)
        drawn = torch.Generator().manual_seed(1_000_003 * self.job.seed + sample)
        starts = torch.randint(low, high - size.sequence - 1, (size.samples,), generator=drawn)
        return torch.stack([self.text[i : i + size.sequence + 1] for i in starts.tolist()]).long()

    def batches(self, step: int) -> list[Any]:
        first = (2 * step + self.rank) * self.job.size.micro_batches
        return [self.batch(first + i) for i in range(self.job.size.micro_batches)]

    def step(self, step: int) -> Any:
        from geotrain.data.loader import StepBatch

        first = 2 * step * self.job.size.micro_batches
        return StepBatch(self.batches(step), lambda i: self.batch(first + i))

    def engine(self, variant: str, steps: int, synchronous: int | None = None, balance: bool = False) -> Any:
        """The engine of one variant; several may live side by side, as they share the process groups of the ranks.

        synchronous: steps of ACCO's synchronous start; None: a sixth of the steps, 200 at most."""
        from geotrain.config import AccoConfig, ParallelConfig, architecture_from_hf
        from geotrain.inner.acco.engine import AccoEngine
        from geotrain.inner.build import complete_block
        from geotrain.inner.engine.engine import GeoEngine
        from geotrain.inner.model.model import build_model, placements
        from geotrain.inner.runtime import platform
        from geotrain.inner.runtime.parallel import EXPERTS
        from geotrain.optimizers.groups import parameter_groups
        from geotrain.optimizers.inner_optimizer import InnerOptimizer
        from geotrain.parallelism.acco_forms import FORMS
        from geotrain.parallelism.checks import reduction_bucket
        from geotrain.parallelism.optimizer_settings import AdamWSettings
        from geotrain.parameters.initial import initial_tensor
        from geotrain.parameters.parameter_map import canonical_parameters

        a, block = architecture_from_hf(model_config(self.job.size)), self.block(variant, steps)
        settings = AdamWSettings(lr=2e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        with platform.quiet_construction():
            model = build_model(a, ParallelConfig(), self.mesh, self.job.size.sequence, self.job.bf16, "none", 0)
            placed = placements(model, a, ParallelConfig(), self.mesh)
            if variant == "zero1-overlap":
                for parameter, place in placed:
                    parameter.data.normal_(0, 0.02) if place.decays else parameter.data.fill_(1)
                groups = parameter_groups(placed, settings, EXPERTS)
                return Overlapping(self, model, InnerOptimizer(groups, settings), block)
            bucket = None if variant in FORMS else reduction_bucket(block, parameter_count(a))
            optimizer = InnerOptimizer(parameter_groups(placed, settings, EXPERTS, bucket), settings)
            config = complete_block(block, parameter_count(a))
            parts = (model, optimizer, config, self.mesh, placed, a, self.job.size.sequence)
            if variant in FORMS:
                start = min(200, steps // 6) if synchronous is None else synchronous
                acco = AccoConfig(
                    prediction=variant,  # type: ignore[arg-type]
                    synchronous_steps=start,
                    timeout_s=120.0,
                    balance=balance,
                )
                engine: Any = AccoEngine(*parts, acco=acco)
            else:
                engine = GeoEngine(*parts)
        write(engine, {p.name: initial_tensor(p, self.job.seed) for p in canonical_parameters(a)})
        schedule = engine._run_schedule

        def paced(batches: Any, *args: Any, **kwargs: Any) -> Any:
            done = schedule(batches, *args, **kwargs)
            time.sleep(self.pause_s * len(batches))
            return done

        engine._run_schedule = paced
        return engine

    def block(self, variant: str, steps: int) -> dict[str, Any]:
        size = self.job.size
        zero: dict[str, Any] = {"stage": 1}
        if variant == "zero1-overlap":  # DeepSpeed's; each gradient to its owner only: half the bytes over gloo
            zero |= {"overlap_comm": True, "use_multi_rank_bucket_allreduce": False}
        total = max(steps, 40)
        return deepspeed_block(
            2 * size.samples * size.micro_batches, size.samples, 2e-3, bf16={"enabled": self.job.bf16},
            scheduler=schedule_block(min(100, total // 10), total), zero_optimization=zero, steps_per_print=None,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------ figures

    def compute(self) -> dict[str, float]:
        """Seconds of a step's forward and backward alone, with its pauses."""
        engine = self.engine("zero1", 100)
        return {"compute_s": self.compute_s(engine), "parameters": parameter_count(engine.architecture)}

    def compute_s(self, engine: Any) -> float:
        import torch.distributed as dist

        def once() -> float:
            dist.barrier()
            begin = time.perf_counter()
            engine.set_gradient_accumulation_boundary(False)
            engine._run_schedule(self.batches(0), False)
            return time.perf_counter() - begin

        once()
        if self.job.hold_s and not self.pause_s:
            count = self.job.size.micro_batches
            self.pause_s = max(0.0, self.job.hold_s - statistics.median(once() for _ in range(3)) / count)
        seconds = statistics.median(once() for _ in range(5))
        engine.optimizer.zero_grad()
        return seconds

    def time(self) -> dict[str, Any]:
        """Measure each variant: seconds a step in every round, bytes this rank sent a step, bytes that it keeps, how
        many of those are a scratch area whose size is the same for every model."""
        from geotrain.parallelism.acco_forms import FORMS

        found: dict[str, Any] = {}
        engines = {}
        for variant in self.job.variants:
            before = live_bytes()
            engines[variant] = self.engine(variant, 10_000, synchronous=0)
            self.steps(engines[variant], 2)
            found[variant] = {"step_s": [], "sent_bytes": [], "memory_bytes": live_bytes() - before}
            scratch = engines[variant].optimizer.communication._scratch if variant in FORMS else None
            found[variant]["scratch_bytes"] = 0 if scratch is None else scratch.nbytes
        plain = engines[self.job.variants[0]]
        found["compute_s"], found["parameters"] = self.compute_s(plain), parameter_count(plain.architecture)
        if pause_s := self.pause_s:
            self.pause_s = 0.0
            for engine in engines.values():
                self.wait_in_layers(engine, pause_s)
        for _ in range(self.job.rounds):
            for variant, engine in engines.items():
                seconds, sent = self.timed_block(engine)
                found[variant]["step_s"].append(seconds)
                found[variant]["sent_bytes"].append(sent)
        for variant in self.job.variants if self.job.rounds else ():
            found[variant]["sent_bytes"] = statistics.median(found[variant]["sent_bytes"])
        return found

    def hidden(self) -> dict[str, list[float]]:
        """Seconds of a step in every round, with ZeRO-1's communication after the compute, beside it, and without."""
        engine = self.engine("zero1", 10_000)
        self.compute_s(engine)
        pause_s, self.pause_s = self.pause_s, 0.0
        self.wait_in_layers(engine, pause_s)
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

    def wait_in_layers(self, engine: Any, pause_s: float) -> None:
        """Wait so long in each micro-batch, divided among its layers: a third in forward, the rest in backward, where
        a layer's gradients come after it."""
        layers = engine.module.decoder.layers
        third_s = pause_s / 3 / len(layers)
        for layer in layers:
            layer.register_forward_hook(lambda *_: time.sleep(third_s))
            layer.register_full_backward_pre_hook(lambda *_: time.sleep(2 * third_s))

    def timed(self, step: Callable[[], None], steps: int) -> float:
        import torch.distributed as dist

        step()  # what it leaves behind, the first of the block finds
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - begin) / steps

    def timed_block(self, engine: Any) -> tuple[float, float]:
        import torch.distributed as dist

        dist.barrier()
        self.steps(engine, WARM)
        begin, sent = time.perf_counter(), self.sent_bytes()
        self.steps(engine, BLOCK)
        result = (time.perf_counter() - begin) / BLOCK, (self.sent_bytes() - sent) / BLOCK
        engine.settle()
        return result

    def steps(self, engine: Any, count: int, scheduled: bool = False) -> Any:
        """Train, at the schedule's rates or at that of its 1000th step; return the last step's result."""
        for step in range(count):
            result = engine.train_step(self.step(step), step if scheduled else 1000)
        return result

    def sent_bytes(self) -> int:
        import psutil

        return int(psutil.net_io_counters(pernic=True)[self.interface].bytes_sent)

    def unequal(self) -> dict[str, Any]:
        """Tokens a second and the loss after equally many steps, with rank 1 `slower`: with ZeRO-1 each rank has half
        of a batch, with ACCO they take its micro-batches as they get to them."""
        found = {}
        plain = self.engine("zero1", self.job.steps)
        usual = self.compute_s(plain) / self.job.size.micro_batches - self.pause_s
        held = usual + self.pause_s
        self.pause_s = (self.job.slower if self.rank else 1) * held - usual
        for variant in self.job.variants:
            engine, begin = self.engine(variant, self.job.steps, balance=True), time.perf_counter()
            result = self.steps(engine, self.job.steps, scheduled=True)
            engine.settle()
            tokens = self.job.steps * result.tokens
            found[variant] = {"tokens_per_s": tokens / (time.perf_counter() - begin), "loss": self.loss_of(engine)}
            engine.close()
        return found

    def loss(self) -> dict[str, float]:
        """Loss on held-out text after `steps`."""
        found = {}
        for variant in self.job.variants:
            engine = self.engine(variant, self.job.steps)
            self.steps(engine, self.job.steps, scheduled=True)
            found[variant] = self.loss_of(engine)
            engine.close()
        return found

    def loss_of(self, engine: Any) -> float:
        """Over the same held-out micro-batches for all."""
        count = HELD_OUT_TOKENS // (2 * self.job.size.samples * self.job.size.sequence)
        return engine.evaluate([self.batch(2 * i + self.rank, held_out=True) for i in range(count)])


class Overlapping:
    """DeepSpeed's own engine with overlap_comm: it reduces in the hooks of the last micro-batch's backward."""

    def __init__(self, rank: Rank, model: Any, optimizer: Any, block: dict[str, Any]) -> None:
        import deepspeed

        config = {**block, "zero_allow_untested_optimizer": True}
        self.rank = rank
        self.engine = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, mpu=rank.mesh, dist_init_required=False
        )[0]

    def train_step(self, batch: Any, schedule_step: int) -> None:
        from geotrain.inner.runtime import platform

        with platform.megatron_runtime():
            for tokens in batch.own:
                loss = self.engine(tokens[:, :-1], None, None, labels=tokens[:, 1:]).mean()
                time.sleep(self.rank.pause_s)
                self.engine.backward(loss)
                self.engine.step()

    def settle(self) -> None:
        pass


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


def live_bytes() -> int:
    import torch

    gc.collect()
    tensors = [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


if __name__ == "__main__":
    main()
