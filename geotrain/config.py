"""The two configuration files, as frozen pydantic models: the *run* (what to train) and the *cluster* (where).

Unknown keys are errors. Every error names the key, its value and the rule, and suggests the nearest known key.
A check that needs more than one block stands beside the part that owns it (for example, tensor parallelism
against the number of heads in `geotrain.inner.model`).
"""

from __future__ import annotations

import hashlib
import json
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from geotrain.faults import explain

PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,30}$")]


class ConfigError(ValueError):
    """A configuration file is wrong. The message names file, key, value and rule."""


EXIT_FOR_GOOD = 2  # exit code of an error that a person must mend: the launcher does not start the process again


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


# ------------------------------------------------------------------------------------------------ the run


class ModelConfig(Block):
    """What is trained."""

    config: dict[str, Any] | str = Field(
        description="A Hugging Face config: inline, or the path of a config.json (relative to the run file)."
    )
    init_from: str | None = Field(None, description="Hugging Face checkpoint folder whose weights start the run.")
    recompute: Literal["none", "selective", "full"] = Field("none", description="Activation recomputation.")


class ParallelConfig(Block):
    """How a worker's ranks share the model. Data parallelism is what remains of the worker's ranks."""

    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    sequence: bool = Field(False, description="Megatron's sequence parallelism (needs tensor > 1).")


class DataConfig(Block):
    train: str = Field(description="Prefix of the training .bin/.idx pair written by `geotrain prepare`.")
    validation: str | None = Field(None, description="Prefix of the validation .bin/.idx pair.")
    tokenizer: str | None = Field(None, description="Folder with the tokenizer; copied into exports.")
    sequence_length: PositiveInt
    train_samples: PositiveInt = Field(description="Samples (sequences) after which the run is finished.")
    validation_samples: PositiveInt = 64


class AccoConfig(Block):
    """Overlapped, delayed-gradient accumulation inside a worker (arXiv 2406.02613)."""

    prediction: Literal["exact", "int4", "local", "stale", "none"] = "int4"
    synchronous_steps: Annotated[int, Field(ge=0)] = Field(
        200, description="Steps that hide nothing: at the start, and after a restart without the optimizer's state."
    )
    timeout_s: PositiveFloat = Field(600.0, description="How long a rank waits for the others in each collective.")
    predicted_share: Fraction | None = Field(None, description="Share of a batch computed at the prediction.")
    balance: bool = Field(
        False, description="Replicas take micro-batches of a batch as they get to them: slow ones fewer."
    )


class MomentumConfig(Block):
    """Delayed Nesterov at a server (arXiv 2506.04531): every `buffer`-th update moves the momentum."""

    lr_per_update: PositiveFloat
    beta: Fraction
    buffer: PositiveInt


class CodecConfig(Block):
    name: Literal["fp32", "bf16", "int8", "int4", "e3m0", "e2m1", "topk2"] = "fp32"
    block: Literal[32, 64, 128, 256, 512, 1024, 2048, 4096] = Field(128, description="Elements that share a scale.")
    scale: Literal["fp32", "bf16", "e8m0"] = Field("bf16", description="Type of a block's scale; e8m0: 2^n.")
    rounding: Literal["nearest", "stochastic"] = "nearest"
    error_feedback: bool = True
    error_decay: Fraction = Field(1.0, description="What part of the old residual is kept.")
    density: Annotated[float, Field(gt=0, le=1)] = Field(0.1, description="topk2: share of elements sent.")


class FragmentConfig(Block):
    """How layers are grouped for streaming (arXiv 2501.18512). One fragment means everything at once."""

    layers_per_fragment: PositiveInt | None = Field(None, description="None: the whole model is one fragment.")


