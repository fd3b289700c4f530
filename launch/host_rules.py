"""What is wrong with hosts, decided from their facts. Pure: nothing is read or asked here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from geotrain.launch import cuda_driver
from geotrain.launch.host_facts import MIB, GpuFacts, HostFacts
from geotrain.parallelism.transformer_engine import dotted

CLOCK_S = 5.0  # clocks may differ by so much: logs of two hosts can still be laid side by side
SHM_BYTES = 1 << 30  # NCCL's buffers between the ranks of a host lie there; containers begin with 64 MiB
BUSY_BYTES = 1 << 30  # more than this in use on an idle GPU belongs to somebody
PROHIBITED = "Prohibited"  # a compute mode
_BROKEN = {  # in what nvidia-smi says → what to do
    "Driver/library version mismatch": "the driver was updated under way: start the machine again",
    "couldn't communicate": "load the driver (modprobe nvidia), or install it for the running kernel",
    "GPU is lost": "start the machine again; if that does not help, the GPU or its slot is broken",
    "Unable to determine the device handle": "a GPU has fallen off the bus (`dmesg | grep Xid`): start it again",
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
    """What one worker wants of one host. memory_bytes: of a rank on its device, by the estimate. checkpoint_bytes:
    one checkpoint of the ranks on the host. device: the kind that the cluster file names. ports: that must be free.
    on_cpu: its ranks take no GPU, by the worker's own environment. asks: a key, with its value, that needs
    Transformer Engine and GPUs of at least this capability.
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


@dataclass(frozen=True)
class Look:
    """One host that has answered. asked_s, answered_s: this machine's clock before and after."""

    facts: HostFacts
    needs: tuple[HostNeeds, ...]
    asked_s: float
    answered_s: float


def findings(looks: Mapping[str, Look], resume: bool = False) -> list[Finding]:
    """All that is wrong with these hosts, and between them. resume: the run has begun, so what is taken may be taken
    by its own former processes, which are ended before new ones begin."""
    found = [each for host, look in looks.items() for each in _of_host(host, look, resume)]
    for worker in sorted({needs.worker for look in looks.values() for needs in look.needs}):
        mine = {h: look.facts for h, look in looks.items() if any(n.worker == worker for n in look.needs)}
        found += _between(worker, mine)
    return found


def _of_host(host: str, look: Look, resume: bool) -> list[Finding]:
    facts, found = look.facts, list[Finding]()

    def tell(what: str, remedy: str, refuses: bool = True) -> None:
        found.append(Finding(host, what, remedy, refuses))

    ahead_s, behind_s = facts.clock_s - look.answered_s, look.asked_s - facts.clock_s
    if (off_s := max(ahead_s, behind_s)) > CLOCK_S:
        way = "ahead of" if ahead_s > behind_s else "behind"
        tell(f"its clock is {off_s:.0f} s {way} this machine's", "let it follow a time server (chrony, ntp)", False)
    if look.needs and facts.torch is None:
        tell(f"Python {facts.python} there has no torch", "`make install` there")
    mine = {port for needs in look.needs for port in needs.ports}  # a command may ask several hosts alike
    for port in sorted(mine & set(facts.taken_ports)):
        remedy = "end what listens there, or give the worker another master_port"
        tell(f"port {port} is taken", remedy, not resume)
    if facts.free_bytes < (wanted := 2 * sum(needs.checkpoint_bytes for needs in look.needs)):
        what = f"{_gb(facts.free_bytes)} are free for the run's folder, two checkpoints take {_gb(wanted)}"
        tell(what, "make room, or give checkpoint.folder another place", False)
    found += _of_transformer_engine(host, look)
    if ranks := sum(needs.ranks for needs in look.needs if not needs.on_cpu):
        found += _of_devices(host, facts, look.needs, ranks)
    return found


