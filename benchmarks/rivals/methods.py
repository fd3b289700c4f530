"""The methods that are compared, each as what the common loop needs of it (`Method`). Each is used as its
documentation shows; their libraries are imported when they are made."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.rivals.task import BATCH, FRAGMENTS, LAYERS, LOCAL_STEPS, OVERLAP_STEPS, REGIONS, Task, samples_of

DEVICE = "geo0"  # of the emulated link, in each region's namespace


class Method:
    """A worker alone, and what the others change of it.

    module: what is called with a batch. optimizer: what is stepped. steps: (share of the run, samples) of each step.
    """

    def __init__(self, task: Task, region: str, model: Any, optimizer: Any) -> None:
        self.task, self.region, self.worker = task, region, REGIONS.index(region)
        self.model = self.module = model
        self.optimizer = optimizer
        self.join()

    def join(self) -> None:
        """Meet the other region."""

    def steps(self) -> Iterator[tuple[float, range]]:
        for step, samples in enumerate(samples_of(self.worker, self.task.steps)):
            yield step / self.task.schedule_steps, samples

    def after_step(self, loss: float) -> None:
        """Do what the method does after the optimizer's step."""

    def finish(self) -> None:
        """Complete what is under way after the last step."""

    def final(self) -> Iterable[tuple[str, Any]] | None:
        """The weights that a user would export; None: they lie elsewhere."""
        return self.model.named_parameters()

    def told(self) -> dict[str, Any]:
        """More about the run."""
        return {}

    def close(self) -> None:
        """Let go of threads and sockets."""


class DataParallel(Method):
    """torch's DistributedDataParallel over gloo, whose store is in the first region."""

    bucket_mb: float | None = None  # torch's default

    def join(self) -> None:
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
        store = f"tcp://{self.task.addresses[REGIONS[0]]}:{self.task.ports[0]}"
        limit = timedelta(seconds=120)
        dist.init_process_group("gloo", store, rank=self.worker, world_size=len(REGIONS), timeout=limit)
        self.module = DistributedDataParallel(self.model, bucket_cap_mb=self.bucket_mb)

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


class PowerSgd(DataParallel):
    """DataParallel with torch's PowerSGD hook: rank 4, from the third step on. One bucket: of several, the
    hook's sums meet in another order on each side, and gloo ends the run."""

    bucket_mb = 100.0

    def join(self) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        super().join()
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        self.module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


class TorchftDiLoCo(Method):
    """torchft's DiLoCo: H steps, then the mean of the deltas, which all wait for. The outer optimizer is plain SGD
    of rate 1: plain averaging."""

    fragments, delay, alpha = 1, 0, 0.0

    def join(self) -> None:
        import torch
        from torch.distributed import TCPStore
        from torchft import Manager, ProcessGroupGloo
        from torchft.local_sgd import DiLoCo

        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
        own = self.task.addresses[self.region]
        self.store = TCPStore(own, 0, is_master=True, wait_for_workers=False)
        limit = timedelta(seconds=60)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=limit),
            load_state_dict=self._load,
            state_dict=self._state,
            min_replica_size=1,
            use_async_quorum=False,
            timeout=limit,
            quorum_timeout=timedelta(seconds=120),
            rank=0,
            world_size=1,
            store_addr=own,
            store_port=self.store.port,
            lighthouse_addr=f"http://{self.task.addresses[REGIONS[0]]}:{self.task.ports[0]}",
            replica_id=self.region,
            init_sync=False,  # all begin with the same weights
            hostname=own,
        )
        parts = self._parts() if self.fragments > 1 else [self.model]
        outer = [torch.optim.SGD(part.parameters(), lr=1.0) for part in parts]
        how = {"fragment_sync_delay": self.delay, "fragment_update_alpha": self.alpha}
        self.algorithm = DiLoCo(self.manager, parts, self.optimizer, outer, LOCAL_STEPS, **how)
        self.algorithm.__enter__()

    def _parts(self) -> list[Any]:
        from torch import nn

        layers = list(self.model.model.layers)
        size = len(layers) // FRAGMENTS
        parts = [nn.ModuleList(layers[i * size : (i + 1) * size]) for i in range(FRAGMENTS)]
        parts[0].append(self.model.model.embed_tokens)
        parts[-1].append(self.model.model.norm)
        return parts

    def _state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def _load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def told(self) -> dict[str, Any]:
        return {"syncs": self.manager.current_step()}

    def close(self) -> None:
        self.algorithm.__exit__(None, None, None)
        self.manager.shutdown(wait=False)


class TorchftStreaming(TorchftDiLoCo):
    """torchft's Streaming DiLoCo: a fragment at a time, its sum under way for τ steps."""

    fragments, delay = FRAGMENTS, OVERLAP_STEPS


class TorchftHalf(TorchftStreaming):
    """TorchftStreaming that keeps half of what was trained while the sum was under way; its default keeps nothing."""

    alpha = 0.5