class OverlapConfig(Block):
    """Whether training goes on while an answer travels, and how it is then adopted."""

    steps: Annotated[int, Field(ge=0)] = Field(0, description="τ: inner steps until adoption; 0 waits at once.")
    late: Literal["wait", "continue"] = Field(
        "wait", description="An answer that is not there after τ steps: wait for it, or train on until it is."
    )
    adopt: Literal["replace", "mix", "rebase"] = "replace"
    mix: Fraction = Field(0.5, description="adopt = mix: weight of the worker's own progress.")

    @model_validator(mode="after")
    def _adoption_fits(self) -> OverlapConfig:
        if self.steps and self.adopt == "replace":
            raise ValueError(
                f"steps = {self.steps} with adopt = 'replace' would forget what was trained meanwhile; "
                "use 'mix' or 'rebase', or steps = 0"
            )
        if self.late == "continue" and not self.steps:
            raise ValueError("late = 'continue' needs steps > 0: with steps = 0 the answer is waited for at once")
        return self


class LimitsConfig(Block):
    """What a server refuses, and when it refuses whoever sends it."""

    norm_deviations: PositiveFloat | None = Field(
        8.0, description="An update whose norm is so many deviations above the usual is refused; null: none is."
    )
    norm_free_updates: PositiveInt = Field(16, description="Updates a member from which the usual is learned.")
    offences: PositiveInt = Field(3, description="So many refused updates among its last ones quarantine a member.")
    offence_window: PositiveInt = Field(64, description="A member's last ones: so many.")
    quarantine_s: PositiveFloat = Field(600.0, description="A quarantined member may start anew after this time.")


class OuterConfig(Block):
    """The outer loop. Each baseline is a setting of this block."""

    rule: Literal["halos", "region_momentum", "sync"] = Field("region_momentum", description="docs/algorithms.md")
    levels: Literal[1, 2] = Field(2, description="2: workers → region server → global server; 1: workers → global.")
    ledger: bool = Field(True, description="halos: keep what was committed while an update travelled.")
    local_steps: PositiveInt = Field(8, description="H: inner steps between deltas, at speed 1.")
    scale_local_steps: bool = Field(False, description="DyLU: slower workers take fewer steps, H·speed.")
    updates_per_send: PositiveInt = Field(4, description="K: updates a region applies before it sends up.")
    merge_alpha: Fraction = Field(0.5, description="α: weight of the global weights when a region merges.")
    region: MomentumConfig = MomentumConfig(lr_per_update=0.2, beta=0.9, buffer=16)
    global_: MomentumConfig = Field(MomentumConfig(lr_per_update=0.15, beta=0.5, buffer=2), alias="global")
    sync_lr: PositiveFloat = Field(0.7, description="sync: the outer Nesterov learning rate.")
    sync_momentum: Fraction = Field(0.9, description="sync: the outer Nesterov momentum.")
    momentum_gain: Annotated[float, Field(ge=0)] = Field(1.0, description="region_momentum: c.")
    momentum_decay: Fraction = Field(0.993, description="region_momentum: k, per update; docs/algorithms.md")
    lease_reserve: Annotated[int, Field(ge=0)] = Field(
        0, description="Jobs of each worker whose data a region keeps in reserve, to train on while it is cut off."
    )
    up: CodecConfig = CodecConfig(name="bf16")
    down: CodecConfig = CodecConfig(name="bf16")
    local: CodecConfig = Field(CodecConfig(name="fp32"), description="Codec between workers and region server.")
    fragments: FragmentConfig = FragmentConfig()
    overlap: OverlapConfig = OverlapConfig()
    limits: LimitsConfig = LimitsConfig()

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True)


class CheckpointConfig(Block):
    folder: str = Field("checkpoints", description="Relative to the run's folder, or absolute.")
    every_jobs: PositiveInt = Field(8, description="Workers save after this many jobs (deltas).")
    every_updates: PositiveInt = Field(64, description="Servers snapshot after this many updates.")
    keep: PositiveInt = 2
    snapshots: str | None = Field(
        None,
        description="URL (s3://bucket/path, file:///path, any of fsspec's) to which servers copy their snapshots.",
    )

    @model_validator(mode="after")
    def _snapshots_are_a_url(self) -> CheckpointConfig:
        if self.snapshots is not None and "://" not in self.snapshots:
            raise ValueError(f"snapshots = {self.snapshots!r} is no URL; write s3://bucket/path or file:///path")
        return self


