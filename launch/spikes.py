"""Asks for a run to be taken back where its loss spikes (`outer.rollbacks_per_hour`), and has it stopped for that."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from geotrain.common.names import GLOBAL
from geotrain.config import ClusterConfig, RunConfig
from geotrain.launch.branches import REQUEST, rollbacks
from geotrain.launch.terminal import addresses
from geotrain.net.transport import rpc
from geotrain.net.transport.certs import OPERATOR, trust_between
from geotrain.net.transport.operator_client import command
from geotrain.outer.messages import Refused

HOUR_S, STEER_S = 3600.0, 10.0


class SpikeWatch:
    """Looks at what the global server says. whole: this launcher has all sites, and so can launch them again. tell:
    called with what a person should know."""

    def __init__(
        self, run: RunConfig, cluster: ClusterConfig, folder: Path, whole: bool, tell: Callable[[str], object]
    ) -> None:
        self._run, self._cluster, self._folder, self._whole, self._tell = run, cluster, folder, whole, tell
        self._seen: Mapping[str, Any] | None = None  # the last spike for which something was done

    def look(self, top: Mapping[str, Any]) -> None:
        """Take the global server's status, as often as there is one."""
        if top.get("phase") not in ("running", "paused"):
            return
        if self._whole and (self._folder / REQUEST).exists():
            self._steer("stop")
            return
        spike = top.get("loss_spike")
        if spike is None or not self._run.outer.rollbacks_per_hour or spike == self._seen:
            return
        from geotrain.launch.rollback import request  # which imports torch

        of = f"loss {spike['loss']:.4f}, where {spike['usual']:.4f} was usual"
        try:
            number = self._older(spike["tokens"])
            request(self._folder, number)
        except (LookupError, OSError) as why:
            if not self._steer("pause"):  # tried again
                return
            self._tell(f"{of}: the run is paused, not taken back: {why}; then `geotrain resume` or `geotrain stop`")
        else:
            self._tell(f"{of}: the run goes back to snapshot {number}, without the data since")
        self._seen = spike

    def _older(self, tokens: int) -> int:
        """Choose the newest snapshot with fewer tokens. Raises LookupError, which says why not, StoreError."""
        from geotrain.launch.rollback import snapshots_of

        most = self._run.outer.rollbacks_per_hour
        if self._run.outer.rule.synchronous:
            raise LookupError("rule 'sync' cannot skip data, as its rounds are laid out")
        if not self._whole or self._cluster.global_ssh:
            raise LookupError("not all sites, with the global server's snapshots, are launched from here")
        if sum(at_s > time.time() - HOUR_S for at_s in rollbacks(self._folder)) >= most:
            raise LookupError(f"it was {most} times within an hour (outer.rollbacks_per_hour)")
        found = snapshots_of(self._folder)
        older = [s["snapshot"] for s in found if s["committed_samples"] * self._run.data.sequence_length < tokens]
        if not older:
            raise LookupError("no snapshot is older; have more kept (checkpoint.keep), or taken more often")
        return int(older[-1])

    def _steer(self, what: str) -> bool:
        """Send the global server a command of the operator's; returns whether it was taken."""
        trust = trust_between(self._cluster, "operator", OPERATOR, "global", GLOBAL)
        with suppress(OSError, Refused):  # tried again at the next look
            command(addresses(self._run, self._cluster)[GLOBAL], rpc.Control(what), STEER_S, trust)
            return True
        return False
