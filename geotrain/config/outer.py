"""The run file's `outer` block: the rule of the outer loop, the codecs of its links, how answers are adopted.

Rules and codecs are unions distinguished by `name`: each has only the settings that mean something to it, so that a
setting without effect is an error and not a surprise.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import ConfigDict, Field, TypeAdapter, WrapSerializer, WrapValidator, model_validator

from geotrain.config.block import Block, Fraction, NonNegativeInt, PositiveFloat, PositiveInt
from geotrain.config.plugins import AsyncConfig, PluggedCodec, PluggedRule, or_plugged, serialize


class MomentumConfig(Block):
    """Delayed Nesterov at a server (arXiv 2506.04531): every `buffer`-th update moves the momentum."""

    lr_per_update: PositiveFloat
    beta: Fraction
    buffer: PositiveInt


class SyncConfig(Block):
    """DiLoCo (arXiv 2311.08105): all wait for the slowest, then Nesterov on the mean of their deltas."""

    synchronous: ClassVar[bool] = True
    updates_per_send: ClassVar[None] = None  # a region sends up when each of its workers has sent

    name: Literal["sync"]
    lr: PositiveFloat = Field(0.7, description="The outer Nesterov learning rate.")
    momentum: Fraction = Field(0.9, description="The outer Nesterov momentum.")


class HalosConfig(AsyncConfig):
    """HALoS (arXiv 2506.04531): delayed Nesterov in the regions and at the top."""

    name: Literal["halos"]
    ledger: bool = Field(True, description="Keep what was committed while an update travelled.")
    region: MomentumConfig = MomentumConfig(lr_per_update=0.2, beta=0.9, buffer=16)
    global_: MomentumConfig = Field(MomentumConfig(lr_per_update=0.15, beta=0.5, buffer=2), alias="global")

    model_config = ConfigDict(populate_by_name=True)


SHORT_RUN = 128  # jobs of a worker: with fewer, news of the others that come a job later are dear


class RegionMomentumConfig(AsyncConfig):
    """Momentum in the region, where no wide-area delay is in its loop; plain averaging at the top."""

    name: Literal["region_momentum"]
    gain: Annotated[float, Field(ge=0)] = Field(
        1.0,
        description="c: weight of the momentum beside the delta; less in runs so short that the "
        "momentum averages over fewer than 20 updates, or 7 where answers wait.",
    )
    momentum_share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.1, description="Share of the run that the momentum averages over; the decay per update follows from it."
    )
    answers: Literal["auto", "at_once", "merged", "wait"] = Field(
        "auto",
        description="What a worker's delta is answered with: at_once, the region's weights; merged, the global ones "
        "when they are there (K is not used, α is 1); wait, these, which wait for the deltas of all who are at work, "
        "as long as the answer still comes within `overlap.steps`, and whose jobs have lengths with which they end "
        "together. auto: wait, with `overlap.late` = continue and where a worker has fewer than 128 jobs in the run, "
        "unless `merge_alpha` or `updates_per_send` say otherwise.",
    )


RuleConfig: TypeAlias = Annotated[
    Annotated[SyncConfig | HalosConfig | RegionMomentumConfig, Field(discriminator="name")],
    WrapValidator(or_plugged("geotrain.rules", PluggedRule)),
    WrapSerializer(serialize),
]


_RULES = TypeAdapter[RuleConfig](RuleConfig)


def rule_config(name: str, **settings: Any) -> RuleConfig:
    """Make the settings of the rule of that name. Raises pydantic's ValidationError."""
    return _RULES.validate_python({"name": name, **settings})


class Fp32Config(Block):
    """Codec of plain 32-bit floats: every bit travels."""

    name: Literal["fp32"]


class Bf16Config(Block):
    """16-bit floats."""

    name: Literal["bf16"]


class _BlockwiseConfig(Block):
    """A codec that leaves out a part of a delta, which is always kept, and added to the next one."""

    block: Literal[32, 64, 128, 256, 512, 1024, 2048, 4096] = Field(128, description="Elements that share a scale.")