class WandbConfig(Block):
    """Weights & Biases, from the global server; the package must be installed."""

    project: str
    entity: str | None = None
    group: str | None = None


class MonitorConfig(Block):
    """What shows how the run goes: events, the status page, metrics for Prometheus, TensorBoard."""

    every_s: PositiveFloat = Field(2.0, description="Seconds between progress lines.")
    validate_every_samples: PositiveInt | None = Field(
        None,
        description="Committed samples between two validations of the global weights; at least 4 times "
        "data.validation_samples, so that they cost at most a twelfth of the compute. null: none.",
    )
    enabled: bool = Field(True, description="False: no events, and nothing that is fed by them.")
    sample_s: PositiveFloat = Field(5.0, description="Seconds between samples of links, memory, queues.")
    host: str = Field("127.0.0.1", description="Where page and metrics listen; beyond loopback needs token_file.")
    page_port: Port | None = Field(0, description="Of the global server's status page; 0: a free one; null: no page.")
    metrics_port: Port | None = Field(
        None,
        description="Prometheus: the global server's; +1: the launcher's; +2, +3, …: the region servers', in the "
        "cluster's order; 0: free ones; null: none.",
    )
    token_file: str | None = Field(
        None, description="File whose first line lets in those who show it; on each machine that serves."
    )
    tensorboard: str | None = Field(
        None,
        description="Folder, relative to the run's, for TensorBoard files that the global server writes.",
    )
    wandb: WandbConfig | None = None

    @model_validator(mode="after")
    def _strangers_need_a_token(self) -> MonitorConfig:
        serves = self.enabled and (self.page_port is not None or self.metrics_port is not None)
        if serves and self.token_file is None and not is_loopback(self.host):
            raise ValueError(
                f"host = {self.host!r} can be reached from other machines: set token_file, or page_port and "
                "metrics_port to null"
            )
        return self


class RunConfig(Block):
    """The run file."""

    name: Name
    folder: str | None = Field(None, description="Where the run writes; default runs/<name>.")
    seed: Annotated[int, Field(ge=0)] = 1234
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig
    deepspeed: dict[str, Any] = Field(description="Passed to DeepSpeed unchanged; see its documentation.")
    acco: AccoConfig | None = None
    outer: OuterConfig = OuterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitor: MonitorConfig = MonitorConfig()

    @model_validator(mode="after")
    def _batch_is_stated(self) -> RunConfig:
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu"):
            value = self.deepspeed.get(key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"deepspeed.{key} must be a positive integer, not {value!r}")
        return self

    @model_validator(mode="after")
    def _validation_is_affordable(self) -> RunConfig:
        every = self.monitor.validate_every_samples
        if every is not None and self.data.validation is None:
            raise ValueError("monitor.validate_every_samples needs data.validation, the prefix of its .bin/.idx pair")
        if every is not None and every < 4 * self.data.validation_samples:
            raise ValueError(
                f"monitor.validate_every_samples = {every} is below 4 times data.validation_samples = "
                f"{self.data.validation_samples}: validation would cost more than a twelfth of the compute"
            )
        return self

    @property
    def run_folder(self) -> Path:
        return Path(self.folder or f"runs/{self.name}")

    @property
    def samples_per_step(self) -> int:
        """Samples one worker trains in one inner step: DeepSpeed's train_batch_size."""
        return int(self.deepspeed["train_batch_size"])


# -------------------------------------------------------------------------------------------- the cluster


class Address(Block):
    host: str = "127.0.0.1"
    port: Port = Field(0, description="0: the launcher picks a free port (only for a server it starts locally).")

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class DeviceConfig(Block):
    """A kind of accelerator, for planning."""

    memory_gb: PositiveFloat = Field(description="Memory a training rank may use, in 1e9 bytes.")
    tflops: PositiveFloat = Field(description="Dense matrix peak at the training type, in 1e12 operations a second.")
    efficiency: Annotated[float, Field(gt=0, le=1)] = Field(
        0.4, description="Share of the peak that training reaches; `geotrain probe` measures it."
    )
    host_gbps: PositiveFloat = Field(
        256.0, description="Rate between two of them in one host, each way; as given, that of PCIe 4 with 16 lanes."
    )
    usd_per_hour: Annotated[float, Field(ge=0)] | None = Field(None, description="Price of one accelerator.")


