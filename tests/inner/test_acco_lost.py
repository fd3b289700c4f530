"""ACCO when a rank of the worker is lost."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

from geotrain.config import AccoConfig, ParallelConfig
from tests.support.inner_worlds import QWEN_2, deepspeed_block, masters, micro_batches, run_world, start, train

DEADLINE_S = 12.0  # also of the steps before, on a busy machine
WITHOUT_S = 400.0  # of a collective without a deadline: on a device, half an hour


def with_a_lost_rank(form: Any, collective: str, how: int, meets: bool) -> tuple[str, float, bool]:
    """Rank 1 is lost in its first such collective of a step's communication. meets: as on a device."""
    from geotrain.inner.acco import communication_thread
    from geotrain.inner.runtime.parallel import lost_rank

    acco = AccoConfig(form=form, synchronous_steps=1, timeout_s=DEADLINE_S)
    engine = start(QWEN_2, ParallelConfig(), deepspeed_block(1, micro=1), acco=acco)
    train(engine, range(3))
    before, thread = masters(engine), engine.optimizer.communication
    if meets:
        thread._meeting = thread._world  # of the same ranks
    if engine.rank == 1:
        setattr(thread, collective, lambda *_: os.kill(os.getpid(), how))
    elif meets:
        communication_thread.ds_comm.allgather_fn = lambda *_, **__: time.sleep(WITHOUT_S)
    begin = time.monotonic()
    with pytest.raises(communication_thread.AccoError) as error:
        engine.train_step(micro_batches(engine, 3), 3)
        engine.settle()
    took = time.monotonic() - begin
    with pytest.raises(communication_thread.AccoError):
        engine.train_step(micro_batches(engine, 4), 4)
    if how == signal.SIGKILL:  # beside ACCO, as in a collective of tensor parallelism
        with pytest.raises(RuntimeError) as plain:
            engine.agree(True)
        assert "a rank of this worker died" in (lost_rank(plain.value) or "")
    return str(error.value), took, torch.equal(before, torch.cat([shard.master for shard in engine.shards()]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "collective", "how", "meets", "lost", "whole"),
    [
        ("delayed", "exchange", signal.SIGKILL, False, "commit of step 4", 3),
        ("exact", "exchange", signal.SIGSTOP, False, "prediction of step 4", 3),
        ("delayed", "all_gather", signal.SIGSTOP, True, "commit of step 4", 4),  # the masters have moved by then
    ],
    ids=["dies", "hangs in a prediction", "hangs before the device's collective"],
)
def test_a_lost_rank_ends_the_others_in_time_with_the_last_commit_whole(
    form: str, collective: str, how: int, meets: bool, lost: str, whole: int
) -> None:
    message, took, intact = run_world(2, with_a_lost_rank, form, collective, how, meets, lost=[1])[0]
    assert f"rank 0: the {lost} failed" in message
    assert f"of step {whole}, which is whole" in message
    assert f"acco.timeout_s = {DEADLINE_S:g}" in message and "\n" not in message
    assert took < WITHOUT_S / 2
    assert intact == (whole == 3)
