"""What a server keeps of its fragments: chunks, momenta in bf16, memory, states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from geotrain.config import OuterConfig, codec_config, rule_config
from geotrain.net.storage.frozen_state import FrozenState
from geotrain.outer.codec import make_codec
from geotrain.outer.messages import ChunkDelta, Join, Refused, UpdatePart
from geotrain.outer.rules import Counts, Vectors
from geotrain.outer.rules.region_momentum import MomentumRegion
from geotrain.outer.rules.rule import Inputs
from geotrain.outer.server.store import Store
from geotrain.parameters.parameter_map import Parameter, ParameterMap, ParameterMapError
from geotrain.staging.interface import to_bytes
from tests.support.outer_world import World, config, halves, make, random_deltas, weights_of

CHUNKS = {"fragments": 1, "chunk_elements": 6}  # 24, 16, 16 and 8 elements: four, three, three and two chunks


def play(world: World) -> None:
    for turn in range(6):
        for worker in "ab":
            world.push(worker, random_deltas(world, 10 * turn + ord(worker)))
        for region in world.regions:
            world.settle(region)


def test_chunks_change_nothing_where_each_element_is_coded_by_itself() -> None:
    whole, cut = (make(config("halos"), cut_a=halves, **more) for more in ({"fragments": 1}, CHUNKS))
    for world in (whole, cut):
        play(world)
    for mine, other in zip(weights_of(whole.top), weights_of(cut.top), strict=True):
        assert torch.equal(mine, other)
    norms = [[own.norm for own in world.top.members["eu"].fragments.values()] for world in (whole, cut)]
    assert norms[0] == norms[1]


def test_a_fault_in_one_chunk_refuses_the_whole_update() -> None:
    world = make(config(), cut_a=halves, **CHUNKS)
    region, worker = world.regions["eu"], world.workers["a"][1]
    before = [x.clone() for x in weights_of(region)]
    first, second = worker.parts(random_deltas(world, 1))[-2:]
    *others, last = second.deltas  # of the last chunk, after all others were decoded
    nan = torch.full((len(last.payload) // 4,), torch.nan).numpy().tobytes()
    assert not region.handle(first).reply
    with pytest.raises(Refused, match=r"a, part 1: fragment 3, chunk 2 of 2: .* not finite"):
        region.handle(replace(second, deltas=(*others, replace(last, payload=nan))))
    assert all(map(torch.equal, weights_of(region), before))
    worker.sequences = [0] * len(worker.sequences)
    again = *worker.joins(world.identity, "life-2"), *worker.parts(random_deltas(world, 1), incarnation="life-2")
    assert [region.handle(message).reply for message in again][-1] is True


def test_a_fault_in_one_chunk_of_global_weights_changes_no_mirror() -> None:
    world = make(config(updates_per_send=1, down=codec_config("int8")), **CHUNKS)
    world.push("a", random_deltas(world, 1))
    update = world.deliver_up("eu")
    assert update is not None
    answer = world.top.answer("eu", "life-1", 0, update.fragment, update.sequence)
    assert answer is not None and len(answer.weights) > 1
    region, last = world.regions["eu"], answer.weights[-1]
    before = {name: tensor.clone() for name, tensor in region.state()[0].items()}
    nan = torch.full((len(last.payload),), 255, dtype=torch.uint8)
    wrong = replace(answer, weights=(*answer.weights[:-1], replace(last, payload=to_bytes(nan), increment=True)))
    with pytest.raises(Refused, match="chunk 3 of 3 of the global server"):
        region.handle(wrong)
    assert all(torch.equal(tensor, before[name]) for name, tensor in region.state()[0].items())
    world.tell("eu", answer)
    assert update.fragment not in region.uplink.in_flight


def test_a_state_that_is_cut_otherwise_is_refused() -> None:
    world, other = make(config(), **CHUNKS), make(config(), fragments=1, chunk_elements=12)
    with pytest.raises(
        ParameterMapError, match=r"not cut into chunks of 12 elements; resume with the outer\.fragments"
    ):
        other.top.load(*world.top.state())
    tensors, meta = world.top.state()
    with pytest.raises(ParameterMapError, match="the state is of parameter map another, the run's is "):
        world.top.load(tensors, {**meta, "parameter_map_digest": "another"})


def test_a_state_that_lacks_a_tensor_is_refused() -> None:
    world = make(config(updates_per_send=1, up=codec_config("int4"), down=codec_config("int8")), **CHUNKS)
    for update in range(2):
        world.settle("eu")
        world.push("a", random_deltas(world, update))
    tensors, meta = world.regions["eu"].state()
    assert {name.partition(".")[0] for name in tensors} == {"chunk", "residual", "in_flight", "mirror"}
    for lost in tensors:
        with pytest.raises(ParameterMapError, match=f"1 tensors of the state are missing, such as {lost}"):
            world.begun("eu").load({name: tensor for name, tensor in tensors.items() if name != lost}, meta)


class Written(MomentumRegion):
    """Keeps, and so keeps alive, all vectors that it computes with and that are no state."""

    def __init__(self, decay: float) -> None:
        super().__init__(rule_config("region_momentum"), decay)  # type: ignore[arg-type]
        self.temporary: list[torch.Tensor] = []

    def apply(self, v: Vectors, member: str, delta: torch.Tensor, inputs: Inputs) -> None:
        super().apply(v, member, delta, inputs)
        self.temporary.append(delta)


def one_store(size: int = 64, decay: float = 0.9) -> tuple[Store, Written, Callable[[int], None]]:
    """A region's store in bf16 with weights, its rule, and a call that applies update `number` there."""
    parameter_map, rule = ParameterMap([Parameter("a", (size,), None, "zeros")]), Written(decay)
    coded = codec_config("bf16")
    of = Store("eu", parameter_map, (0,), rule, make_codec(coded), coded, (coded, coded), False, True)
    whole = (parameter_map.whole(0),)
    of.receive_join(Join("r", "c", parameter_map.digest, "m", "w", "1", 0, 1, whole, whole))
    of.set_weights([torch.zeros(size)])
    rule.begin(of.vectors[0])
    payload = to_bytes(make_codec(coded).encode(torch.ones(size)).payload)

    def update(number: int) -> None:
        of.receive_part(UpdatePart("w", "1", 0, number, 0, (ChunkDelta(0, 0, payload),)))
        of.apply("w", 0, number, number, rule.on_delta(Counts(counts={"pending": 0}), "w", 1, 1)[0])
        of.forget("w", updates=((0, number),))

    return of, rule, update


