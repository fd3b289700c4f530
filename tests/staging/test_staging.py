"""The exchange's stream and buffers: order and reuse with a stand-in for CUDA, and the real thing on a GPU."""

from __future__ import annotations

import threading

import pytest
import torch

from geotrain.config import OuterConfig, OverlapConfig, codec_config
from geotrain.outer.codec import CodecError, NonFiniteError, make_codec
from geotrain.outer.downlink import WeightsSender
from geotrain.outer.messages import ChunkDelta, ChunkWeights
from geotrain.outer.worker import OwnedSlices, WorkerRank
from geotrain.parameters.parameter_map import StridedSlice
from geotrain.staging import cuda as cuda_staging
from geotrain.staging.cuda import CudaStaging, HostStaging, staging_for
from geotrain.staging.interface import Staging, SynchronousStaging, to_bytes
from tests.support.cuda_stand_in import Cuda
from tests.support.outer_world import parameter_map

CPU = torch.device("cpu")
CODECS = ("fp32", "bf16", "int4", "topk2")


def rank(staging: Staging, codec: str = "int8") -> tuple[WorkerRank, torch.Tensor]:
    matrix = torch.zeros(16, device=staging.device)
    config = OuterConfig(local=codec_config(codec), overlap=OverlapConfig(steps=1, adopt="rebase"))
    chunks = [OwnedSlices((StridedSlice(0, 16, parameter="layer.0"),), matrix, True)]
    return WorkerRank(parameter_map(), config, chunks, staging), matrix


def whole(value: float, codec: str = "int8") -> ChunkWeights:
    """As a server sends them whose codec is this: a coarse one carries changes only, so that these are fp32."""
    plain = make_codec(codec_config("bf16" if codec == "bf16" else "fp32"))
    return ChunkWeights(0, 1, to_bytes(plain.encode(torch.full((16,), value)).payload))


def test_a_buffer_is_allocated_once_and_not_touched_while_a_copy_uses_it():
    cuda = Cuda(late=True)
    staging = CudaStaging(CPU, cuda)
    first = staging.bring(0, b"abc", lambda host: None)
    cuda.late = False
    other = threading.Thread(target=lambda: staging.bring(1, b"xyz", lambda host: None), name="other")
    other.start()
    other.join(60)  # another fragment's has nothing to wait for
    assert not other.is_alive()
    again: list[torch.Tensor] = []
    next_ = threading.Thread(target=lambda: again.append(staging.bring(0, b"de", lambda host: None)))
    next_.start()
    assert cuda.events[0].waited_for.wait(60)
    assert bytes(first.numpy()) == b"abc"
    cuda.events[0].happened.set()
    next_.join(60)
    assert bytes(again[0].numpy()) == b"de"
    assert again[0].data_ptr() == first.data_ptr()


def test_what_is_fetched_is_not_overwritten_before_it_was_read():
    cuda = Cuda()
    staging = CudaStaging(CPU, cuda)
    finite = torch.tensor(True)
    made = [torch.full((4,), i, dtype=torch.uint8) for i in range(9)]
    fetched = [
        staging.fetch(0, lambda payload=payload: (payload, finite), lambda b, ok: (b, ok))[0] for payload in made
    ]
    assert [f.result() for f in fetched] == [(bytes([i] * 4), True) for i in range(9)]


def test_a_buffer_is_used_again_after_its_first_payload_was_refused():
    staging = CudaStaging(CPU, Cuda())
    for _ in range(2):
        with pytest.raises(ValueError, match="too bad"):
            staging.bring(0, b"abc", check=refuse)
    assert bytes(staging.bring(0, b"abc", lambda host: None).numpy()) == b"abc"


def test_a_rank_that_holds_nothing_of_a_fragment_adopts_it_on_its_device(monkeypatch):
    """Devices do not mix, also where there is no element: "meta" stands for the GPU."""
    meta = torch.device("meta")
    chunks = [OwnedSlices((StridedSlice(0, 16, parameter="layer.0"),), torch.zeros(16, device=meta), True)]
    for overlap in (OverlapConfig(steps=1, adopt="mix"), OverlapConfig(steps=1, adopt="rebase")):
        worker = WorkerRank(parameter_map(1), OuterConfig(local=codec_config("fp32"), overlap=overlap), chunks)
        monkeypatch.setattr(worker.downlink, "decode", lambda *_: torch.empty(0, device=meta))  # as it arrives
        empty = next(i for i, holds in enumerate(worker.holds) if not holds)
        for start in (True, False):
            worker.on_weights(ChunkWeights(empty, 1, b""), start)
        assert {shard.anchor.device for shard in worker.shards} == {meta}


@pytest.mark.parametrize("codec", CODECS)
def test_without_a_gpu_everything_happens_at_once(codec):
    worker, matrix = rank(SynchronousStaging(CPU), codec)
    worker.on_weights(whole(1.0, codec), start=True)
    matrix.add_(1.0)
    delta = worker.make_delta(0, seed=1)
    assert delta.done() and worker.when_made(lambda: delta) is delta


