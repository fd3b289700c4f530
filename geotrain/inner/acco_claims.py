"""Which replica computes which micro-batches of a step, where replicas take them as they get to them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist

from geotrain.inner import platform
from geotrain.inner.parallel import Mesh, group_like

_made = count()  # on every rank alike


class Claims:
    """A count in the worker's store for each part of a step; whoever raises it takes what it stood for."""

    def __init__(self, mesh: Mesh, timeout_s: float) -> None:
        """Makes process groups: every rank of the worker must call it."""
        self._mesh = mesh
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"claims-{next(_made)}", store)  # a later engine counts anew
        self._replica = group_like(mesh.model_group, "gloo", timedelta(seconds=timeout_s))
        self._computed: torch.cuda.Event | None = None

    def of_part(self, part: int, begin: int, end: int) -> Iterator[range]:
        """The micro-batches, of those from `begin` to `end`, that this replica takes: a few that are its own, so that
        every replica takes part; then others while there are any. The ranks of a replica must ask together.

        part: the part's number in the run, the same on all ranks. A pipeline takes as many at once as it has stages.
        """
        ranks = self._mesh.dp_size
        width = min(self._mesh.pp_size, (end - begin) // ranks)
        own = begin + self._mesh.dp_rank * width
        yield range(own, own + width)
        free = begin + ranks * width
        while free < end:
            self._pace()
            at = free + width * self._claim(part)
            if at >= end:
                break
            yield range(at, min(at + width, end))
        self._store.delete_key(str(part - 4))  # two steps ago: its commit has landed, so all are done with it

    def _claim(self, part: int) -> int:
        """How many claims of this part were made before."""
        number = torch.zeros((), dtype=torch.int64)
        leads = self._mesh.tp_rank == self._mesh.pp_rank == 0
        if leads:
            number.fill_(self._store.add(str(part), 1) - 1)
        if self._mesh.tp_size * self._mesh.pp_size > 1:
            dist.broadcast(number, group=self._replica, group_src=0)
        return int(number)

    def _pace(self) -> None:
        """On CUDA the host runs ahead of what is computed: by one claim only, or it took what others could begin."""
        if not platform.HAS_CUDA:
            return
        last, self._computed = self._computed, torch.cuda.Event()
        self._computed.record()
        if last is not None:
            last.synchronize()

    def close(self) -> None:
        dist.destroy_process_group(self._replica)
