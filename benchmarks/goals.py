"""Goals of the benchmarks: the goal of each figure, and how long each benchmark may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """metric: its place in the benchmark's JSON, keys joined by dots. least, most: the goal; neither: none is set.
    timed: others' use of the processors changes it. not_quick: why a short form does not give it, or ""."""

    metric: str
    least: float | None = None
    most: float | None = None
    timed: bool = True
    not_quick: str = ""

    def __str__(self) -> str:
        if self.least is None and self.most is None:
            return "–"
        if self.least is not None and self.most is not None:
            return f"{self.least:g} to {self.most:g}"
        return f"≥ {self.least:g}" if self.least is not None else f"≤ {self.most:g}"

    def met(self, value: float) -> bool:
        """Only of a goal that is set."""
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


@dataclass(frozen=True)
class Part:
    """One run of a benchmark. module: inside `package`. arguments: in either form; whole: where it is not --quick.
    minutes: kept for it; it may take what others leave, too, and is ended then. recorded: its name in results.csv,
    where it is not the module's. quick: whether it has a short form. tested: the test that plays what the short form
    shows, and more; so nobody needs both."""

    module: str
    goals: tuple[Goal, ...]
    arguments: tuple[str, ...] = ()
    minutes: float = 1.0
    recorded: str = ""
    quick: bool = True
    whole: tuple[str, ...] = ()
    tested: str = ""
    package: str = "benchmarks"

    @property
    def name(self) -> str:
        return self.recorded or self.module


def zero(*metrics: str) -> tuple[Goal, ...]:
    return tuple(Goal(metric, most=0, timed=False) for metric in metrics)


SAFE = (
    *zero("lost_acknowledged", "applied_twice", "replay_mismatches", "samples_skipped"),
    *zero("samples_twice_uncounted", "hung", "servers_ended", "ended_badly"),
)
CHAOS, STUDIES = "tests.chaos", "benchmarks.studies"
HEALED = "tests/launch/test_healing.py loses hosts"
RIVALS = "left out: rivals take long to install"
# What takes hours (confirm) is run by hand, and reads kept rows. Where a benchmark by itself may take ten
# minutes, this takes a shorter form, so that all end within 75.
PARTS = (
    Part("overhead", (Goal("throughput_ratio", least=0.95),), minutes=1.5),
    Part("overhead", (Goal("throughput_ratio", least=0.95),), ("--own-loop",), 1.5, "overhead_own_loop"),
    Part(
        "throughput",
        (
            Goal("dense_vs_torch", least=1),
            Goal("moe_vs_torch", least=1),
            Goal("hidden_communication", least=0.8),
        ),
        minutes=3.5,
    ),
    Part("monitoring", (Goal("overhead_ratio"),), minutes=2.5, whole=("--pairs", "12")),
    Part(
        "servers",
        (
            Goal("region_bytes_per_parameter", most=20),
            Goal("global_bytes_per_parameter", most=13),
            Goal("update_vs_memcpy", most=12),
            Goal("stall_at_snapshot", most=1.5),
            Goal("simulated_over_measured", least=0.8, most=1.25),
            Goal("encrypted.simulated_over_measured", least=0.8, most=1.25),
            Goal("small.simulated_over_measured", least=0.8, most=1.25),
            Goal("members_200_over_1", most=1.1, not_quick="of 8 members"),
            Goal("recovery_s_per_gb"),
            Goal("bitwise_equal_over_shards", least=1, timed=False),
            Goal("mirrors.disk.bytes_per_parameter", most=16),
            Goal("shards.1.parameters_per_s"),
            Goal("shards.2.parameters_per_s"),
        ),
        minutes=6.0,
        whole=("--parameters", "3e8", "--rounds", "3", "--shards", "1", "2"),
    ),
    Part(
        "exchange",
        (Goal("worker_ns_per_parameter"), Goal("growth")),
        minutes=3.0,
        whole=("--sizes", "1e6", "1e7", "1e8"),
    ),
    Part("snapshots", (Goal("memory_share"), Goal("stall_of_state_share")), minutes=2.0),
    Part(
        "codec",
        (Goal("int4.encode_vs_memcpy"), Goal("int4.decode_vs_memcpy"), Goal("topk2.encode_vs_memcpy")),
        minutes=2.0,
    ),
    Part("kernels", (Goal("outer_update.vs_memcpy"), Goal("merge.vs_memcpy"), Goal("adam_step.vs_memcpy"))),
    Part(
        "hide",
        (
            Goal("share_of_bound", least=0.95),
            Goal("speedup_over_overlapped_zero1.at_1", least=1.8),
            Goal("speedup_over_overlapped_zero1.at_2", least=2.0),
            Goal("bytes_over_least", most=1.05),
        ),
        ("--ranks", "2", "--ratios", "1", "2", "--ways", "zero1", "deepspeed", "delayed_8_4"),
        minutes=3.0,
    ),
    Part(
        "streaming",
        (
            Goal("streaming_overlap_4bit.exposed_share"),
            Goal("streaming_overlap_4bit.processor_ratio"),
            Goal("streaming_overlap_4bit.loss_gap"),
        ),
        minutes=6.0,
        whole=("--seeds", "1"),
    ),
    Part(
        "rivals",
        (
            Goal("ours-streaming.slow_link.utilization", least=0.95),
            Goal("ours.slow_link.utilization", least=0.95),
            Goal("same_algorithm_loss_ratio", most=1.002, not_quick=RIVALS),
            Goal("best_over_best_rival_loss", most=1.0, not_quick=RIVALS),
        ),
        minutes=6.0,
        whole=("--minutes", "5", "--faults"),  # no fault
    ),
    Part(
        "planner",
        (Goal("random_matrices.worst_over_annealing", most=1),),
        minutes=5.0,
        whole=("--only", "random"),
    ),
    Part("scale", (Goal("h32.utilization"),), minutes=3.0, whole=("--local-steps", "32")),
    Part("triton_aot", zero("spilled", "shared"), minutes=3.5),
    Part(
        "trace",
        (Goal("largest_difference", most=1e-9, timed=False), *zero("not_linear")),
        minutes=1.5,
        tested="tests/inner/test_trace.py",
    ),
    Part(
        "heal",
        (
            Goal("lost_host_s", most=60, not_quick=HEALED),
            Goal("jobs_lost", most=1, timed=False, not_quick=HEALED),
            *(Goal(f"overhead_{of}", most=0.003) for of in ("verifying", "watching", "copies")),
            Goal("ettr", least=0.97, timed=False),
        ),
        minutes=3.5,
    ),
    Part("fuzz", zero("crashes", "state_changes", "unclear_errors"), minutes=1.5, package=CHAOS),
    Part(
        "crash_points",
        zero("broken"),
        minutes=3.0,
        whole=("--seconds", "150"),
        tested="tests/chaos/crash_points/test_crash_points.py",
        package=CHAOS,
    ),
    Part(
        "faults",
        (
            *SAFE,
            Goal("kills", least=10, timed=False),
        ),
        minutes=6.0,
        tested="tests/chaos/faults/test_faults.py",
        package=CHAOS,
    ),
    Part(
        "faults",
        (
            *SAFE,
            Goal("kinds.kill shard", least=3, timed=False),
        ),
        ("--shards", "2"),
        6.0,
        "faults_shards",
        package=CHAOS,
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
        minutes=3.0,  # and what is left: rows that are not kept, as of another Python's text, are run and kept
        whole=("--results", "benchmarks/data/claims_rows.jsonl"),
        quick=False,
        package=STUDIES,
    ),
)
