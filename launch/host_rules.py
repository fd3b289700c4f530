"""Decides from the facts of hosts what is wrong with them. Pure: nothing is read or asked here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from geotrain.common.names import SHARE_DEVICES
from geotrain.launch import cuda_driver
from geotrain.launch.host_facts import MIB, GpuFacts, HostFacts
from geotrain.launch.networks import Networks
from geotrain.parallelism.transformer_engine import dotted

CLOCK_S = 5.0  # clocks may differ by so much: logs of two hosts can still be laid side by side
SHM_BYTES = 1 << 30  # NCCL's buffers between the ranks of a host lie there; containers begin with 64 MiB
BUSY_BYTES = 1 << 30  # more than this in use on an idle GPU belongs to somebody
PROHIBITED, EXCLUSIVE = "Prohibited", "Exclusive_Process"  # compute modes
_BROKEN = {  # in what NVML says → what to do
    "version mismatch": "the driver was updated under way: start the machine again",
    "Driver Not Loaded": "load the driver (modprobe nvidia), or install it for the running kernel",
    "GPU is lost": "start the machine again; if that does not help, the GPU or its slot is broken",
    "requires restart": "reset it (`nvidia-smi -r -i NUMBER`), or start the machine again",
}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. refuses: a run cannot begin with it; otherwise it is seldom meant."""

    host: str
    what: str
    remedy: str
    refuses: bool = True


@dataclass(frozen=True)
class HostNeeds:
    """The needs of one worker on one host. memory_bytes: of a rank on its device, by the estimate. checkpoint_bytes:
    one checkpoint of the ranks on the host. device: the kind that the cluster file names. ports: that must be free.
    on_cpu: its ranks take no GPU, by the worker's own environment. asks: a key, with its value, that needs
    Transformer Engine and GPUs of at least this capability. shares: its ranks may share GPUs with others. master: the
    host of its rank 0, if it has several.
    """

    worker: str
    ranks: int
    memory_bytes: int = 0
    checkpoint_bytes: int = 0
    device: str | None = None
    ports: tuple[int, ...] = ()
    on_cpu: bool = False
    asks: str = ""
    capability: tuple[int, int] = (0, 0)
    shares: bool = False
    master: str = ""


@dataclass(frozen=True)
class Look:
    """The facts of one host that has answered. asked_s, answered_s: this machine's clock before and after."""

    facts: HostFacts
    needs: tuple[HostNeeds, ...]
    asked_s: float
    answered_s: float


Report = Callable[..., None]  # (what, remedy, refuses = True): adds a finding of one host


def findings(looks: Mapping[str, Look], resume: bool = False) -> list[Finding]:
    """List what is wrong with these hosts, and between them. resume: the run has begun, so what is taken may be taken
    by its own former processes, which are ended before new ones begin."""
    found = list[Finding]()
    for host, look in looks.items():

        def report(what: str, remedy: str, refuses: bool = True, host: str = host) -> None:
            found.append(Finding(host, what, remedy, refuses))

        _check_host(look, resume, report)
        _check_transformer_engine(look, report)
        if ranks := sum(needs.ranks for needs in look.needs if not needs.on_cpu):
            _check_devices(look, ranks, report)
    for worker in sorted({needs.worker for look in looks.values() for needs in look.needs}):
        mine = {h: look.facts for h, look in looks.items() if any(n.worker == worker for n in look.needs)}
        found += _between(worker, mine)
    return found


def _check_host(look: Look, resume: bool, report: Report) -> None:
    facts = look.facts
    ahead_s, behind_s = facts.clock_s - look.answered_s, look.asked_s - facts.clock_s
    if (off_s := max(ahead_s, behind_s)) > CLOCK_S:
        way = "ahead of" if ahead_s > behind_s else "behind"
        report(f"its clock is {off_s:.0f} s {way} this machine's", "let it follow a time server (chrony, ntp)", False)
    if look.needs and facts.torch is None:
        report(f"Python {facts.python} there has no torch", "`make install` there")
    mine = {port for needs in look.needs for port in needs.ports}  # a command may ask several hosts alike
    for port in sorted(mine & set(facts.taken_ports)):
        remedy = "end what listens there, or give the worker another master_port"
        report(f"port {port} is taken", remedy, not resume)
    networks = facts.networks or Networks()
    for who, variable, used in (
        ("gloo", "GLOO_SOCKET_IFNAME", networks.gloo),
        ("NCCL", "NCCL_SOCKET_IFNAME", networks.nccl if facts.usable and not networks.rdma else None),
    ):
        fastest = max(networks.interfaces, key=lambda each: each.mbit_s or 0, default=None)
        if used is not None and fastest is not None and used.mbit_s and (fastest.mbit_s or 0) >= 2 * used.mbit_s:
            remedy = f"{variable}={fastest.name} in the worker's env, if the hosts reach each other over it"
            report(f"{who} will use {used}, where {fastest} is faster", remedy, False)
    if facts.free_bytes < (wanted := 2 * sum(needs.checkpoint_bytes for needs in look.needs)):
        what = f"{_gb(facts.free_bytes)} are free for the run's folder, two checkpoints take {_gb(wanted)}"
        report(what, "make room, or give checkpoint.folder another place", False)