class HostConfig(Block):
    host: str
    slots: PositiveInt = Field(description="Accelerators (or CPU ranks) used on this host.")
    device: str | None = Field(None, description="Its kind of accelerator: a key of the cluster's `devices`.")
    region: Name | None = Field(
        None, description="The region it stands in, where that is not its worker's: a worker may span regions."
    )


class WorkerConfig(Block):
    """One DeepSpeed world."""

    name: Name
    hosts: tuple[HostConfig, ...] = Field(min_length=1)
    launcher: Literal["local", "ssh", "pdsh", "slurm", "openmpi", "mpich", "impi"] = Field(
        "local", description="`local` starts ranks on this machine; the rest are DeepSpeed's launchers."
    )
    launcher_args: str = Field("", description="More arguments for srun, mpirun or pdsh.")
    parallel: ParallelConfig | None = Field(None, description="Overrides the run's `parallel` for this worker.")
    deepspeed: dict[str, Any] = Field({}, description="Keys laid over the run's `deepspeed` block.")
    env: dict[str, str] = Field({}, description="Environment of this worker's processes.")
    min_step_s: Annotated[float, Field(ge=0)] = Field(
        0.0, description="An inner step takes at least so long: for rehearsals that leave the machine to others."
    )

    @property
    def ranks(self) -> int:
        return sum(h.slots for h in self.hosts)


class RegionConfig(Block):
    name: Name
    server: Address = Address()
    ssh: str | None = Field(None, description="Host that runs this region's server and launches its workers.")
    folder: str | None = Field(None, description="GeoTrain's checkout on that host; None: the same path as here.")
    workers: tuple[WorkerConfig, ...] = Field((), description="`geotrain plan` makes them of `hosts`.")
    hosts: tuple[HostConfig, ...] = Field((), description="What `geotrain plan` may use here.")

    @model_validator(mode="after")
    def _has_something(self) -> RegionConfig:
        if not self.workers and not self.hosts:
            raise ValueError("a region needs workers, or hosts that `geotrain plan` makes workers of")
        return self


class LinkConfig(Block):
    """A link between two regions, or a region and the global server; for emulation, simulation and planning.

    The same region twice: the links between its hosts.
    """

    regions: tuple[str, str]
    gbps: PositiveFloat
    rtt_ms: Annotated[float, Field(ge=0)] = 0.0
    usd_per_gb: Annotated[float, Field(ge=0)] | None = Field(None, description="Price of 1e9 bytes sent over it.")


class SecurityConfig(Block):
    """Where the run's certificates lie. Without this block, links are plaintext and must be loopback."""

    folder: str


class RestartConfig(Block):
    """When the launcher starts again what died. The pause doubles with each death in a row and is `first_s` again
    after a life longer than `longest_s`. A configuration error is never tried again."""

    limit: Annotated[int, Field(ge=0)] = Field(10, description="Restarts of one process within the window; 0: none.")
    window_s: PositiveFloat = 3600.0
    first_s: PositiveFloat = Field(1.0, description="The pause before a restart, after the first death.")
    longest_s: PositiveFloat = Field(60.0, description="The longest pause before a restart.")


