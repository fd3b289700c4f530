"""Checks before anything is started that run and cluster fit together, data is there, and ports are free."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Collection
from itertools import combinations
from pathlib import Path

from geotrain.common.names import GLOBAL
from geotrain.common.ports import why_not_bound
from geotrain.config import (
    THIS_MACHINE,
    Address,
    ClusterConfig,
    ConfigError,
    LinkConfig,
    RunConfig,
    WorkerConfig,
    WorkerSetup,
    host_port,
)
from geotrain.data.dataset import open_dataset, read_manifest, training_digest
from geotrain.data.tokens import DataError
from geotrain.launch.launchers.base import regions_of
from geotrain.launch.launchers.registry import launcher_of

PORTS = range(15_000, 32_000)  # below those that Linux gives to outgoing connections, from 32768 on


def check_together(run: RunConfig, cluster: ClusterConfig) -> dict[str, int]:
    """Check that the cluster can run the run; returns each worker's data-parallel size, by its name.

    Raises ConfigError, UnsupportedModelError.
    """
    if run.model.weights is not None:
        raise ConfigError(
            "model.weights: a loop of your own trains this model: `geotrain serve` starts its servers, not a launch "
            "(docs/own_loop.md)"
        )
    used = {host.region for _, worker in cluster.workers for host in worker.hosts}
    idle = [region.name for region in cluster.regions if not region.workers and region.name not in used]
    if idle:
        raise ConfigError(
            f"cluster {cluster.name!r}: no workers in {', '.join(idle)}; `geotrain plan` makes them of its hosts"
        )
    sizes = {worker.name: check_worker(run, worker) for _, worker in cluster.workers}
    batch, samples, at = run.samples_per_step, run.data.train_samples, run.batches.first_sample
    ramp = f", from data.rampup_batch_size = {list(run.batches.ramp)} on" if run.batches.ramp else ""
    if samples != (whole := at(run.inner_steps)):
        raise ConfigError(
            f"data.train_samples = {samples} is not a multiple of deepspeed.train_batch_size = {batch}{ramp}; "
            f"use {whole or at(1)}"
        )
    round_steps = len(sizes) * run.outer.local_steps
    if run.outer.rule.synchronous and run.inner_steps % round_steps:
        raise ConfigError(
            f"data.train_samples = {samples} is no whole number of rounds: with outer.rule 'sync' a round is "
            f"{len(sizes)} workers × outer.local_steps {run.outer.local_steps} × batch {batch} = "
            f"{round_steps * batch} samples{ramp}; use {at(max(1, run.inner_steps // round_steps) * round_steps)}"
        )
    for what, (site, address) in server_addresses(cluster, [GLOBAL, *(r.name for r in cluster.serving)]).items():
        ssh = address.host if address.host in cluster.sites[site].far_hosts else cluster.sites[site].ssh
        if ssh and (address.port == 0 or address.host in THIS_MACHINE):
            raise ConfigError(
                f"{what} runs on {ssh}, by ssh: its address {address} must be one that the others reach, with a "
                "fixed port; set host and port"
            )
        if ssh and cluster.emulate_links:
            raise ConfigError(f"emulate_links = true is for runs on one machine, but {what} has `ssh` set")
    if cluster.emulate_links:
        for region in cluster.regions:
            link_to_global(cluster, region.name)
        links_between(cluster)
    return sizes


def server_addresses(cluster: ClusterConfig, sites: Collection[str]) -> dict[str, tuple[str, Address]]:
    """List the servers of these sites, and their shards: what it is → its site, its address."""
    found = {f"the server of {site!r}": (site, cluster.sites[site].server) for site in sites}
    for site in sites:
        found |= {f"shard {i} of {site!r}": (site, shard) for i, shard in enumerate(cluster.sites[site].shards)}
    return found


def check_worker(run: RunConfig, worker: WorkerConfig) -> int:
    """Check one worker's launcher, parallel layout and DeepSpeed block; returns its data-parallel size.

    Raises ConfigError, whose message names the worker.
    """
    from geotrain.parallelism import checks
    from geotrain.parallelism.acco_forms import check_acco
    from geotrain.parallelism.transformer_engine import check_transformer_engine

    launcher_of(worker)
    setup = WorkerSetup.of(run, worker)
    block = setup.deepspeed
    if block["train_batch_size"] != run.samples_per_step:
        raise ConfigError(
            f"worker {worker.name!r}: deepspeed.train_batch_size = {block['train_batch_size']} differs from the "
            f"run's {run.samples_per_step}; every worker's step is the same number of samples: change "
            "train_micro_batch_size_per_gpu or gradient_accumulation_steps instead"
        )
    try:
        dp = checks.check_layout(run.architecture, setup.parallel, worker.ranks, block, run.data.sequence_length)
        for batch in run.batches.sizes:
            if batch % (one := block["train_micro_batch_size_per_gpu"] * dp):
                raise ConfigError(
                    f"data.rampup_batch_size: a batch of {batch} samples is no multiple of "
                    f"train_micro_batch_size_per_gpu × data-parallel size {dp} = {one}; change start or increment"
                )
            if run.acco is not None:
                check_acco(run.acco, run.architecture, setup.parallel, block, batch // one)
        checks.check_state_device(run.outer.state_device, block)
        checks.check_deterministic(setup.precision, run.acco)
        tokens = run.data.sequence_length * int(block["train_micro_batch_size_per_gpu"])
        bf16 = checks.trains_in_bf16(block)
        check_transformer_engine(run, run.architecture, setup.parallel, setup.precision, bf16, tokens)
        return dp
    except ConfigError as error:
        raise ConfigError(f"worker {worker.name!r}: {error}") from None


def check_data(run: RunConfig) -> None:
    """Check that the data is on this machine, is whole, is the run's and fits the model. Raises DataError."""
    for prefix in run.data.prefixes:
        check_split(run, prefix)
    check_digest(run)
    check_tokenizer(run)