def _of_devices(host: str, facts: HostFacts, wanted: tuple[HostNeeds, ...], ranks: int) -> list[Finding]:
    """ranks: that would use a GPU each."""
    found = list[Finding]()

    def tell(what: str, remedy: str, refuses: bool = True) -> None:
        found.append(Finding(host, what, remedy, refuses))

    if facts.unusable:
        # The message ends with advice for this machine; the table has its own.
        tell(facts.unusable.partition(". Install ")[0], cuda_driver.remedy(facts.driver, facts.cuda))
    if facts.smi_error:
        known = (text for part, text in _BROKEN.items() if part in facts.smi_error)
        tell(f"nvidia-smi fails: {facts.smi_error}", next(known, "look at `nvidia-smi` and `dmesg` there"), False)
    kinds = ", ".join(sorted({needs.device for needs in wanted if needs.device}))
    if facts.usable:
        if ranks > facts.usable:
            tell(f"{ranks} ranks, but {facts.usable} GPUs", "lower the host's `slots`, or show it more GPUs")
        needed = max(needs.memory_bytes for needs in wanted)
        found += [each for gpu in facts.gpus[:ranks] for each in _of_gpu(host, gpu, needed)]
        if not facts.headers:
            tell("Python.h is missing: Triton compiles with it", "install Python's headers (Debian: python3-dev)")
        if not facts.compiler:
            tell("there is no C compiler: Triton starts one", "install gcc, or name one in CC")
        if ranks > 1 and facts.shm_bytes is not None and facts.shm_bytes < SHM_BYTES:
            tell(
                f"{facts.shm_bytes // MIB} MiB are free in /dev/shm", "docker run --shm-size=8g, or --ipc=host", False
            )
    elif kinds and not facts.unusable:
        what = f"no GPU is visible, the cluster file says {kinds}: its ranks compute on the CPU"
        tell(what, "check the driver; a container must be started with the GPUs", False)
    return found


def _of_transformer_engine(host: str, look: Look) -> list[Finding]:
    facts, found = look.facts, list[Finding]()
    for needs in look.needs:
        if needs.asks and (needs.on_cpu or not facts.usable):
            found.append(Finding(host, f"{needs.asks} needs GPUs; its ranks compute on the CPU", "leave it out"))
        elif needs.asks:
            if facts.transformer_engine is None:
                remedy = "install transformer-engine there (docs/gpu.md), or leave it out for this worker"
                found.append(Finding(host, f"{needs.asks} needs Transformer Engine, which is not installed", remedy))
            old = [
                g for g in facts.gpus[: needs.ranks] if g.capability is not None and g.capability < needs.capability
            ]
            for gpu in old:
                has, least = dotted(gpu.capability or (0, 0)), dotted(needs.capability)
                what = f"{needs.asks} needs compute capability {least}, GPU {gpu.index} ({gpu.name}) has {has}"
                found.append(Finding(host, what, "choose another recipe, or leave it out for this worker"))
    return found


def _of_gpu(host: str, gpu: GpuFacts, needed_bytes: int) -> list[Finding]:
    name = f"GPU {gpu.index} ({gpu.name})"
    if gpu.compute_mode == PROHIBITED:
        return [Finding(host, f"{name} is in compute mode {PROHIBITED}", f"nvidia-smi -i {gpu.index} -c DEFAULT")]
    remedy = "end what uses it, or hide it with CUDA_VISIBLE_DEVICES"
    if gpu.processes or (gpu.used_bytes or 0) > BUSY_BYTES:
        by = ", ".join(gpu.processes) or "processes that this container does not show"
        used = "" if gpu.used_bytes is None else f", {_gb(gpu.used_bytes)}"
        return [Finding(host, f"{name} is used by {by}{used}", remedy, False)]
    if gpu.memory_bytes is not None and gpu.memory_bytes < needed_bytes:
        what = f"{name} has {_gb(gpu.memory_bytes)}, a rank needs about {_gb(needed_bytes)}"
        return [Finding(host, what, "see `geotrain dry-run`: more ranks, recomputation, or smaller batches", False)]
    return []


def _between(worker: str, hosts: Mapping[str, HostFacts]) -> list[Finding]:
    """What the hosts of one worker must have alike: its ranks form one torch.distributed world."""
    found = []
    alike = {
        "GeoTrain": {host: facts.geotrain for host, facts in hosts.items()},
        "torch": {host: facts.torch for host, facts in hosts.items() if facts.torch},
        "NCCL": {host: facts.nccl for host, facts in hosts.items() if facts.nccl},
    }
    for what, versions in alike.items():
        if len(set(versions.values())) > 1:
            told = ", ".join(f"{version} on {host}" for host, version in versions.items())
            found.append(
                Finding(worker, f"its hosts have unlike versions of {what}: {told}", "install the same on all")
            )
    on = {host: facts.usable > 0 for host, facts in hosts.items() if not facts.unusable}
    if len(set(on.values())) > 1:
        without = ", ".join(host for host, has in on.items() if not has)
        what = f"some of its hosts have GPUs, {without} has none: NCCL and gloo cannot meet"
        found.append(Finding(worker, what, "mend that host, or set DS_ACCELERATOR=cpu in the worker's env"))
    return found


def _gb(count_bytes: int) -> str:
    return f"{count_bytes / 1e9:.1f} GB"
