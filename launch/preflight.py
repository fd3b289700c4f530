"""Finds what a launch would stumble over before a process is started: `geotrain launch` refuses it, and
`geotrain dry-run` reports all of it at once. `geotrain.launch.host_check` looks at hosts; what only the processes
themselves can find is not here."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from geotrain.common.names import GLOBAL
from geotrain.common.ports import why_not_bound
from geotrain.config import (
    THIS_MACHINE,
    Address,
    ClusterConfig,
    ConfigError,
    RunConfig,
    Topology,
    UnsupportedModelError,
    host_port,
    is_loopback,
)
from geotrain.config.deepspeed import COS_MIN_RATIO, DEEPSPEED_WARMUP_MAX_LR, WSD, completed
from geotrain.data.dataset import end_of_document, read_manifest
from geotrain.data.tokens import DataError
from geotrain.emulate import wan
from geotrain.launch.check import (
    check_digest,
    check_port_is_free,
    check_split,
    check_tokenizer,
    open_links,
    server_addresses,
)
from geotrain.launch.launchers.registry import launcher_of
from geotrain.launch.machine import this_machine
from geotrain.launch.run_rules import doubts
from geotrain.launch.site_processes import LaunchRequest, local_processes
from geotrain.monitor.http import read_token
from geotrain.monitor.monitor import LAUNCHER, metrics_port
from geotrain.net.transport.authority import ending_soon
from geotrain.net.transport.certs import OPERATOR, RENEW, CertificateError, Role, load_credentials
from geotrain.parallelism.optimizer_settings import uses_muon

_DEEPSPEED_WARMUP_STEPS = 1000  # DeepSpeed's default of warmup_num_steps
_DEEPSPEED_COS_MIN_RATIO = 1e-4  # DeepSpeed's default of cos_min_ratio
Obstacle = ConfigError | DataError | CertificateError | UnsupportedModelError


def sites_here(cluster: ClusterConfig) -> tuple[str, ...]:
    """The sites that a launch of the whole cluster starts on this machine."""
    return tuple(name for name, site in cluster.sites.items() if site.ssh is None)


def obstacles(
    run: RunConfig,
    cluster: ClusterConfig,
    here: tuple[str, ...],
    begins: bool = True,
    shows: bool = True,
    without_checkpoints: bool = False,
) -> list[Obstacle]:
    """List what keeps these sites from being started on this machine; empty: nothing that can be known yet. The files
    must go together (`check_together`).

    begins: the run has no state yet. shows: the launcher asks the servers how the run goes. without_checkpoints: a
    worker may go on whose own state is lost. Ports are another matter (`port_obstacles`): a run that is on has them.
    """
    topology = Topology(run, cluster)
    checks: list[Callable[[], object]] = [partial(_check_fragments, run)]
    if not cluster.emulate_links:  # whose hosts are this machine, and servers have addresses of their own
        checks.append(partial(_check_reached, topology))
    if set(here) - {GLOBAL}:  # other machines check their copies themselves
        checks += [partial(check_split, run, prefix) for prefix in run.data.prefixes]
        checks += [partial(check_digest, run), partial(_check_validation, run, topology)]
        checks += [partial(end_of_document, run.data), partial(check_tokenizer, run)]
    if GLOBAL in here:
        checks += [partial(_check_boards, run)]
        if begins:
            checks.append(partial(_check_initial_weights, run))
    if not (begins or without_checkpoints):
        checks.append(partial(check_states, run, cluster, here))
    if run.monitor.enabled and here:
        checks.append(partial(read_token, run.monitor.token_file))
    if cluster.security is not None:
        wanted: list[tuple[Role, str]] = [("operator", OPERATOR)] if shows else []
        wanted += [("global" if s == GLOBAL else "region", s) for s in topology.servers if s in here]
        wanted += [("shard", s) for s in topology.servers if s in here and cluster.sites[s].shards]
        wanted += [("worker", name) for name, region in topology.home.items() if region in here]
        checks += [partial(load_credentials, Path(cluster.security.folder), *pair) for pair in wanted]
    checks.append(partial(_check_processes, run, cluster, here))
    return list(_failing(checks))


def port_obstacles(run: RunConfig, cluster: ClusterConfig, here: tuple[str, ...]) -> list[Obstacle]:
    """List the fixed ports on this machine, of servers, page and metrics, that are taken or given twice."""
    # Emulated regions have addresses of their own, in namespaces, where every port is free.
    apart = set(here) - {GLOBAL} if cluster.emulate_links else set()
    monitor, topology = run.monitor, Topology(run, cluster)
    wanted = [
        (what, address)
        for what, (site, address) in server_addresses(cluster, topology.servers).items()
        if site in here and not cluster.emulate_links and address.host not in cluster.sites[site].far_hosts
    ]
    if monitor.enabled and monitor.page_port and GLOBAL in here:
        wanted.append(("monitor.page_port", Address(bind=monitor.host, port=monitor.page_port)))
    if monitor.enabled and monitor.metrics_port:
        sites = [site for site in topology.servers if site in here and site not in apart]
        sites += [LAUNCHER] if GLOBAL in here else []
        for port, site in sorted((metrics_port(run, cluster, site) or 0, site) for site in sites):
            what = f"metrics of {site!r} (monitor.metrics_port + {port - monitor.metrics_port})"
            if port > 65535:
                return [ConfigError(f"{what}: there is no port {port}; choose a lower metrics_port")]
            wanted.append((what, Address(bind=monitor.host, port=port)))
    fixed = [(what, address) for what, address in wanted if address.port]
    found: list[Obstacle] = []
    for number, (what, address) in enumerate(fixed):
        if twice := [other for other, same in fixed[:number] if same.listening == address.listening]:
            found.append(
                ConfigError(
                    f"{what} and {twice[0]} both want {host_port(*address.listening)}; give one of them another port"
                )
            )
    # Of a host that this machine is not, the first address stands for all.
    firsts = {address.listening[0]: what for what, address in reversed(fixed)}
    wrong = {what for host, what in firsts.items() if why_not_bound(host, 0)}
    fixed = [(what, address) for what, address in fixed if what in wrong or firsts[address.listening[0]] not in wrong]
    return [*found, *_failing(partial(check_port_is_free, address, f"{what}: ") for what, address in fixed)]


def cautions(run: RunConfig, cluster: ClusterConfig) -> list[str]:
    """List what does not keep a run from starting, but is seldom meant."""
    notes: list[str] = []
    for worker in Topology(run, cluster).workers.values():
        notes += schedule_cautions({**run.deepspeed, **worker.config.deepspeed}, run.total_steps)
    if run.data.rampup_batch_size is not None:
        notes.append(
            f"data.rampup_batch_size: the run has {run.inner_steps} inner steps, the times foretold are those of its "
            f"{run.total_steps} whole batches; the learning rate goes by samples, in whole batches"
        )
    if run.acco is not None and not uses_muon(run.deepspeed):
        notes.append(
            f"acco.form = {run.acco.form!r} without the optimizer Muon: AdamW loses by gradients that are late, and "
            "`exact` sends twice as much; ZeRO-1 with deepspeed.zero_optimization.gradient_bits = 8 and weight_bits "
            "= 4 loses next to nothing, and is faster than `exact` over every link"
        )
    servers = Topology(run, cluster).servers
    far = [f"{site!r} at {address}" for site, address in servers.items() if not is_loopback(address.listening[0])]
    if far and cluster.security is None:
        notes.append(
            f"without `security` in the cluster file, links are plaintext, and everyone who reaches {', '.join(far)} "
            "can take part; `geotrain certs` makes certificates"
        )
    ending = ending_soon(Path(cluster.security.folder)) if cluster.security else {}
    if ending:
        notes.append(
            f"{', '.join(ending)}: end on {min(ending.values()):%Y-%m-%d} or soon after, and then no process "
            f"connects any more; {RENEW}"
        )
    ssh = next((site.ssh for site in cluster.sites.values() if site.ssh), None)
    near = [f"{site!r} at {address}" for site, address in servers.items() if address.host in THIS_MACHINE]
    if ssh and near:
        notes.append(
            f"{ssh} reaches the server of {near[0]} through a tunnel only; give the `host` by which others reach it "
            "and, if it listens on another address, `bind`"
        )
    tokenizer, family = run.data.tokenizer, run.model.config.get("model_type")
    if family == "qwen2" and tokenizer and _cuts_otherwise(tokenizer):
        notes.append(
            f"data.tokenizer = {tokenizer!r}: beside a qwen2 model, transformers' AutoTokenizer cuts text as Qwen's "
            "own, whatever tokenizer.json says, so an export reads text otherwise than it was trained on; make "
            "the model a llama or qwen3, or take a tokenizer of Qwen's"
        )
    if cluster.emulate_links and (reason := wan.cannot_emulate()):
        notes.append(
            f"LINKS ARE NOT EMULATED: {reason}. All regions use the plain loopback interface, as fast as it is: "
            "`links` in the cluster file has no effect"
            if run.outer.flat
            else f"links are shaped by a proxy in front of the global server: {reason}. Links between two regions "
            "are as fast as the loopback interface, and no link can be disturbed"
        )
    return list(dict.fromkeys([*notes, *open_links(cluster), *doubts(run, cluster)]))


def _check_reached(topology: Topology) -> None:
    """Raise ConfigError where a worker has several hosts, and its server an address that only one of them reaches."""
    for name, worker in topology.workers.items():
        site, hosts = topology.server_of(name), sorted({host.host for host in worker.config.hosts})
        if (address := topology.servers[site]).host in THIS_MACHINE and hosts[1:]:
            raise ConfigError(
                f"the server of {site!r} is at {address}, where hosts of worker {name!r} ({', '.join(hosts[:3])}) "
                "find only themselves: set its `host` to the name by which they reach it, and its `port`"
            )


def _cuts_otherwise(tokenizer: str) -> bool:
    """Whether it normalizes and cuts in another way than Qwen2's, by the kinds of steps alone."""
    try:
        read = json.loads((Path(tokenizer) / "tokenizer.json").read_text())
        kinds = [(read[step] or {}).get("type") for step in ("normalizer", "pre_tokenizer")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # what cannot be read is reported elsewhere
    return kinds != ["NFC", "Sequence"]


def schedule_cautions(block: dict[str, Any], total_steps: int) -> list[str]:
    """List what in a `deepspeed` block's schedule is allowed, but seldom meant. total_steps: inner steps of the
    run."""
    stated: dict[str, Any] = block.get("scheduler", {}).get("params", {})
    kind, params = block.get("scheduler", {}).get("type"), completed(block, total_steps).get("scheduler", {})
    params = params.get("params", {})
    where, notes = "deepspeed.scheduler.params", list[str]()
    total = params.get("total_num_steps")
    if total is not None and total != total_steps:
        then = "the rest trains at the lowest rate" if total < total_steps else "the rate never comes down to its end"
        notes.append(
            f"{where}.total_num_steps = {total}, but the run has {total_steps} steps (data.train_samples / "
            f'train_batch_size): {then}; write "auto" to let it follow'
        )
    if kind == "WarmupCosineLR" and "cos_min_ratio" not in stated:
        notes.append(
            f"{where}.cos_min_ratio is not stated: by DeepSpeed's default the rate falls to "
            f'{_DEEPSPEED_COS_MIN_RATIO:g} of itself, almost nothing; state it, or write "auto" for {COS_MIN_RATIO:g}'
        )
    warmup = params.get("warmup_num_steps", _DEEPSPEED_WARMUP_STEPS)
    follows = params.get("warmup_num_steps") != stated.get("warmup_num_steps") or not str(kind).startswith("Warmup")
    if not follows and warmup >= total_steps:
        whose = "" if "warmup_num_steps" in params else " (DeepSpeed's default)"
        notes.append(
            f"{where}.warmup_num_steps = {warmup}{whose}, but the run has {total_steps} steps: the rate is never "
            'reached; state fewer, or write "auto"'
        )
    if kind == WSD and warmup + params["decay_num_steps"] > total:
        notes.append(
            f"{where}: {warmup} steps of warm-up and {params['decay_num_steps']} of decay are more than the "
            f"schedule's {total}: the rate is never constant; state fewer"
        )
    rate = block.get("optimizer", {}).get("params", {}).get("lr")
    if kind in ("WarmupLR", "WarmupDecayLR") and "warmup_max_lr" not in stated and rate != DEEPSPEED_WARMUP_MAX_LR:
        notes.append(
            f"{where}.warmup_max_lr is not stated: DeepSpeed's default {DEEPSPEED_WARMUP_MAX_LR:g} replaces "
            f'deepspeed.optimizer.params.lr = {rate}; state it, or write "auto" for that rate'
        )
    return notes


# ------------------------------------------------------------------------------------------------- single checks


def _failing(checks: Iterable[Callable[[], object]]) -> Iterator[Obstacle]:
    for check in checks:
        try:
            check()
        except (ConfigError, DataError, CertificateError, UnsupportedModelError) as error:
            yield error


def _check_fragments(run: RunConfig) -> None:
    layers, stated = run.architecture.layers, run.outer.fragments.layers_per_fragment
    if stated is not None and stated > layers:
        raise ConfigError(
            f"outer.fragments.layers_per_fragment = {stated}, but the model has {layers} layers; use {layers} for "
            "one fragment of all layers, or null for one of the whole model"
        )


def _check_validation(run: RunConfig, topology: Topology) -> None:
    """Check validation data as workers will read it: whole samples, dealt out evenly to a worker's replicas."""
    if run.monitor.validate_every_samples is None or run.data.validation is None:
        return
    wanted = run.data.validation_samples
    for name, setup in topology.workers.items():
        dp = setup.config.ranks // setup.parallel.replica_ranks
        share = int(setup.deepspeed["train_micro_batch_size_per_gpu"]) * dp
        if wanted % share:
            raise ConfigError(
                f"data.validation_samples = {wanted} is not a multiple of {share}, which worker {name!r} takes at a "
                f"time (train_micro_batch_size_per_gpu × {dp} replicas); use {(wanted + share - 1) // share * share}"
            )
    samples = (read_manifest(run.data.validation).tokens - 1) // run.data.sequence_length
    if samples < wanted:
        raise DataError(
            f"{run.data.validation}: {wanted} validation samples are wanted, but there are {samples} of "
            f"{run.data.sequence_length} tokens; lower data.validation_samples or prepare more validation text"
        )


def _check_initial_weights(run: RunConfig) -> None:
    """Read them all: a weight that is not finite would else be noticed by the first step's loss."""
    if run.model.init_from is None:
        return
    from geotrain.net.server.first_weights import given_weights  # imports torch

    deque(given_weights(run), maxlen=0)


def check_states(run: RunConfig, cluster: ClusterConfig, here: tuple[str, ...]) -> None:
    """Check that each worker on this machine that has saved its state still has it, as far as its server's snapshots
    here show. Raises ConfigError."""
    from geotrain.net.storage.snapshots import SNAPSHOTS, SnapshotStore

    topology = Topology(run, cluster)
    for name, worker in topology.workers.items():
        if topology.home[name] not in here or not launcher_of(worker.config).on_this_machine:
            continue
        server, meta = run.run_folder / "servers" / topology.server_of(name), dict[str, Any]()
        with suppress(OSError):  # which the server will report
            meta = SnapshotStore(server / SNAPSHOTS).newest_meta()
        member = meta["state"]["members"].get(name, {}) if meta else {}
        # A save is whole before the next begins, and before the worker leaves.
        saved = member.get("job", 0) > (0 if meta and meta["ended"] else 2 * run.checkpoint.every_jobs)
        if saved and not (_holds_state(folder := run.checkpoint_folder / name) or _has_copy(run, name)):
            raise ConfigError(
                f"worker {name!r} has trained {member['job']} jobs, and no whole checkpoint of it is in {folder}: "
                "bring that back; or go on with --without-checkpoints, its optimizer anew at the run's weights"
            )


def _holds_state(folder: Path) -> bool:
    """Whether any checkpoint there is whole, by the lengths of all its files."""
    from geotrain.checkpoint.folders import manifests  # imports torch

    return any(
        all(size == (path / name).stat().st_size for name, (size, _) in manifest["files"].items())
        for manifest, path in manifests(folder)
        if all((path / name).exists() for name in manifest["files"])
    )


def _has_copy(run: RunConfig, worker: str) -> bool:
    from geotrain.checkpoint.copies import stored  # imports torch

    with suppress(OSError):
        return run.checkpoint.snapshots is not None and bool(stored(run, worker).whole())
    return False


def _check_boards(run: RunConfig) -> None:
    if not run.monitor.enabled:
        return
    for key, package in (("wandb", "wandb"), ("tensorboard", "tensorboard")):
        if getattr(run.monitor, key) is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(f"monitor.{key}: the package is not installed here: pip install {package}")


def _check_processes(run: RunConfig, cluster: ClusterConfig, here: tuple[str, ...]) -> None:
    """Check that the start commands of these sites can be built: launchers, devices, hosts."""
    with tempfile.TemporaryDirectory() as scratch:
        local_processes(LaunchRequest(run, cluster, here, False), Path(scratch), this_machine())