def check_digest(run: RunConfig) -> None:
    """Check that the data's sha256 is the run's. Raises DataError."""
    found = training_digest(run.data)
    if run.data.sha256 is not None and run.data.sha256 != found:
        raise DataError(
            f"{', '.join(each.prefix for each in run.data.train)}: is other data than data.sha256 = "
            f"{run.data.sha256!r} asks for: its digest is {found!r} (where the run file "
            "states none, the first launch has noted that of its data)"
        )


def with_data_digest(run: RunConfig, before: RunConfig | None = None) -> RunConfig:
    """Fill in `data.sha256`, so that whoever has other data is refused: the run's own, that of an earlier launch of
    the run (`before`), or that of the data on this machine. Leaves the run unchanged where none is known."""
    known = run.data.sha256 or (before.data.sha256 if before else None)
    if known is None:
        with contextlib.suppress(DataError, OSError):  # the launcher's machine need not have the data
            known = training_digest(run.data)
    return run.model_copy(update={"data": run.data.model_copy(update={"sha256": known})})


def check_split(run: RunConfig, prefix: str) -> None:
    """Check that one .bin/.idx pair is whole and fits the model. Raises DataError."""
    open_dataset(prefix, run.architecture.vocab_size)


def check_tokenizer(run: RunConfig) -> None:
    """Check that all data were prepared with one tokenizer, which is the one that exports copy, and whose ids the
    model has. Raises DataError."""
    known: dict[str, str | None] = {}
    for prefix in run.data.prefixes:
        with contextlib.suppress(DataError):  # what is wrong with data is reported by `check_split`
            known[prefix] = read_manifest(prefix).tokenizer_sha256
    if run.data.tokenizer:
        place = f"data.tokenizer = {run.data.tokenizer!r}"
        if not Path(run.data.tokenizer).is_dir():
            raise DataError(f"{place}: no such folder")
        from geotrain.data.tokenizer import describe  # slow to import

        ids, known[place] = describe(Path(run.data.tokenizer))
        if ids > (rows := run.architecture.vocab_size):
            raise DataError(f"{place}: has {ids} ids, but the model's vocab_size is {rows}; raise it")
    made = {place: digest for place, digest in known.items() if digest}
    for place, digest in made.items():
        if digest != (first := next(iter(made.values()))):
            raise DataError(
                f"{place}: is of another tokenizer (sha256 {digest[:16]}…) than {next(iter(made))} ({first[:16]}…); "
                "data and exports must have one: the folder `tokenizer` beside prepared data holds theirs"
            )


def link_to_global(cluster: ClusterConfig, region: str) -> LinkConfig:
    """Find the link between a region and the global server. Raises ConfigError if the cluster file has none."""
    for link in cluster.links:
        if set(link.regions) == {region, "global"}:
            return link
    raise ConfigError(
        f"emulate_links = true: `links` has no link between {region!r} and 'global'; add one, with gbps and rtt_ms"
    )


def links_between(cluster: ClusterConfig) -> list[LinkConfig]:
    """Find all links between two regions. Raises ConfigError if a worker spans regions whose link is not
    described."""
    found = [link for link in cluster.links if "global" not in link.regions and len(set(link.regions)) == 2]
    for home, worker in cluster.workers:
        for pair in combinations(dict.fromkeys((home, *regions_of(home, worker))), 2):
            if not any(set(link.regions) == set(pair) for link in found):
                raise ConfigError(
                    f"emulate_links = true: worker {worker.name!r} spans {pair[0]!r} and {pair[1]!r}, but "
                    "`links` has no link between them; add one, with gbps and rtt_ms"
                )
    return found


def open_links(cluster: ClusterConfig) -> list[str]:
    """Warn of each worker that spans regions: what its ranks send each other crosses the link unprotected."""
    return [
        f"worker {worker.name!r} spans {' and '.join(spanned)}: torch.distributed between its ranks is neither "
        "encrypted nor authenticated, and unpickles what it receives, so whoever reaches these ports can run code "
        "there; put the link into a tunnel (WireGuard, IPsec) and let a firewall refuse all else"
        for home, worker in cluster.workers
        if len(spanned := regions_of(home, worker)) > 1
    ]


def check_port_is_free(address: Address, what: str = "") -> None:
    """Raise ConfigError if a port on this machine is taken. what: begins the message."""
    if why := why_not_bound(*address.listening):
        raise ConfigError(f"{what}cannot listen on {host_port(*address.listening)}: {why}")


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Choose different ports that are free now, at random.

    They lie below those that the system gives to outgoing connections, so that none of these takes one before a
    server listens there seconds later. Raises ConfigError.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            found.append(port)
        if len(found) == count:
            return found
    raise ConfigError(f"{host}: no {count} ports between {PORTS[0]} and {PORTS[-1]} are free; stop what uses them")