class QuantizedConfig(_BlockwiseConfig):
    """Integers or small floats of 8 or 4 bits."""

    name: Literal["int8", "int4", "e3m0"]


class TopkConfig(_BlockwiseConfig):
    """The largest elements of each block, 2 bits each."""

    name: Literal["topk2"]
    density: Annotated[float, Field(gt=0, le=1)] = Field(0.1, description="Share of elements sent.")


CodecConfig: TypeAlias = Annotated[
    Annotated[Fp32Config | Bf16Config | QuantizedConfig | TopkConfig, Field(discriminator="name")],
    WrapValidator(or_plugged("geotrain.codecs", PluggedCodec)),
    WrapSerializer(serialize),
]


_CODECS = TypeAdapter[CodecConfig](CodecConfig)  # made once: that takes longer than a simulated message


def codec_config(name: str, **settings: Any) -> CodecConfig:
    """Make the settings of the codec of that name. Raises pydantic's ValidationError."""
    return _CODECS.validate_python({"name": name, **settings})


class FragmentConfig(Block):
    """Groups of layers for streaming (arXiv 2501.18512). One fragment means everything at once."""

    layers_per_fragment: PositiveInt | None = Field(None, description="None: the whole model is one fragment.")
    pieces: PositiveInt = Field(
        1, description="Cuts each into so many fragments of one schedule, so that several shards of a server share "
        "its work; a shard has whole fragments."
    )  # fmt: skip
    chunk_elements: Annotated[int, Field(ge=4096, le=1 << 27, multiple_of=4096)] = Field(
        1 << 27, description="Fragments are coded, sent and stored in chunks of so many elements."
    )


class OverlapConfig(Block):
    """Training while an answer travels, and how the answer is then adopted."""

    steps: NonNegativeInt = Field(0, description="τ: inner steps until adoption; 0 waits at once.")
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
        if self.adopt != "mix" and self.differing("mix"):
            raise ValueError(
                f"mix = {self.mix} does nothing with adopt = {self.adopt!r}; leave it out, or adopt 'mix'"
            )
        return self


class LimitsConfig(Block):
    """Limits of what a server accepts, and of refusals before it quarantines a member."""

    norm_deviations: PositiveFloat | None = Field(
        8.0, description="An update whose norm is so many deviations above the usual is refused; null: none is."
    )
    norm_free_updates: PositiveInt = Field(16, description="Updates a member to learn the usual from; at most 512.")
    strikes: PositiveInt = Field(3, description="Refused updates among its last ones that quarantine a member.")
    strike_window: PositiveInt = Field(64, description="A member's last ones: so many.")
    quarantine_s: PositiveFloat = Field(600.0, description="A quarantined member may start anew after this time.")