def test_a_momentum_that_moves_by_less_than_bf16_can_tell_arrives_all_the_same() -> None:
    """After many updates the mean over elements is that of fp32, and none stays behind; rounding to the nearest stops
    on the way there."""
    of, _, update = one_store(4096, decay=0.999)
    nearest, exact = torch.zeros(1, dtype=torch.bfloat16), 0.0
    for number in range(1, 2001):
        update(number)
        nearest = (0.999 * nearest.float() + 0.001).bfloat16()
        exact = 0.999 * exact + 0.001
    kept = of.vectors[0].aux["momentum"]
    assert kept.dtype == torch.bfloat16 and kept.float().mean().item() == pytest.approx(exact, rel=2e-3)
    assert kept.min().item() > 0.8 * exact and nearest.item() < 0.5 * exact


def test_bf16_state_is_refused_where_no_server_has_any_of_it() -> None:
    with pytest.raises(ValueError, match="server_state: without effect with levels = 1"):
        OuterConfig.model_validate({"levels": 1, "server_state": "bf16"})
    assert OuterConfig.model_validate({"levels": 1, "server_state": "bf16", "rule": {"name": "halos"}})


def test_updates_are_computed_in_the_same_memory_again_and_again() -> None:
    of, rule, update = one_store()
    for number in range(1, 5):
        update(number)
        of.send_up(0, number, {})
    assert len(rule.temporary) == 4 and len({vector.data_ptr() for vector in rule.temporary}) == 1


def test_a_snapshot_in_writing_copies_of_an_updates_vectors_those_that_it_changes() -> None:
    of, _, update = one_store()
    update(1)
    before = {name: tensor.clone() for name, tensor in of.state()[0].items()}
    frozen = FrozenState(of.state()[0])
    of.will_change = frozen.before_write
    update(2)
    assert frozen.most_copied_bytes == (4 + 2) * 64  # weights and momentum, not the base
    of.send_up(0, 1, {})
    for name in frozen.names():
        assert b"".join(map(bytes, frozen.chunks(name))) == bytes(before[name].view(torch.uint8).numpy()), name
    assert not torch.equal(of.state()[0]["chunk.0.aux.base"], before["chunk.0.aux.base"])