@pytest.mark.parametrize("staging", [SynchronousStaging(CPU), CudaStaging(CPU, Cuda())], ids=["cpu", "streams"])
def test_a_parameter_that_is_not_finite_is_named(staging, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    worker, matrix = rank(staging)
    worker.on_weights(whole(1.0), start=True)
    matrix[3] = float("nan")
    with pytest.raises(NonFiniteError, match=r"parameter layer\.0: holds infinities or NaN"):
        worker.make_delta(0, seed=1).result()


@pytest.mark.parametrize("start", [True, False])
@pytest.mark.parametrize("state", ["cpu", "device", "host"])
def test_weights_that_are_not_finite_reach_no_master(state, start, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    worker, matrix = rank(staging_of(state))
    worker.on_weights(whole(1.0), start=True)
    before, bad = matrix.clone(), torch.ones(16)
    bad[5] = float("inf")
    with pytest.raises(CodecError, match="not finite"):
        worker.on_weights(ChunkWeights(0, 2, bad.numpy().tobytes()), start)
    assert torch.equal(matrix, before)


STATE = ("cpu", "device", "host")


def staging_of(state: str) -> Staging:
    if state == "host":
        return HostStaging(CPU, Cuda(), chunk=5)  # the masters are no multiple of it
    return CudaStaging(CPU, Cuda()) if state == "device" else SynchronousStaging(CPU)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("adopt", ["mix", "rebase"])
def test_where_the_state_lies_changes_no_bit(codec, adopt, monkeypatch):
    """Deltas, masters, anchors and residuals over several exchanges and an evaluation. Changes come down, too."""
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    wire, seen = codec_config(codec), []
    config = OuterConfig(levels=1, up=wire, down=wire, overlap=OverlapConfig(steps=1, adopt=adopt))
    swapped = ChunkWeights(0, 9, to_bytes(make_codec(codec_config("bf16")).encode(torch.full((16,), 9.0)).payload))
    for state in STATE:
        generator = torch.Generator().manual_seed(3)
        sender = WeightsSender(wire)
        masters = [torch.zeros(9), torch.zeros(7)]  # the second is another rank's to push
        runs = StridedSlice(0, 9, parameter="layer.0"), StridedSlice(9, 7, parameter="layer.0")
        chunks = [
            OwnedSlices((run,), master, i == 0) for i, (run, master) in enumerate(zip(runs, masters, strict=True))
        ]
        worker, trace = WorkerRank(parameter_map(), config, chunks, staging_of(state)), []
        worker.on_weights(sender.encode(0, 0, torch.randn(16, generator=generator)), start=True)
        for turn in range(1, 4):
            for master in masters:
                master.add_(torch.randn(len(master), generator=generator))
            delta = worker.make_delta(0, seed=turn)
            for master in masters:
                master.add_(torch.randn(len(master), generator=generator))  # on the way
            trace.append(delta.result())
            before = [master.clone() for master in masters]
            with worker.swapped_in([swapped]):
                assert all((master == 9).all() for master in masters)
            assert all(map(torch.equal, masters, before))
            worker.on_weights(sender.encode(0, turn, torch.randn(16, generator=generator)))
            residual = worker.shards[0].residual
            trace += [*map(torch.clone, masters), worker.shards[0].anchor.clone()]
            trace += [torch.zeros(0) if residual is None else residual.clone()]
        seen.append(trace)
    for other in seen[1:]:
        for mine, theirs in zip(seen[0], other, strict=True):
            assert mine == theirs if isinstance(mine, ChunkDelta) else torch.equal(mine, theirs)


def test_through_two_pinned_buffers_passes_any_model():
    staging = HostStaging(CPU, Cuda(), chunk=8)
    masters = [torch.arange(100.0), torch.arange(3.0)]
    vector = torch.empty(103)
    staging.read(masters, vector)
    assert torch.equal(vector, torch.cat(masters))
    staging.change(masters, torch._foreach_add_, vector)
    assert torch.equal(torch.cat(masters), 2 * vector)
    assert sum(buffer.values.numel() for buffer in staging._pinned) == 2 * 8


def test_which_staging_serves(monkeypatch):
    gpu, meta = torch.device("cuda"), torch.zeros(1, device="meta")
    made = []
    for kind in ("CudaStaging", "HostStaging"):
        monkeypatch.setattr(cuda_staging, kind, lambda device, kind=kind: made.append(kind))
    for state in ("auto", "device", "host"):
        assert isinstance(staging_for(state, CPU, [torch.zeros(1)]), SynchronousStaging)
    for state in ("auto", "device", "host"):
        staging_for(state, gpu, [meta])
    staging_for("auto", gpu, [torch.zeros(1)])  # the optimizer was offloaded
    assert made == ["CudaStaging", "CudaStaging", "HostStaging", "HostStaging"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("codec", CODECS)
def test_on_a_gpu_nothing_waits_for_the_training_stream(codec):
    """Whatever would make the host wait raises; the bits are those of the CPU."""
    device = torch.device("cuda")
    worker, matrix = rank(CudaStaging(device), codec)
    on_host, reference = rank(SynchronousStaging(CPU), codec)
    for each in (worker, on_host):  # kernels are compiled, buffers allocated
        each.on_weights(whole(1.0, codec), start=True)
        each.make_delta(0, seed=1).result()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for turn in range(3):
            torch.cuda._sleep(50_000_000)  # the device is far behind the host
            matrix.add_(0.5)
            reference.add_(0.5)
            delta = worker.make_delta(0, seed=turn)
            assert not delta.done()
            matrix.add_(0.25)
            reference.add_(0.0)
            expected = on_host.make_delta(0, seed=turn).result()
            reference.add_(0.25)
            worker.on_weights(whole(float(turn), codec))
            on_host.on_weights(whole(float(turn), codec))
            assert delta.result() == expected
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(matrix.cpu(), reference, rtol=0, atol=0)


def refuse(host: torch.Tensor) -> None:
    raise ValueError("too bad")
