"""What a server refuses: norms far above the usual, versions that never were, data that differs; and quarantine."""

from __future__ import annotations

import dataclasses
import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geotrain.config import LimitsConfig, codec_config
from geotrain.kernels.payload_format import FORMATS
from geotrain.outer.codec import CodecError, make_codec
from geotrain.outer.messages import Lease, LeaseRequest, Refused
from geotrain.outer.server.limits import LEAST_DEVIATION, MEMORY, MOST_MEMORY, NORMAL, PEAK, NormLimits, norm
from tests.support.outer_world import FakeWorker, World, config, flat, halves, make, random_deltas, whole

sizes = st.floats(1e-6, 1e6)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("numel", [0, 1, 5, 4096, 4097, 10 * 4096 + 17])
def test_a_norm_is_exact_and_knows_no_threads(name, numel):
    """It is that of what was decoded, from the pass that decodes."""
    codec = make_codec(codec_config(name))
    payload = codec.encode(torch.randn(numel, generator=torch.Generator().manual_seed(numel))).payload
    before, found = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            decoded = torch.full((numel,), 7.0)
            found.add(norm([codec.decode_measured(payload, decoded)]))
            assert torch.equal(decoded, codec.decode(payload, numel))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1
    assert found.pop() == pytest.approx(math.sqrt(math.fsum(x * x for x in decoded.tolist())), rel=1e-15)


def test_a_norm_of_parts_is_that_of_the_whole():
    x, codec = torch.randn(1000), make_codec(codec_config("fp32"))
    parts = [codec.decode_measured(codec.encode(part).payload, torch.empty(len(part))) for part in x.split(300)]
    assert norm(parts) == pytest.approx(float(x.double().norm()), rel=1e-12)


def test_a_norm_beyond_all_numbers_is_infinite():
    payload, codec = torch.full((10,), 3e38).view(torch.uint8), make_codec(codec_config("fp32"))
    assert norm([codec.decode_measured(payload, torch.empty(10))]) == math.inf


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_measured_is_checked(name, bad):
    codec, x = make_codec(codec_config(name)), torch.ones(300)
    payload = codec.encode(x).payload
    payload[:4] = torch.tensor([bad]).view(torch.uint8) if name in ("fp32", "topk2") else 255
    with pytest.raises(CodecError, match=f"{name} payload of 300 elements holds values that are not finite; refused"):
        codec.decode_measured(payload, torch.empty(300))
    with pytest.raises(CodecError, match=f"{name} payload of 300 elements must be"):
        codec.decode_measured(payload[:-1], torch.empty(300))


@given(st.lists(st.tuples(sizes, st.integers(1, 40)), min_size=1, max_size=100), st.integers(1, 20))
def test_norms_are_judged_as_the_median_says(updates, free):
    """Against a plain reference: an update passes while the usual is being learned, or when either its norm or its
    norm over its weight is within so many deviations of the medians of the last accepted ones, or within twice their
    largest. Saved and loaded between any two, the decisions are the same."""
    limits_config = LimitsConfig(norm_deviations=4.0, norm_free_updates=free)
    limits, accepted = NormLimits(limits_config, 1, 1), list[tuple[float, float]]()
    for size, weight in updates:
        values = math.log(size), math.log(size / weight)
        usual = False
        for kept, value in zip(zip(*accepted[-MEMORY:], strict=True), values, strict=False):
            centre = statistics.median(kept)
            deviation = NORMAL * statistics.median([abs(k - centre) for k in kept])
            usual |= value <= centre + 4.0 * max(deviation, LEAST_DEVIATION) + 1e-9
            usual |= value <= max(kept) + math.log(PEAK) + 1e-9
        fresh = NormLimits(limits_config, 1, 1)
        fresh.load(limits.state())
        limits = fresh
        try:
            limits.check("a", 0, size, weight)
        except Refused:
            assert len(accepted) >= free and not usual
        else:
            assert len(accepted) < free or usual
            limits.note("a", 0, size, weight)
            accepted.append(values)