def _check_devices(look: Look, ranks: int, report: Report) -> None:
    """Check the GPUs of a host. ranks: that would use a GPU each."""
    facts = look.facts
    if facts.unusable:
        # The message ends with advice for this machine; the table has its own.
        report(facts.unusable.partition(". Install ")[0], cuda_driver.remedy(facts.driver, facts.cuda))
    if facts.nvml_error:
        known = (text for part, text in _BROKEN.items() if part in facts.nvml_error)
        report(f"the driver says: {facts.nvml_error}", next(known, "look at `nvidia-smi` and `dmesg` there"), False)
    kinds = ", ".join(sorted({needs.device for needs in look.needs if needs.device}))
    if facts.usable:
        shared = all(needs.shares for needs in look.needs if not needs.on_cpu)
        if ranks > facts.usable and not shared:
            remedy = f"lower the host's `slots`, show it more GPUs, or set {SHARE_DEVICES}=1 in the workers' env"
            report(f"{ranks} ranks, but {facts.usable} GPUs", remedy)
        for gpu in facts.gpus[:ranks]:
            most = max(needs.memory_bytes for needs in look.needs)
            _check_gpu(gpu, -(-ranks // facts.usable) if shared else 1, most, report)
        if not facts.headers:
            report("Python.h is missing: Triton compiles with it", "install Python's headers (Debian: python3-dev)")
        if not facts.compiler:
            report("there is no C compiler: Triton starts one", "install gcc, or name one in CC")
        if ranks > 1 and facts.shm_bytes is not None and facts.shm_bytes < SHM_BYTES:
            report(
                f"{facts.shm_bytes // MIB} MiB are free in /dev/shm", "docker run --shm-size=8g, or --ipc=host", False
            )
    elif kinds and not facts.unusable:
        what = f"no GPU is visible, the cluster file says {kinds}: its ranks compute on the CPU"
        report(what, "check the driver; a container must be started with the GPUs", False)


def _check_transformer_engine(look: Look, report: Report) -> None:
    facts = look.facts
    for needs in filter(lambda needs: needs.asks, look.needs):
        if needs.on_cpu or not facts.usable:
            report(f"{needs.asks} needs GPUs; its ranks compute on the CPU", "leave it out")
            continue
        if facts.transformer_engine is None:
            remedy = "install transformer-engine there (docs/gpu.md), or leave it out for this worker"
            report(f"{needs.asks} needs Transformer Engine, which is not installed", remedy)
        for gpu in facts.gpus[: needs.ranks]:
            if gpu.capability is not None and gpu.capability < needs.capability:
                has, least = dotted(gpu.capability), dotted(needs.capability)
                what = f"{needs.asks} needs compute capability {least}, GPU {gpu.index} ({gpu.name}) has {has}"
                report(what, "choose another recipe, or leave it out for this worker")


def _check_gpu(gpu: GpuFacts, ranks: int, rank_bytes: int, report: Report) -> None:
    """Check one GPU. ranks: that use it. rank_bytes: the most that one needs."""
    name, needed_bytes = f"GPU {gpu.index} ({gpu.name})", ranks * rank_bytes
    if gpu.compute_mode == PROHIBITED or (ranks > 1 and gpu.compute_mode == EXCLUSIVE):
        report(f"{name} is in compute mode {gpu.compute_mode}", f"nvidia-smi -i {gpu.index} -c DEFAULT")
    elif gpu.processes or (gpu.used_bytes or 0) > BUSY_BYTES:
        by = ", ".join(gpu.processes) or "processes that this container does not show"
        used = "" if gpu.used_bytes is None else f", {_gb(gpu.used_bytes)}"
        report(f"{name} is used by {by}{used}", "end what uses it, or hide it with CUDA_VISIBLE_DEVICES", False)
    elif gpu.memory_bytes is not None and gpu.memory_bytes < needed_bytes:
        who = "a rank needs" if ranks == 1 else f"its {ranks} ranks need"
        what = f"{name} has {_gb(gpu.memory_bytes)}, {who} about {_gb(needed_bytes)}"
        report(what, "see `geotrain dry-run`: more ranks, recomputation, or smaller batches", False)
    if gpu.ecc_errors:
        what = f"the memory of {name} has had {gpu.ecc_errors} uncorrectable errors since its last reset"
        report(what, f"reset it (`nvidia-smi -r -i {gpu.index}`); if they come back, replace it", False)


def _between(worker: str, hosts: Mapping[str, HostFacts]) -> list[Finding]:
    """Compare what the hosts of one worker must have alike: its ranks form one torch.distributed world."""
    found = []
    alike = {
        "GeoTrain": {host: facts.geotrain for host, facts in hosts.items()},
        "torch": {host: facts.torch for host, facts in hosts.items() if facts.torch},
        "NCCL": {host: facts.nccl for host, facts in hosts.items() if facts.nccl},
    }
    for what, versions in alike.items():
        if len(set(versions.values())) > 1:
            listed = ", ".join(f"{version} on {host}" for host, version in versions.items())
            found.append(
                Finding(worker, f"its hosts have unlike versions of {what}: {listed}", "install the same on all")
            )
    on = {host: facts.usable > 0 for host, facts in hosts.items() if not facts.unusable}
    if len(set(on.values())) > 1:
        without = ", ".join(host for host, has in on.items() if not has)
        what = f"some of its hosts have GPUs, {without} has none: NCCL and gloo do not mix"
        found.append(Finding(worker, what, "mend that host, or set DS_ACCELERATOR=cpu in the worker's env"))
    return found


def _gb(count_bytes: int) -> str:
    return f"{count_bytes / 1e9:.1f} GB"