class OuterConfig(Block):
    """The outer loop. Each baseline is a setting of this block."""

    rule: RuleConfig = Field(RegionMomentumConfig(name="region_momentum"), description="docs/algorithms.md")
    levels: Literal[1, 2] = Field(2, description="2: workers → region server → global server; 1: workers → global.")
    local_steps: int = Field(8, ge=1, le=100_000, description="H: inner steps between deltas, at speed 1.")
    scale_local_steps: bool = Field(False, description="DyLU: slower workers take fewer steps, H·speed.")
    lease_reserve: NonNegativeInt | Literal["auto"] = Field(
        "auto",
        description="Jobs of a worker whose data a region keeps for a cut; auto: a minute's, at most 1/50 of all.",
    )
    up: CodecConfig = Field(
        Bf16Config(name="bf16"), description="Codec of what goes to the global server; its loss goes with the next."
    )
    down: CodecConfig = Field(
        Bf16Config(name="bf16"), description="Codec of what comes from it; its loss stays in the next change."
    )
    local: CodecConfig = Field(Fp32Config(name="fp32"), description="Codec between workers and region server.")
    fragments: FragmentConfig = FragmentConfig()
    overlap: OverlapConfig = OverlapConfig()
    limits: LimitsConfig = LimitsConfig()
    rollbacks_per_hour: NonNegativeInt = Field(
        0, description="At loss spikes the launcher takes the run back so often, then pauses it; 0: does nothing."
    )
    state_device: Literal["auto", "device", "host"] = Field(
        "auto",
        description="Place of ranks' anchors and residuals, 8 to 16 bytes for each parameter they own: on the GPU, "
        "or on the host, to which masters cross for each delta while training waits. auto: where the masters are.",
    )

    server_state: Literal["fp32", "bf16"] = Field(
        "fp32", description="Momenta and residuals of servers between updates; bf16: half their memory."
    )
    mirrors: Literal["memory", "disk"] = Field(
        "memory", description="Place of servers' mirrors of what was sent as changes, 4 bytes a parameter each."
    )

    @property
    def flat(self) -> bool:
        """Whether workers speak to the global server themselves, without region servers between."""
        return self.levels == 1

    @property
    def worker_codecs(self) -> tuple[CodecConfig, CodecConfig]:
        """Return (up, down), the codecs of the link between a worker and its server. Between regions and the global
        server they are always `up` and `down`."""
        return (self.up, self.down) if self.flat else (self.local, self.local)

    def answers(self, jobs: float) -> Literal["at_once", "merged", "wait"]:
        """What regions answer workers with, who have so many jobs in the run each, as `RegionMomentumConfig` says it.

        An answer at once says what the others did a job later. With H 32 that costs 1 % of the loss of five jobs with
        AdamW, nothing of twenty; with Muon 5 and 3 % (`benchmarks.studies.short`).
        """
        rule = self.rule
        if self.flat or not isinstance(rule, RegionMomentumConfig):
            return "at_once"
        if rule.answers == "auto":
            stated = rule.differing("merge_alpha") or (
                rule.updates_per_send > 1 and rule.differing("updates_per_send")
            )
            short = jobs < SHORT_RUN and self.overlap.late == "continue" and self.overlap.steps and not stated
            return "wait" if short else "at_once"
        return rule.answers

    @model_validator(mode="after")
    def _every_setting_does_something(self) -> OuterConfig:
        """Refuse settings that have no effect beside others.

        Defaults pass, since the file that a run writes into its folder states every setting.
        """
        rule, idle = self.rule, list[str]()
        # 0 is what there is where no region server could hold a reserve; studies state it.
        reserve = self.differing("lease_reserve") if self.lease_reserve else []
        if self.flat:
            of_regions = (
                "updates_per_send", "merge_alpha", "ledger", "region", "gain", "momentum_share", "answers",
            )  # fmt: skip
            idle = [
                *(f"rule.{key}" for key in rule.differing(*of_regions)),
                *self.differing("local"),
                *reserve,
                *(self.differing("server_state") if isinstance(rule, RegionMomentumConfig) else ()),
            ]
            why = "levels = 1, where workers speak to the global server and no region server stands between"
        elif rule.synchronous:
            idle, why = reserve, "rule 'sync', whose rounds are dealt with every worker there"
        elif isinstance(rule, RegionMomentumConfig) and rule.answers in ("merged", "wait"):
            idle = [f"rule.{key}" for key in rule.differing("updates_per_send", "merge_alpha")]
            why = f"rule.answers = {rule.answers!r}, where K does not decide when a region sends, and α is 1"
            if rule.answers == "wait" and not self.overlap.steps:
                raise ValueError(
                    "rule.answers = 'wait' needs overlap.steps > 0, the time in which answers wait; else use 'merged'"
                )
        if idle:
            raise ValueError(f"{', '.join(idle)}: without effect with {why}; leave out what does nothing")
        if self.differing("mirrors") and {self.down.name, self.local.name} <= {"fp32", "bf16"}:
            raise ValueError("mirrors: without effect where weights travel whole (fp32, bf16); leave it out")
        return self
