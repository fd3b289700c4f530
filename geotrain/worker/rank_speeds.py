"""Finds a rank that computes far more slowly than its equals. In a step all ranks wait for the slowest, so that its
time tells nothing: now and then each rank times the same matrix product, and rank 0 compares what all have."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch
import torch.distributed as dist

EVERY_S, IN_A_ROW = 12.0, 3  # told within a minute
FACTOR = 2.0  # times the others' median
TURNS = 4  # of which the fastest counts: what else the host does for a moment is no fault


class RankSpeeds:
    """This rank's part. There are no collectives and no waits: the numbers lie in the ranks' store.

    device: that computes. trouble: called on rank 0 with what a person should know. store: of the ranks' process
    group; None: the default group's, or nothing is done. rank, ranks, measure, clock: for tests.
    """

    def __init__(
        self,
        device: torch.device,
        trouble: Callable[[str], None],
        store: dist.Store | None = None,
        rank: int = 0,
        ranks: int = 1,
        measure: Callable[[torch.device], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if store is None and dist.is_initialized():
            store, rank, ranks = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
        self._store = store if ranks > 1 else None
        self._device, self._trouble, self._rank, self._clock = device, trouble, rank, clock
        self._measure = measure or product_s
        self._keys = [f"geotrain.speed.{each}" for each in range(ranks)]
        self._due_s, self._turn = clock() + EVERY_S, 0
        self._slow, self._seen = Counter[int](), dict[int, int]()  # by rank: times in a row; the last turn compared

    def after_step(self) -> None:
        """Measure and compare, if it is time to."""
        if self._store is None or self._clock() < self._due_s:
            return
        self._due_s = self._clock() + EVERY_S
        self._turn += 1
        kind = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else self._device.type
        said = [kind, socket.gethostname(), self._measure(self._device), self._turn]
        self._store.set(self._keys[self._rank], json.dumps(said))
        if self._rank == 0:
            self._compare(self._store)

    def _compare(self, store: dist.Store) -> None:
        said = {i: json.loads(store.get(key)) for i, key in enumerate(self._keys) if store.check([key])}
        for rank, (kind, host, seconds, turn) in said.items():
            equals = [other[2] for i, other in said.items() if i != rank and other[0] == kind]
            if not equals or self._seen.get(rank) == turn:
                continue
            self._seen[rank] = turn
            usual = median(equals)
            self._slow[rank] = self._slow[rank] + 1 if seconds >= FACTOR * usual else 0
            if self._slow[rank] == IN_A_ROW:
                self._trouble(
                    f"rank {rank} on {host} computes at {usual / seconds:.0%} of its equals' speed, and all wait for "
                    f"it: a matrix product takes {1e3 * seconds:.3g} ms there, {1e3 * usual:.3g} ms elsewhere; look "
                    "at that device's clocks, temperature and errors (nvidia-smi -q), and at what else the host does"
                )


def product_s(device: torch.device) -> float:
    """Time a matrix product: the fastest of some turns, in seconds. The first one also waits for what the device has
    to do."""
    a = torch.ones(2048, 2048, dtype=torch.bfloat16, device=device) if device.type == "cuda" else torch.ones(256, 256)
    times = [time.perf_counter()]
    for _ in range(TURNS):
        torch.mm(a, a)[0, 0].item()
        times.append(time.perf_counter())
    return min(end - begin for begin, end in pairwise(times))
