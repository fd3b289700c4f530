"""Model FLOPs utilization (MFU): the arithmetic that the model needs over what its accelerators could do."""

from __future__ import annotations

from geotrain.canonical import Architecture
from geotrain.config import ClusterConfig, WorkerConfig


def training_flops_per_token(architecture: Architecture, sequence_length: int) -> float:
    """6·N + 12·layers·heads·head_dim·sequence_length, as PaLM counts it (arXiv 2204.02311, appendix B).

    N: parameters but for an input embedding of its own, which is looked up and not multiplied. Recomputation does
    not count.
    """
    a = architecture
    looked_up = 0 if a.tied_embeddings else a.vocab_size * a.hidden_size
    return 6.0 * (a.parameter_count - looked_up) + 12.0 * a.layers * a.heads * a.head_dim * sequence_length


def peak_flops(cluster: ClusterConfig, worker: WorkerConfig) -> float | None:
    """Of all the worker's accelerators together, a second; None when the cluster file does not say their kind."""
    total = 0.0
    for host in worker.hosts:
        if host.device is None:
            return None
        total += host.slots * cluster.devices[host.device].tflops * 1e12
    return total
