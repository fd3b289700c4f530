"""How well a worker uses its accelerators: where its time goes, and its model FLOPs utilization (MFU).

MFU is the arithmetic that the model needs over what the worker's accelerators could do in the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from geotrain.config import Architecture, ClusterConfig, WorkerConfig
from geotrain.parameters.parameter_map import active_parameter_count


class PhaseTimer:
    """Measures where a loop's time goes: `lap(name)` adds all time since the last call to `name`.

    clock: gives seconds, as `time.perf_counter`; each call reads it once.
    """

    def __init__(self, clock: Callable[[], float], *names: str) -> None:
        self._clock, self._names = clock, names
        self.restart()

    def restart(self) -> None:
        self.seconds = dict.fromkeys(self._names, 0.0)
        self._last = self._clock()

    def lap(self, name: str) -> None:
        now = self._clock()
        self.seconds[name] += now - self._last
        self._last = now


class StepNumbers(Protocol):
    """The numbers of one optimizer step (`geotrain.inner.engine.engine.StepResult`). Reading them may wait for the
    step."""

    @property
    def loss(self) -> float: ...
    @property
    def lr(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...
    @property
    def tokens(self) -> int: ...


def job_metrics(
    steps: Sequence[StepNumbers], laps: PhaseTimer, seconds: float, peak_flops_per_token_s: float | None
) -> dict[str, float]:
    """Compute the numbers of `JobTrained` from a job's steps so far, which took `seconds`.

    peak_flops_per_token_s: the worker's peak FLOP/s over the FLOPs of one token, in tokens a second, for the MFU;
    None: not known.
    """
    tokens, spent = sum(step.tokens for step in steps), laps.seconds
    metrics = {
        "loss": sum(step.loss for step in steps) / len(steps),
        "lr": steps[-1].lr,
        "grad_norm": steps[-1].grad_norm,
        "tokens": float(tokens),
        "tokens_per_s": tokens / seconds,
        "steps": float(len(steps)),
        **{f"{name}_s": spent_s for name, spent_s in spent.items()},
    }
    if peak_flops_per_token_s and spent["compute"] > 0:
        metrics["mfu"] = tokens / spent["compute"] / peak_flops_per_token_s
    return metrics


def training_flops_per_token(architecture: Architecture, sequence_length: int) -> float:
    """The floating-point operations that training needs for a token, as PaLM counts them (arXiv 2204.02311, appendix
    B).

    That is 6·N + 6·layers·heads·(query_dim + value_dim)·sequence_length. N: the number of parameters; an input
    embedding that is not tied is left out, because it is looked up and not multiplied, and so are experts that a
    token is not sent to; the head counts once more for each layer that predicts further tokens. Recomputation does
    not count.
    """
    a = architecture
    looked_up = (int(not a.tied_embeddings) - a.predicting) * a.vocab_size * a.hidden_size
    attention = 6.0 * a.layers * a.heads * (a.query_dim + a.value_dim) * sequence_length
    return 6.0 * (active_parameter_count(a) - looked_up) + attention


def peak_flops(cluster: ClusterConfig, worker: WorkerConfig) -> float | None:
    """Peak speed of all accelerators of the worker together, in floating-point operations a second.

    None if the cluster file does not say what they are.
    """
    total = 0.0
    for host in worker.hosts:
        if host.device is None:
            return None
        total += host.slots * cluster.devices[host.device].tflops * 1e12
    return total
