"""The `data` block of the run file: which token files a run reads, in which shares, and how."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from geotrain.config.block import Block, NonNegativeInt, PositiveFloat, PositiveInt

MOST_SETS = 1024

Share = Annotated[float, Field(ge=0)]


class DataSet(Block):
    """One of the data sets that a run mixes."""

    prefix: str = Field(
        description="Prefix of its .bin/.idx pair: a path or a URL (s3://…, hf://…, any of fsspec's)."
    )
    weight: PositiveFloat | None = Field(
        None, description="Share of the samples, relative to the others'; null: 1. Not with data.curriculum."
    )


class Phase(Block):
    """A part of the run in which the data sets have certain weights."""

    until: Annotated[float, Field(gt=0, le=1)] = Field(description="Share of data.train_samples at which it ends.")
    weights: Annotated[tuple[Share, ...], Field(min_length=1)] = Field(
        description="Weights of the data sets, in the order of data.train; 0: none of it in this phase."
    )


def _as_sets(raw: Any) -> Any:
    return [{"prefix": raw}] if isinstance(raw, str) else raw


DataSets = Annotated[
    tuple[DataSet, ...],
    Field(max_length=MOST_SETS, strict=False),  # behind a function, JSON's list is no longer known as one
    BeforeValidator(_as_sets, json_schema_input_type=str | tuple[DataSet, ...]),
]


class DataConfig(Block):
    train: DataSets = Field(
        (),
        description="Prefix of the training .bin/.idx pair written by `geotrain prepare`, a path or a URL; or a list "
        "of data sets, each with `prefix` and `weight`; a loop of your own may bring its own data.",
    )
    curriculum: tuple[Phase, ...] | None = Field(
        None, description="Weights that change in the course of the run; the last phase ends at 1."
    )
    sha256: str | None = Field(
        None,
        description="Digest of the training .bin, as its manifest states it (of several sets: of their digests): who "
        "trains on other data is refused. Without it, `launch` takes that of the data on its machine; where there is "
        "none, the first to join decides.",
    )
    validation: str | None = Field(None, description="Prefix of the validation .bin/.idx pair.")
    tokenizer: str | None = Field(None, description="Folder with the tokenizer; copied into exports.")
    sequence_length: PositiveInt = Field(
        1, description="Tokens of a sample; with data of your own, what is counted as such."
    )
    train_samples: PositiveInt = Field(description="Samples (sequences) after which the run is finished.")
    skip: tuple[tuple[NonNegativeInt, NonNegativeInt], ...] = Field(
        (),
        description="Ranges [first, last] of the run's samples that nobody trains, such as those that a SetAside "
        "event names; whole steps are left out. May change at a resume.",
    )
    samples_per_step: PositiveInt | None = Field(
        None,
        description="Samples of a worker's inner step, for a loop of your own; null: deepspeed.train_batch_size.",
    )
    rampup_batch_size: tuple[PositiveInt, PositiveInt, PositiveInt] | None = Field(
        None,
        description="[start, increment, samples], as Megatron's --rampup-batch-size: the batch of a step begins at "
        "start and grows by increment to the whole one within so many samples. The rate then goes by samples.",
    )
    validation_samples: PositiveInt = 64
    cache_folder: str | None = Field(
        None, description="Folder for blocks of remote data sets on each machine; default: ~/.cache/geotrain."
    )
    cache_gb: PositiveFloat = Field(
        10.0, description="Size of that cache, in 10⁹ bytes: best above that of the data, which is then fetched once."
    )
    attention: Literal["sample", "document"] = Field(
        "sample",
        description="Reach of attention: back to the beginning of its sample, into which documents are packed, or "
        "of its document.",
    )

    @model_validator(mode="after")
    def _skips_samples_of_the_run(self) -> DataConfig:
        for first, last in self.skip:
            if not first <= last < self.train_samples:
                raise ValueError(
                    f"skip: [{first}, {last}] is no range of samples: state [first, last], both below "
                    f"train_samples = {self.train_samples}"
                )
        return self

    @model_validator(mode="after")
    def _weights_are_stated_once(self) -> DataConfig:
        prefixes = [each.prefix for each in self.train]
        if twice := {prefix for prefix in prefixes if prefixes.count(prefix) > 1}:
            raise ValueError(f"train names {min(twice)!r} twice; name it once, with a larger weight")
        if self.curriculum is None:
            return self
        if any(each.weight is not None for each in self.train):
            raise ValueError("curriculum gives the weights of all phases: leave out the `weight` of each data set")
        last = 0.0
        for number, phase in enumerate(self.curriculum):
            if len(phase.weights) != len(self.train) or not any(phase.weights):
                raise ValueError(
                    f"curriculum.{number}.weights = {list(phase.weights)} must be a weight for each of the "
                    f"{len(self.train)} data sets in train, not all of them 0"
                )
            if phase.until <= last:
                raise ValueError(f"curriculum.{number}.until = {phase.until} must be above {last}, where it begins")
            last = phase.until
        if last != 1:
            raise ValueError("curriculum: the last phase's `until` must be 1, the end of the run")
        return self

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Prefixes of all that is read: the training sets, and the validation set where there is one."""
        return (*(each.prefix for each in self.train), *((self.validation,) if self.validation else ()))

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The curriculum; without one, a single phase."""
        weights = tuple(1.0 if each.weight is None else each.weight for each in self.train)
        return self.curriculum or (Phase(until=1.0, weights=weights),)