class Hivemind(Method):
    """hivemind's Optimizer with local updates: peers average their weights whenever all of them together have trained
    H steps each; 8-bit coded."""

    def join(self) -> None:
        import hivemind
        from hivemind.compression import Uniform8BitQuantization

        place = Path(self.task.folder) / "peers"
        own = self.task.addresses[self.region]
        maddr = [f"/ip4/{own}/tcp/{self.task.ports[self.worker]}"]
        peers = None
        if self.worker or (Path(self.task.folder) / f"joined-{self.region}").exists():
            other = place.with_name(f"peers-{REGIONS[1 - self.worker]}")
            while not other.exists():
                time.sleep(0.05)
            peers = other.read_text().split()
        self.dht = hivemind.DHT(host_maddrs=maddr, initial_peers=peers, start=True)
        part = place.with_name("peers.part")
        part.write_text("\n".join(map(str, self.dht.get_visible_maddrs())))
        part.rename(place.with_name(f"peers-{self.region}"))
        self.optimizer = hivemind.Optimizer(
            dht=self.dht,
            run_id="rivals",
            target_batch_size=LOCAL_STEPS * BATCH * len(REGIONS),
            batch_size_per_step=BATCH,
            optimizer=self.optimizer,
            use_local_updates=True,
            matchmaking_time=3.0,
            averaging_timeout=15.0,
            allreduce_timeout=15.0,  # else the slower peer waits for ever for the last average, which the other left
            state_averaging_compression=Uniform8BitQuantization(),
            verbose=True,
        )
        if (Path(self.task.folder) / f"joined-{self.region}").exists():
            self.optimizer.load_state_from_peers()

    def finish(self) -> None:
        """Averaging goes on beside training; its last result would be taken over at the next step."""
        self.optimizer.state_averager.step(wait_for_delayed_updates=True, apply_delayed_updates=True)

    def told(self) -> dict[str, Any]:
        return {"syncs": self.optimizer.local_epoch}

    def close(self) -> None:
        self.optimizer.shutdown()
        self.dht.shutdown()


class Ours(Method):
    """`geotrain.OuterLoop`; the run file says the rest."""

    def join(self) -> None:
        import geotrain

        run = Path(self.task.folder) / "run" / "run.json"
        self.waited_s = 0.0
        self.outer = geotrain.OuterLoop(
            run, self.region, self.model, state={"adam": self.optimizer}, report=self._note
        )

    def _note(self, numbers: dict[str, Any]) -> None:
        self.waited_s += numbers["waited_s"]

    def steps(self) -> Iterator[tuple[float, range]]:
        for samples in self.outer.samples():
            yield self.outer.step / (len(REGIONS) * self.task.schedule_steps), samples

    def after_step(self, loss: float) -> None:
        self.outer.after_step(loss)

    def final(self) -> None:
        return None  # `geotrain export` has them

    def told(self) -> dict[str, Any]:
        return {"waited_s": self.waited_s}

    def close(self) -> None:
        self.outer.close()


AVERAGING = {"name": "sync", "lr": 1.0, "momentum": 0.0}
FP32 = {"up": {"name": "fp32"}, "down": {"name": "fp32"}}
INT4 = {"up": {"name": "int4"}, "down": {"name": "int4"}}
MOMENTUM = {"name": "region_momentum"}  # the default: in runs as short as these its answers wait


def in_steps(overlap: int) -> dict[str, Any]:
    """Fragments, and so many steps of overlap."""
    steps = {"steps": overlap, "late": "continue", "adopt": "rebase"}
    return {"fragments": {"layers_per_fragment": LAYERS // FRAGMENTS}, "overlap": steps}


STREAMING = in_steps(OVERLAP_STEPS)
OUTER: dict[str, dict[str, Any]] = {  # the `outer` block of our runs
    "ours-blocking": {"rule": AVERAGING, **FP32},
    "ours-blocking-4-bit": {"rule": AVERAGING, **INT4},
    "ours-streaming": {"rule": AVERAGING, **INT4, **STREAMING},
    "ours": {"rule": MOMENTUM, **INT4, **STREAMING},
    "ours-often": {"rule": MOMENTUM, "local_steps": LOCAL_STEPS // 2, **INT4, **in_steps(LOCAL_STEPS // 4)},
}
METHODS: dict[str, Callable[..., Method]] = {
    "alone": Method,
    "ddp": DataParallel,
    "powersgd": PowerSgd,
    "torchft-diloco": TorchftDiLoCo,
    "torchft-streaming": TorchftStreaming,
    "torchft-streaming-half": TorchftHalf,
    "hivemind": Hivemind,
    **dict.fromkeys(OUTER, Ours),
}
TITLES = {  # in the order of the runs: the time may be over before the last
    "ours-streaming": "ours, `sync`, streaming, 4 bits",
    "ours": "ours, `region_momentum`, streaming, 4 bits",
    "ours-often": "ours, `region_momentum`, streaming, 4 bits, H 16",
    "ours-blocking-4-bit": "ours, `sync`, blocking, 4 bits",
    "ours-blocking": "ours, `sync`, blocking, fp32",
    "torchft-diloco": "torchft DiLoCo, fp32",
    "torchft-streaming": "torchft Streaming DiLoCo, fp32, α 0",
    "torchft-streaming-half": "torchft Streaming DiLoCo, fp32, α 0.5",
    "hivemind": "hivemind, local updates, 8 bits",
    "powersgd": "torch DDP with PowerSGD, rank 4",
    "ddp": "torch DDP, fp32",
}
