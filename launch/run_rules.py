"""Decides from run and cluster file alone what a run cannot begin with, and what is seldom meant: `geotrain launch`
and `dry-run` both ask here."""

from __future__ import annotations

from collections.abc import Iterator

from geotrain.common.names import GLOBAL
from geotrain.config import (
    SHORT_RUN,
    ClusterConfig,
    ConfigError,
    ParallelConfig,
    RegionMomentumConfig,
    RunConfig,
    WorkerConfig,
)
from geotrain.launch.launchers.registry import launcher_of
from geotrain.launch.terminal import size

FEW = 10  # exchanges of a region: momentum and merging then do next to nothing


def misfits(run: RunConfig, cluster: ClusterConfig) -> Iterator[ConfigError]:
    """Find what keeps this cluster from training this run. The files must go together (`check_together`)."""
    from geotrain.net.server.server_process import part_of
    from geotrain.plan.model.memory import tightest_rank
    from geotrain.plan.model.server_hosts import too_small_hosts

    for region, worker in cluster.workers:
        yield from _mixed_sites(worker, region, worker.parallel or run.parallel)
        parts, room, kind = tightest_rank(run, cluster, worker)
        if kind is not None and (needed := sum(parts.values())) > room:
            most = max(parts, key=lambda part: parts[part])
            yield ConfigError(
                f"worker {worker.name!r}: its tightest rank needs {size(needed)} ({most} {size(parts[most])}), "
                f"devices.{kind}.memory_gb = {room / 1e9:g}; take more ranks, more of `parallel`, "
                "model.recompute 'full' or a smaller train_micro_batch_size_per_gpu (`geotrain plan` finds a "
                "parallel layout that fits)"
            )
    if cluster.global_shards:
        try:
            part_of(run, cluster, GLOBAL, None)
        except ConfigError as error:
            yield error
    yield from too_small_hosts(run, cluster)
    yield from _shared_devices(cluster)
    steps, local_steps, count = run.inner_steps, run.outer.local_steps, len(cluster.workers)
    first = local_steps + count - 1 if run.outer.scale_local_steps else local_steps * count
    if first > steps:
        yield ConfigError(
            f"outer.local_steps = {local_steps}: the first jobs of {count} workers take {first} inner steps, the run "
            f"has {steps} (data.train_samples / train_batch_size); use at most {max(1, steps // count)}, or more "
            "samples"
        )


def _mixed_sites(worker: WorkerConfig, region: str, parallel: ParallelConfig) -> Iterator[ConfigError]:
    homes = [host.region or region for host in worker.hosts for _ in range(host.slots)]
    width = len(homes) // (parallel.pipeline * parallel.sites)  # ranks of a stage in a site
    mixed = [run for i in range(0, len(homes), width) if len(set(run := homes[i : i + width])) > 1]
    if parallel.sites > 1 and mixed:
        yield ConfigError(
            f"worker {worker.name!r}: parallel.sites = {parallel.sites}, but a site's ranks lie in "
            f"{' and '.join(sorted(set(mixed[0])))}; list the hosts of each pipeline stage region by region"
        )


def _shared_devices(cluster: ClusterConfig) -> Iterator[ConfigError]:
    """Find hosts on which two launcher commands would take the same devices: each numbers them from 0."""
    users: dict[str, list[str]] = {}  # machine → who takes its devices
    for region, worker in cluster.workers:
        launcher = launcher_of(worker)
        if worker.env.get("DS_ACCELERATOR") == "cpu" or launcher.queue_s:  # a queue hands out devices itself
            continue
        for host in worker.hosts:
            machine, user = host.host, f"worker {worker.name!r}"
            if launcher.on_this_machine:  # a site deals its machine's devices out to all its workers
                site = host.region or region
                machine, user = (cluster.sites[site].ssh or "").rpartition("@")[2], f"region {site!r}"
                if not machine or user in users.get(machine, ()):
                    continue
            users.setdefault(machine, []).append(user)
    for machine, names in users.items():
        if len(names) > 1:
            yield ConfigError(
                f"host {machine!r} is given to {' and '.join(names)}: both would take its accelerators from number 0 "
                "on; make them one worker, or name another host (DS_ACCELERATOR=cpu in a worker's env: it takes none)"
            )


def doubts(run: RunConfig, cluster: ClusterConfig) -> Iterator[str]:
    """Find what does not keep a run from starting: rehearsals are short on purpose."""
    from geotrain.parameters.hf_checkpoint import PREDICTING

    outer, regions, count = run.outer, len(cluster.serving), len(cluster.workers)
    merged = outer.answers(run.inner_steps / outer.local_steps / count) != "at_once"
    updates = 1 if outer.flat or merged else outer.rule.updates_per_send or 1
    members = count if outer.flat or outer.rule.synchronous else regions
    period = outer.local_steps * updates * members
    if (exchanges := run.inner_steps / period) < FEW:
        yield (
            f"a region exchanges about {exchanges:.2g} times with the global server in the whole run "
            f"({run.inner_steps} inner steps, {period} between two exchanges of all): regions train almost by "
            "themselves; lower outer.local_steps or outer.rule.updates_per_send, or train more samples"
        )
    key = next((key for key in PREDICTING if run.model.config.get(key)), None)
    if key is not None and not run.architecture.predicting:
        yield (
            f"model.config: {key} = {run.model.config[key]!r}: the layers that predict tokens beyond the next are "
            "left out, of training and of exports, as transformers leaves them out of what it loads"
        )
    yield from answers(run, cluster)


def answers(run: RunConfig, cluster: ClusterConfig) -> Iterator[str]:
    """Say, where workers have few jobs in the run, what regions answer them with, and what would end lower."""
    outer = run.outer
    jobs = run.inner_steps / outer.local_steps / len(cluster.workers)
    alone = outer.flat or len(cluster.serving) < 2  # then there are no news of other regions
    if alone or not isinstance(outer.rule, RegionMomentumConfig) or jobs >= SHORT_RUN:
        return
    few = f"each worker has about {jobs:.2g} jobs in the run: regions answer"
    if (answers := outer.answers(jobs)) != "at_once":
        how = "each delta is sent up at once" if answers == "merged" else "which wait for the deltas of all at work"
        yield f"{few} with the merged global weights, {how} (outer.rule.answers)"
    else:
        yield (
            f"{few} before they know of the others, whose news come a job later: of five jobs of 32 steps 1 % of the "
            "loss with AdamW, 4 % with Muon; rule 'sync' ends lower, and so does outer.overlap = {steps, late "
            "'continue', adopt 'rebase'} without rule.answers, merge_alpha and updates_per_send"
        )
