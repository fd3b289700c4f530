"""The run file: what to train."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, AwareDatetime, Field, WithJsonSchema, model_validator

from geotrain.config.batches import BatchSchedule
from geotrain.config.block import (
    SCHEMA,
    Block,
    ConfigError,
    Fraction,
    Name,
    Port,
    PositiveFloat,
    PositiveInt,
    from_folder,
    parse,
    read_json,
)
from geotrain.config.data import DataConfig
from geotrain.config.deepspeed import check_block
from geotrain.config.hosts import HostName, is_loopback
from geotrain.config.outer import OuterConfig
from geotrain.families import Architecture, UnsupportedModelError, architecture_from_hf

DeepSpeedBlock = Annotated[
    dict[str, Any],
    AfterValidator(check_block),
    WithJsonSchema({"anyOf": [{"additionalProperties": True, "type": "object"}, {"type": "string"}]}),
]  # a path may stand in the file only, as with `model.config`


class ModelConfig(Block):
    """The model that is trained."""

    config: Annotated[
        dict[str, Any],
        Field(description="A Hugging Face config: inline, or the path of a config.json."),
        WithJsonSchema({"anyOf": [{"additionalProperties": True, "type": "object"}, {"type": "string"}]}),
    ] = Field({})  # a path may stand in the file only: `load_run` puts what it names in its place
    weights: str | None = Field(
        None,
        description="In place of `config`, for a loop of your own with any model: a safetensors file of its "
        "parameters with initial values, as `geotrain.save_parameters` writes it.",
    )
    init_from: str | None = Field(
        None, description="Checkpoint whose weights start the run: a folder (Hugging Face, DCP), or hf://OWNER/NAME."
    )
    init_changes: tuple[str, ...] = Field(
        (), description="Keys of config in which the model differs from that checkpoint on purpose, as rope_theta."
    )
    recompute: Literal["none", "selective", "full"] = Field("none", description="Activation recomputation.")

    @model_validator(mode="after")
    def _is_stated_once(self) -> ModelConfig:
        if self.weights is None and not self.config:
            raise ValueError("config is required, or weights where a loop of your own trains any other model")
        if self.weights is not None and (
            idle := self.differing("init_from", "init_changes", "recompute") + ["config"] * bool(self.config)
        ):
            raise ValueError(f"{', '.join(idle)}: without effect beside weights; leave it out")
        if self.init_changes and self.init_from is None:
            raise ValueError("init_changes: without effect where there is no init_from; leave it out")
        return self


class ParallelConfig(Block):
    """The parallel layout: how a worker's ranks share the model. Data parallelism is what remains of them."""

    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    stage_layers: tuple[PositiveInt, ...] | None = Field(
        None, description="Layers of each pipeline stage where they differ, as on unlike devices; null: as many."
    )
    context: PositiveInt = Field(
        1, description="Ranks that share each sequence: a part of its tokens each, of its heads in attention."
    )
    context_exchange: Literal["heads", "ring"] = Field(
        "heads",
        description="Exchange of context ranks: heads for tokens, at most as many ranks as key-value heads "
        "or keys and values passed round by Transformer Engine, on GPUs.",
    )
    sequence: bool = Field(False, description="Megatron's sequence parallelism (needs tensor > 1).")
    expert: PositiveInt = Field(
        1, description="Neighbouring data-parallel ranks that divide a layer's experts among them."
    )
    sites: PositiveInt = Field(
        1, description="Equal runs of data-parallel ranks, in which gradients are summed before they cross."
    )
    dispatcher: Literal["alltoall", "allgather"] = Field(
        "alltoall",
        description="Way of tokens to the ranks of their experts: each to those only, or all tokens to all ranks.",
    )

    @model_validator(mode="after")
    def _stages_differ(self) -> ParallelConfig:
        if self.stage_layers is not None and len(self.stage_layers) != self.pipeline:
            raise ValueError(
                f"stage_layers lists {len(self.stage_layers)} stages, pipeline = {self.pipeline}; make them equal"
            )
        if self.stage_layers is not None and len(set(self.stage_layers)) == 1:
            raise ValueError("stage_layers: all stages have as many, which is the default; leave it out")
        return self

    def layers_of(self, stage: int, layers: int) -> range:
        """Numbers of the layers that a pipeline stage holds, of a model of so many."""
        each = self.stage_layers or (layers // self.pipeline,) * self.pipeline
        begin = sum(each[:stage])
        return range(begin, begin + each[stage])

    @property
    def replica_ranks(self) -> int:
        """Ranks that train the same samples: one data-parallel replica."""
        return self.tensor * self.pipeline * self.context

    def text(self, ranks: int) -> str:
        """Name this parallel layout of so many ranks, as people do."""
        context = f" × CP {self.context}" if self.context > 1 else ""
        expert = f" (EP {self.expert})" if self.expert > 1 else ""
        tensor = f"TP {self.tensor}{' + sequence' if self.sequence else ''}"
        stages = f" ({' + '.join(map(str, self.stage_layers))} layers)" if self.stage_layers else ""
        sites = f" in {self.sites} sites" if self.sites > 1 else ""
        return f"{tensor} × PP {self.pipeline}{stages}{context} × DP {ranks // self.replica_ranks}{expert}{sites}"


class PrecisionConfig(Block):
    """Number formats and determinism; names and values are Megatron-core's."""

    fp8: Literal["e4m3", "hybrid"] | None = Field(
        None,
        description="Matrix products of layers in FP8, by Transformer Engine: e4m3 for all, or e5m2 for gradients. "
        "Weights stay bf16, masters fp32.",
    )
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = Field(
        "delayed", description="Source of FP8's scales: mxfp8 needs Blackwell, blockwise Hopper, the rest Ada."
    )
    deterministic_mode: bool = Field(
        False, description="The same inputs on the same layout and devices give the same bits, more slowly."
    )

    @model_validator(mode="after")
    def _recipe_does_something(self) -> PrecisionConfig:
        if self.fp8 is None and self.differing("fp8_recipe"):
            raise ValueError(f"fp8_recipe = {self.fp8_recipe!r} does nothing without fp8; set fp8, or leave it out")
        return self


class AccoConfig(Block):
    """Communication inside a worker hidden behind the next step's compute (ACCO, arXiv 2406.02613)."""

    form: Literal["delayed", "exact"] = Field(
        "delayed", description="Whole steps computed one step late, corrected; or as published."
    )
    synchronous_steps: Annotated[int, Field(ge=0)] = Field(
        200, description="Steps that hide nothing: at the start, and after a restart without the optimizer's state."
    )
    timeout_s: PositiveFloat = Field(600.0, description="Longest wait of a rank for the others in each collective.")
    predicted_share: Fraction | None = Field(None, description="Share of a batch computed at the prediction.")
    balance: bool = Field(
        False, description="Replicas take micro-batches of a batch as they get to them: slow ones fewer."
    )


class CheckpointConfig(Block):
    folder: str | None = Field(None, description="Of workers' checkpoints; default: checkpoints in the run's folder.")
    every_jobs: PositiveInt = Field(8, description="Workers save after this many jobs (deltas).")
    every_minutes: PositiveFloat = Field(15.0, description="Servers that took updates snapshot this often.")
    keep: PositiveInt = 2
    snapshots: str | None = Field(
        None,
        description="URL (s3://bucket/path, any of fsspec's) for copies of servers' snapshots, workers' checkpoints.",
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
    """Monitoring of the run: events, the status page, metrics for Prometheus, TensorBoard."""

    every_s: PositiveFloat = Field(2.0, description="Seconds between progress lines.")
    validate_every_samples: PositiveInt | None = Field(
        None,
        description="Committed samples between two validations of the global weights; at least 4 times "
        "data.validation_samples, so that they cost at most a twelfth of the compute. null: none.",
    )
    enabled: bool = Field(True, description="False: no events, and nothing that is fed by them.")
    sample_s: PositiveFloat = Field(5.0, description="Seconds between samples of links, memory, queues.")
    hang_s: float = Field(
        40.0, ge=20.0, description="Seconds in one step after which a rank hangs (docs/monitoring.md)."
    )
    verified_share: float = Field(
        0.0025, ge=0.0, le=1.0, description="Share of a worker's compute for verifying its results (docs/healing.md)."
    )
    collective_s: float = Field(600.0, ge=60.0, description="Longest wait for a worker's ranks, as while it forms.")
    host: HostName = Field("127.0.0.1", description="Address of page and metrics; beyond loopback needs token_file.")
    page_port: Port | None = Field(0, description="Port of the global server's page; 0: a free one; null: no page.")
    metrics_port: Port | None = Field(
        None,
        description="Prometheus: the global server's; +1: the launcher's; +2, +3, …: the region servers', in the "
        "cluster's order; 0: free ones; null: none.",
    )
    token_file: str | None = Field(
        None, description="File whose first line lets in who shows it; where a server runs."
    )
    tensorboard: str | None = Field(None, description="Folder for TensorBoard files that the global server writes.")
    wandb: WandbConfig | None = None
    otlp: str | None = Field(
        None,
        description="URL of an OpenTelemetry collector (http://host:4318), to which workers and servers send traces, "
        "metrics and logs; needs geotrain[otlp].",
    )

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
    """The run file. Relative paths in it are meant from its folder."""

    paths: ClassVar[tuple[str, ...]] = (
        *("folder", "model.weights", "model.init_from"),
        *("data.train", "data.train.*.prefix", "data.validation", "data.tokenizer", "data.cache_folder"),
        *("checkpoint.folder", "monitor.token_file", "monitor.tensorboard"),
    )

    name: Name
    folder: str | None = Field(
        None,
        description="Folder of the run; default: runs/<name> in the launch's working directory, with "
        "data.samples_per_step beside this file.",
    )
    seed: int = Field(1234, ge=0, le=1 << 53)
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    data: DataConfig
    deepspeed: DeepSpeedBlock = Field(
        {},
        description="Passed to DeepSpeed; see its documentation. Inline, or the path of a JSON file. "
        '"auto" may stand for what follows from the run: total_num_steps, warmup_num_steps, '
        "warmup_max_lr, gradient_accumulation_steps, …",
    )
    ends_at: AwareDatetime | None = Field(None, description="When the global server stops the run in good order.")
    acco: AccoConfig | None = None
    outer: OuterConfig = OuterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitor: MonitorConfig = MonitorConfig()

    @model_validator(mode="after")
    def _batch_is_stated(self) -> RunConfig:
        stated = self.data.samples_per_step
        if stated is None:
            self.check_for_trainer()
        elif not self.deepspeed:
            return self
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu"):
            if key not in self.deepspeed:
                raise ValueError(f"deepspeed.{key} is missing: state it, a positive integer")
        if stated not in (None, batch := self.deepspeed["train_batch_size"]):
            raise ValueError(f"data.samples_per_step = {stated}, but deepspeed.train_batch_size = {batch}; state one")
        return self

    @model_validator(mode="after")
    def _batch_grows(self) -> RunConfig:
        if (ramp := self.data.rampup_batch_size) is not None:
            start, increment, _ = ramp
            if start >= (batch := self.samples_per_step) or (batch - start) % increment:
                raise ValueError(
                    f"data.rampup_batch_size = {list(ramp)}: from {start} in steps of {increment} nothing grows to "
                    f"the whole batch of {batch}; state a smaller start, and an increment that divides the difference"
                )
        return self

    @model_validator(mode="after")
    def _skips_no_part_of_a_round(self) -> RunConfig:
        if self.data.skip and self.outer.rule.synchronous:
            raise ValueError("data.skip: a synchronous rule needs each worker's samples in every round; remove it")
        return self

    def check_for_trainer(self) -> None:
        """Raise ConfigError if something is missing that GeoTrain's own trainer needs, and a user's loop does not."""
        data = self.data.model_fields_set
        present = {
            "model.config": bool(self.model.config),
            "data.train": bool(self.data.train),
            "data.sequence_length": "sequence_length" in data,
            "deepspeed": bool(self.deepspeed),
        }
        if missing := [key for key, there in present.items() if not there]:
            raise ConfigError(
                f"{', '.join(missing)}: required where GeoTrain's own trainer trains; for a loop of your own state "
                "data.samples_per_step instead, and start servers with `geotrain serve` (docs/own_loop.md)"
            )

    @model_validator(mode="after")
    def _validation_is_affordable(self) -> RunConfig:
        every = self.monitor.validate_every_samples
        if every is not None and self.data.validation is None and self.data.samples_per_step is None:
            raise ValueError("monitor.validate_every_samples needs data.validation, the prefix of its .bin/.idx pair")
        if every is not None and every < 4 * self.data.validation_samples:
            raise ValueError(
                f"monitor.validate_every_samples = {every} is below 4 times data.validation_samples = "
                f"{self.data.validation_samples}: validation would cost more than a twelfth of the compute"
            )
        return self

    @property
    def architecture(self) -> Architecture:
        """Shape of the run's model. Raises UnsupportedModelError."""
        if self.model.weights is not None:
            raise UnsupportedModelError(
                "model.weights: such a model is trained by a loop of your own only (docs/own_loop.md); this needs "
                "model.config"
            )
        architecture = architecture_from_hf(self.model.config)
        if architecture.net and self.data.attention == "document":
            raise UnsupportedModelError(
                f"data.attention = 'document' does not go with the {architecture.net.name} of a "
                f"{architecture.model_type}, whose state passes from document to document; use 'sample'"
            )
        return architecture

    @property
    def run_folder(self) -> Path:
        """Folder into which the run writes."""
        return Path(self.folder or f"runs/{self.name}")

    @property
    def checkpoint_folder(self) -> Path:
        """Folder in which workers save."""
        return Path(self.checkpoint.folder) if self.checkpoint.folder else self.run_folder / "checkpoints"

    @property
    def samples_per_step(self) -> int:
        """Samples that one worker trains in one inner step, at the end of a ramp: DeepSpeed's train_batch_size.

        The same for all workers, so that a lease is a whole number of steps for whoever takes it.
        """
        return self.data.samples_per_step or int(self.deepspeed["train_batch_size"])

    @property
    def batches(self) -> BatchSchedule:
        """The places of the run's inner steps among its samples."""
        return BatchSchedule(self.samples_per_step, self.data.rampup_batch_size)

    @property
    def inner_steps(self) -> int:
        """Inner steps of the whole run, over all workers."""
        return self.batches.step_at(self.data.train_samples)

    @property
    def total_steps(self) -> int:
        """Whole batches of the run, over all workers, where its learning-rate schedule ends: without a ramp,
        `inner_steps`."""
        return self.data.train_samples // self.samples_per_step


def load_run(path: str | Path, changes: Sequence[str] = ()) -> RunConfig:
    """Read a run file. Its paths become absolute: relative ones are meant from the file's folder. A model config or
    `deepspeed` block given as a path is read and put in its place.

    changes: keys to set, as "outer.local_steps=64": the value is JSON, or else a string. They are given on a command
    line, so that relative paths in them are meant from the working directory. Raises ConfigError.
    """
    path = Path(path)
    raw = _resolved(read_json(path, "regions"), path.parent, str(path))
    for change in changes:
        _put(raw, change)
    own_loop = isinstance(raw, dict) and isinstance(raw.get("data"), dict) and raw["data"].get("samples_per_step")
    if own_loop and not raw.get("folder"):  # found again from whichever working directory a loop is started
        raw = {**raw, "folder": str(path.parent.absolute() / f"runs/{raw.get('name')}")}
    return changed_run(raw, (), str(path))


def changed_run(raw: Any, changes: Sequence[str], where: str) -> RunConfig:
    """Make the run of a run file's content, with absolute paths, and of changes, as for `load_run`. where: the file.
    Raises ConfigError."""
    for change in changes:
        _put(raw, change)
    return parse(RunConfig, _resolved(raw, Path.cwd(), "--set"), where)


def _resolved(raw: Any, folder: Path, where: str) -> Any:
    """Copy the run file's content with absolute paths, and with the files that it names in their places.

    folder: of relative paths. where: what the content stands in, for errors.
    """
    raw = from_folder(raw, (*RunConfig.paths, "model.config", "deepspeed"), folder, where)
    if not isinstance(raw, dict):
        return raw

    def content(key: str, file: str) -> Any:
        try:
            return read_json(Path(file))
        except ConfigError as error:
            raise ConfigError(f"{where}: {key}: {error}") from None

    model, block = raw.get("model"), raw.get("deepspeed")
    if isinstance(model, dict) and isinstance(model.get("config"), str):
        raw = {**raw, "model": {**model, "config": content("model.config", model["config"])}}
    if isinstance(block, str):
        block = content("deepspeed", block)
        if isinstance(block, dict):
            block = {key: value for key, value in block.items() if key != SCHEMA}
        raw = {**raw, "deepspeed": block}
    return raw


def _put(raw: Any, change: str) -> None:
    """Set a key in parsed JSON: "outer.local_steps=64". Objects on the way are made; a list's items go by their
    number. Raises ConfigError."""
    key, equals, text = change.partition("=")
    *way, last = key.split(".")
    if not equals or not all((*way, last)):
        raise ConfigError(f"--set {change}: write KEY=VALUE, as in outer.local_steps=64")
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text
    place: Any = raw
    try:
        for part in way:
            place = place[int(part)] if isinstance(place, list) else place.setdefault(part, {})
        place[int(last) if isinstance(place, list) else last] = value
    except (TypeError, AttributeError, ValueError, IndexError):
        raise ConfigError(f"--set {change}: the run file has nothing with such parts") from None
