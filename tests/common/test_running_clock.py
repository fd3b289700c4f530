"""A clock that stands still while its process is stopped."""

from __future__ import annotations

from geotrain.common.running_clock import RunningClock


def test_a_pause_counts_as_no_more_than_the_limit_whoever_reads_first() -> None:
    now_s = 100.0
    clock = RunningClock(2.0, lambda: now_s)
    for passed_s, counted_s in ((1.5, 1.5), (0.5, 0.5), (3600.0, 2.0), (0.0, 0.0), (1.0, 1.0)):
        before_s, now_s = clock(), now_s + passed_s
        assert clock() - before_s == counted_s