class ClusterConfig(Block):
    """The cluster file."""

    name: Name
    global_server: Address = Address()
    global_ssh: str | None = Field(None, description="Host that runs the global server; None: this machine.")
    global_folder: str | None = Field(None, description="GeoTrain's checkout on that host; None: the same path.")
    regions: tuple[RegionConfig, ...] = Field(min_length=1)
    links: tuple[LinkConfig, ...] = ()
    devices: dict[str, DeviceConfig] = Field({}, description="Kinds of accelerators, by the names that hosts use.")
    emulate_links: bool = Field(False, description="Local runs: one network namespace a region, with its link.")
    security: SecurityConfig | None = None
    restart: RestartConfig = RestartConfig()

    @model_validator(mode="after")
    def _names_are_unique(self) -> ClusterConfig:
        names = [r.name for r in self.regions] + [w.name for r in self.regions for w in r.workers]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ValueError(f"regions and workers need names of their own; used twice: {', '.join(twice)}")
        known = {r.name for r in self.regions} | {"global"}
        for link in self.links:
            for end in link.regions:
                if end not in known:
                    raise ValueError(f"links: no region is called {end!r}; known: {', '.join(sorted(known))}")
        for region in self.regions:
            for host in (*region.hosts, *(h for w in region.workers for h in w.hosts)):
                if host.device is not None and host.device not in self.devices:
                    kinds = ", ".join(sorted(self.devices)) or "none"
                    raise ValueError(f"host {host.host!r}: device {host.device!r} is not among `devices`: {kinds}")
                if host.region is not None and host.region not in known - {"global"}:
                    raise ValueError(f"host {host.host!r}: no region is called {host.region!r}")
        return self

    @property
    def serving(self) -> tuple[RegionConfig, ...]:
        """The regions with workers of their own, and so with a server. Others only lend hosts to these."""
        return tuple(region for region in self.regions if region.workers)

    def region(self, name: str) -> RegionConfig:
        for region in self.regions:
            if region.name == name:
                return region
        known = ", ".join(r.name for r in self.regions)
        raise ConfigError(f"cluster {self.name!r} has no region {name!r}; its regions: {known}")

    def worker(self, region: str, name: str | None) -> WorkerConfig:
        """The region's worker of that name; without a name, its only worker."""
        workers = self.region(region).workers
        if name is None and len(workers) == 1:
            return workers[0]
        for worker in workers:
            if worker.name == name:
                return worker
        raise ConfigError(
            f"region {region!r} has no worker {name!r}; its workers: {', '.join(w.name for w in workers)}"
        )


# ------------------------------------------------------------------------------------------------ loading

Config = TypeVar("Config", bound=Block)


def load_run(path: str | Path) -> RunConfig:
    """Read a run file. A model config given as a path is read and put inline.

    Raises ConfigError. Relative data paths are left as they are: relative to the working directory.
    """
    path = Path(path)
    raw = read_json(path)
    model = raw.get("model") if isinstance(raw, dict) else None
    if isinstance(model, dict) and isinstance(model.get("config"), str):
        raw = {**raw, "model": {**model, "config": read_json(path.parent / model["config"])}}
    return parse(RunConfig, raw, str(path))


def load_cluster(path: str | Path) -> ClusterConfig:
    """Read a cluster file. Raises ConfigError."""
    return parse(ClusterConfig, read_json(Path(path)), str(path))


def parse(kind: type[Config], raw: Any, where: str) -> Config:
    """Validate parsed JSON. Raises ConfigError with one line for each fault."""
    try:
        return kind.model_validate_json(json.dumps(raw))  # strict JSON: "3" is no integer
    except ValidationError as error:
        found = error.errors()
        inner = {fault["loc"][:depth] for fault in found for depth in range(len(fault["loc"]))}
        told = [fault for fault in found if fault["loc"] not in inner]  # a list with a bad item is not "too short"
        faults = "\n".join(f"  {explain(kind, fault)}" for fault in told)
        raise ConfigError(f"{where}: not a valid {kind.__name__}\n{faults}") from None


def json_schema(kind: type[Block]) -> dict[str, Any]:
    """The JSON Schema that editors use to check and complete a config file."""
    schema = kind.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def config_digest(run: RunConfig) -> str:
    """Hex digest of what every process of a run must agree on: the model, the data and the outer loop."""
    shared = run.model_dump(by_alias=True, mode="json", include={"name", "seed", "model", "data", "outer"})
    shared["model"].pop("recompute")
    shared["data"].pop("train_samples")  # a finished run may be extended
    text = json.dumps(shared, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_json(path: Path) -> Any:
    """Raises ConfigError."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
