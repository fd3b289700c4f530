"""What the benchmarks are run for: the goal of each figure, and how long each benchmark may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """metric: its place in the benchmark's JSON, keys joined by dots. least, most: the goal; neither: none is set."""

    metric: str
    least: float | None = None
    most: float | None = None

    def __str__(self) -> str:
        if self.least is None and self.most is None:
            return "–"
        return f"≥ {self.least:g}" if self.least is not None else f"≤ {self.most:g}"

    def met(self, value: float) -> bool:
        """Only of a goal that is set."""
        return value >= self.least if self.least is not None else value <= (self.most or 0.0)


@dataclass(frozen=True)
class Part:
    """One run of a benchmark. module: in this package. arguments: beside --quick. minutes: it is ended after that.
    recorded: its name in results.csv, where it is not the module's. quick: whether it has a short form."""

    module: str
    goals: tuple[Goal, ...]
    arguments: tuple[str, ...] = ()
    minutes: float = 10.0
    recorded: str = ""
    quick: bool = True

    @property
    def name(self) -> str:
        return self.recorded or self.module


def zero(*metrics: str) -> tuple[Goal, ...]:
    return tuple(Goal(metric, most=0) for metric in metrics)


# What takes hours (confirm, delay, gap) is run by hand, and reads kept rows.
PARTS = (
    Part("overhead", (Goal("throughput_ratio", least=0.95),)),
    Part("overhead", (Goal("throughput_ratio", least=0.95),), ("--own-loop",), recorded="overhead_own_loop"),
    Part(
        "throughput",
        (
            Goal("dense_vs_torch", least=1),
            Goal("moe_vs_torch", least=1),
            Goal("hidden_communication", least=0.8),
        ),
    ),
    Part("monitoring", (Goal("overhead_ratio"),)),
    Part(
        "servers",
        (
            Goal("region_bytes_per_parameter", most=20),
            Goal("global_bytes_per_parameter", most=13),
            Goal("update_vs_memcpy", most=6),
            Goal("stall_at_snapshot", most=2),
            Goal("recovery_s_per_gb"),
            Goal("bitwise_equal_over_vaults", least=1),
            Goal("mirrors.disk.bytes_per_parameter", most=16),
            Goal("vaults.book_growth", most=1.2),
            Goal("vaults.1.parameters_per_s"),
            Goal("vaults.2.parameters_per_s"),
        ),
    ),
    Part("exchange", (Goal("worker_ns_per_parameter"), Goal("growth"))),
    Part("snapshots", (Goal("memory_share"), Goal("stall_of_state_share"))),
    Part("codec", (Goal("int4.encode_vs_memcpy"), Goal("int4.decode_vs_memcpy"), Goal("topk2.encode_vs_memcpy"))),
    Part("kernels", (Goal("outer_update.vs_memcpy"), Goal("merge.vs_memcpy"), Goal("adam_step.vs_memcpy"))),
    Part("optimizers", (Goal("llama-tiny.share_of_training"), Goal("llama-tiny.vs_bmm"))),
    Part(
        "acco",
        (Goal("speedup_over_zero1", least=1.5), Goal("bytes_per_step_vs_zero1", most=1.05)),
        ("--only", "time"),  # its losses take the better part of an hour
    ),
    Part(
        "streaming",
        (
            Goal("streaming_overlap_4bit.exposed_share"),
            Goal("streaming_overlap_4bit.processor_ratio"),
            Goal("streaming_overlap_4bit.loss_gap"),
        ),
    ),
    Part(
        "rivals",
        (
            Goal("ours-streaming.20_mbit.utilization", least=0.95),
            Goal("ours.20_mbit.utilization", least=0.95),
            Goal("same_algorithm_loss_ratio", most=1.002),
            Goal("best_over_best_rival_loss", most=1.0),
        ),
        minutes=20.0,  # with the rivals' environment, the first time
    ),
    Part(
        "planner",
        (
            Goal("prediction_error"),
            Goal("random_matrices.worst_over_annealing", most=1),
            Goal("random_matrices.median_gap", most=0.05),
        ),
    ),
    Part("agreement", (Goal("same_order", least=1),)),
    Part("scale", (Goal("h32.utilization"),)),
    Part("aot", zero("spilled", "shared", "scalar_loads", "offsets_32bit", "failed")),
    Part("trace", (Goal("largest_difference", most=0.04), *zero("not_linear"))),
    Part("bandwidth", (Goal("largest_steps_off_the_grid_points_published"),)),
    Part("fuzz", zero("crashes", "state_changes", "unclear_errors")),
    Part("crash_points", zero("broken")),
    Part(
        "faults",
        (
            *zero("lost_acknowledged", "applied_twice", "replay_mismatches", "samples_skipped"),
            *zero("samples_twice_uncounted", "hung", "servers_ended"),
            Goal("kills", least=10),
            Goal("goodput", least=0.95),
        ),
    ),
    Part(
        "faults",
        (
            *zero("lost_acknowledged", "applied_twice", "replay_mismatches", "samples_skipped"),
            *zero("samples_twice_uncounted", "hung", "servers_ended"),
            Goal("kinds.kill vault", least=3),
            Goal("goodput"),
        ),
        ("--vaults", "2"),
        recorded="faults_vaults",
    ),
    Part(
        "claims",
        (
            Goal("gap_to_data_parallel_same_optimizer.mean", most=0.025),
            Goal("gap_one_worker_a_region.mean", most=0.015),
            Goal("gap_to_adamw_data_parallel.mean", most=-0.03),
            Goal("speedup.ours_over_diloco.mean", least=10),
            Goal("speedup.ours_over_async_local_sgd.mean", least=2.1),
            Goal("speedup.ours_over_halos.mean", least=1.5),
            Goal("speedup.ours_over_fair_diloco.mean", least=1.3),
        ),
        minutes=30.0,
        quick=False,
    ),
)