@pytest.mark.parametrize("regions", [1, 4, 12])
def test_the_kicks_of_delayed_momentum_are_usual(regions):
    """At every N-th arrival a region's weights move by its momentum, many times as far as by one delta; and that
    stays so when the learning rate has ended and deltas are tiny."""
    limits = NormLimits(LimitsConfig(), 1, regions)
    for turn in range(400):
        for _ in range(regions):
            kick = 1.6 * 0.9 ** (turn // 8) if turn % 8 == 7 else 0.0
            size = 1e-5 + 0.2 * math.exp(-turn / 40) + kick
            limits.check("r", 0, size, 2)
            limits.note("r", 0, size, 2)
    with pytest.raises(Refused):
        limits.check("r", 0, 100.0, 2)


def learned(**limits: object) -> World:
    """A world whose servers know what is usual."""
    world = make(config(updates_per_send=1, limits=LimitsConfig(norm_free_updates=4, **limits)), cut_a=halves)
    for turn in range(5):
        for name in ("a", "b"):
            world.push(name, random_deltas(world, 10 * turn + ord(name)))
        for region in world.regions:
            while sent := world.deliver_up(region):
                world.deliver_down(region, sent)
    return world


def test_a_region_that_was_cut_off_may_bring_much():
    """Sixty times the usual, for it stands for sixty times as many updates; for one worker that is too much, and for
    sixty that have got no data, too."""
    world = learned()
    region = world.regions["eu"]
    deltas = {f: 60 * d for f, d in random_deltas(world, 5).items()}
    [(_, worker)] = [world.workers["b"]]
    parts = [dataclasses.replace(p, member="eu", sequence=world.top.members["eu"].fragments[0].sequence + 1)
             for p in worker.parts(deltas)]  # fmt: skip
    with pytest.raises(Refused, match="far out of the ordinary"):
        world.top.handle(dataclasses.replace(parts[0], incarnation=region.incarnation))
    many = dataclasses.replace(parts[0], incarnation=region.incarnation, weight=60)
    with pytest.raises(Refused, match="far out of the ordinary"):
        world.top.handle(many)
    for job in range(1, 61):
        assert isinstance(world.top.handle(LeaseRequest("a", job)).reply, Lease)
    assert world.top.handle(many).reply


class Looked(dict):
    """A table that counts how often an entry is looked at."""

    count = 0

    def __getitem__(self, key):
        self.count += 1
        return super().__getitem__(key)

    def _all(self):
        for key in dict.__iter__(self):
            self.count += 1
            yield key, super().__getitem__(key)

    items = _all

    def values(self):
        return (value for _, value in self._all())

    def __iter__(self):
        return (key for key, _ in self._all())


def test_an_update_looks_at_as_many_members_however_many_have_joined():
    looked, remembered = [], []
    for members in (1, 200):
        names = tuple(f"w{i}" for i in range(members))
        top = flat(workers=names)
        worker = FakeWorker("w0", top.parameter_map, whole(top.parameter_map))
        top.members = Looked(top.members)
        for _ in range(MOST_MEMORY):  # what it has sent is all that is remembered
            [part] = worker.parts({f.index: torch.ones(f.numel) for f in top.parameter_map.fragments})
            top.members.count = 0
            assert top.handle(part).reply
        looked.append(top.members.count)
        remembered.append(len(top.intake.norms.state()[0][0]))
    assert looked[0] == looked[1] > 0
    assert remembered == [MEMORY, MOST_MEMORY]  # of 200 members, 200 times as many would be sorted for each update


def test_limits_can_be_switched_off():
    world = make(config(limits=LimitsConfig(norm_deviations=None)))
    for turn in range(40):
        world.push("a", random_deltas(world, turn))
    assert world.push("a", {f: 1e4 * delta for f, delta in random_deltas(world, 77).items()}) is not None
    assert world.regions["eu"].state()[1]["norms"] is None
