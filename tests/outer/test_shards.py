"""However many shards a server has, and however it is restarted with others: the same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from geotrain.common.names import GLOBAL
from geotrain.config import OuterConfig, codec_config, rule_config
from geotrain.net.storage.frozen_state import FrozenState
from geotrain.outer.codec import make_codec
from geotrain.outer.messages import Answer, AnswerWanted, ChunkDelta, Join, Refused, UpdatePart
from geotrain.outer.rules import Counts, Vectors
from geotrain.outer.rules.region_momentum import MomentumRegion
from geotrain.outer.rules.rule import Inputs
from geotrain.outer.server.global_server import GlobalServer
from geotrain.outer.server.server import Server
from geotrain.outer.server.shard_server import PayloadLost, ShardServer
from geotrain.outer.shards import shard
from geotrain.outer.shards.protocol import Apply, Forget, Freeze, NewIncarnation, SendUp, digest
from geotrain.outer.shards.remote import RemoteShards
from geotrain.outer.shards.shard import HeldPayload, ServerShard
from geotrain.parameters.parameter_map import Parameter, ParameterMap, ParameterMapError
from geotrain.staging.interface import to_bytes
from tests.support.outer_world import (
    UPDATES,
    World,
    config,
    halves,
    make,
    random_deltas,
    saved_and_loaded,
    say_again,
    weights_of,
)
from tests.support.recorded_world import same_state

CHUNKS = {"fragments": 1, "chunk_elements": 6}  # 24, 16, 16 and 8 elements: four, three, three and two chunks


def heard(world: World) -> list[Any]:
    """From now on, all that the global server is told and answers, payloads included."""
    said: list[Any] = []
    handle, answer = world.top.handle, world.top.answer

    def told(message: Any) -> Any:
        said.append(message)
        return handle(message)

    def answered(*asked: Any) -> Any:
        said.append(answer(*asked))
        return said[-1]

    world.top.handle, world.top.answer = told, answered  # type: ignore[method-assign]
    return said


def play(world: World, restarted: int | None = None) -> list[Any]:
    """restarted: the region's server comes back with so many shards before each exchange."""
    said, answers = heard(world), []
    for turn in range(6):
        for worker, region in (("a", "eu"), ("b", "us")):
            world.push(worker, random_deltas(world, 10 * turn + ord(worker)))
            if restarted is not None:
                restart(world, region, restarted)
            world.settle(region)
        for region in world.regions:
            world.settle(region)
        updates = dict.fromkeys(range(len(world.parameter_map.fragments)), turn + 1)
        answers.append([world.weights(w, updates) for w in "ab"])
    assert sum(isinstance(each, UpdatePart) for each in said) > 6 and any(isinstance(each, Answer) for each in said)
    return [*said, *[[x.tolist() for x in each.values()] for turn in answers for each in turn if each]]


def restart(world: World, region: str, shards: int) -> None:
    """As after a kill: what the state leaves out is said again."""
    old, new = world.regions[region], saved_and_loaded(world, region, shards)
    say_again(old, new)
    same_state(new, old)
    world.regions[region] = new


@pytest.mark.parametrize(
    ("rule", "up", "down"),
    [
        ("halos", "int4", "int8"),
        ("region_momentum", "topk2", "fp32"),
        ("sync", "int4", "int8"),
        ("sync", "fp32", "bf16"),
    ],
)
def test_the_number_of_shards_changes_no_bit(rule: str, up: str, down: str) -> None:
    every = {} if rule == "sync" else {"updates_per_send": 2}
    settings = config(rule, up=codec_config(up), down=codec_config(down), **every)
    one, *others = [make(settings, cut_a=halves, shards=n, **CHUNKS) for n in (1, 2, 4)]
    wanted = play(one)
    assert [len(shard.chunks) for shard in others[1].top.shards.all] == [3, 3, 3, 3]
    for world in others:
        assert play(world) == wanted
        for name in (None, "eu", "us"):
            same_state(*(w.regions[name] if name else w.top for w in (one, world)))


@pytest.mark.parametrize(
    ("rule", "kept"), [("halos", "fp32"), ("halos", "bf16"), ("region_momentum", "bf16"), ("sync", "bf16")]
)
def test_a_state_is_taken_up_by_any_number_of_shards(rule: str, kept: str) -> None:
    """Also where momenta and residuals are kept in bf16."""
    every: dict[str, Any] = {} if rule == "sync" else {"updates_per_send": 2}
    settings = config(rule, up=codec_config("int4"), down=codec_config("int8"), server_state=kept, **every)
    calm, shaken = (make(settings, cut_a=halves, shards=n, **CHUNKS) for n in (1, 2))
    said, again = ([u for u in each if isinstance(u, UpdatePart)] for each in (play(calm), play(shaken, restarted=3)))
    assert said == again
    same_state(calm.top, shaken.top)
    tensors = {**calm.regions["eu"].state()[0], **{f"top.{k}": t for k, t in calm.top.state()[0].items()}}
    in_bf16 = {name.split(".")[-1] if "aux" in name else name.split(".")[0] for name, t in tensors.items()
              if t.dtype == torch.bfloat16}  # fmt: skip
    of_rule = {"halos": {"momentum", "accumulated"}, "region_momentum": {"momentum"}, "sync": {"momentum"}}
    assert in_bf16 == ({"residual", *of_rule[rule]} if kept == "bf16" else set())


def test_chunks_change_nothing_where_each_element_is_coded_by_itself() -> None:
    whole, cut = (make(config("halos"), cut_a=halves, **more) for more in ({"fragments": 1}, CHUNKS))
    for world in (whole, cut):
        play(world)
    for mine, other in zip(weights_of(whole.top), weights_of(cut.top), strict=True):
        assert torch.equal(mine, other)
    norms = [[own.norm for own in world.top.members["eu"].fragments.values()] for world in (whole, cut)]
    assert norms[0] == norms[1]


def held(server: Server) -> list[Any]:
    """All that the shards hold of members, beside the state."""
    return [
        (sorted(known.joins), sorted(known.updates), sorted(known.answers), sorted(known.senders))
        for shard in server.shards.all  # type: ignore[attr-defined]
        for known in shard.members.values()
    ]


def test_a_fault_in_one_chunk_refuses_the_whole_update_in_all_shards() -> None:
    world = make(config(), cut_a=halves, shards=2, **CHUNKS)
    region, worker = world.regions["eu"], world.workers["a"][1]
    before, known = [x.clone() for x in weights_of(region)], held(region)
    first, second = worker.parts(random_deltas(world, 1))[-2:]
    *others, last = second.deltas  # of the last chunk, after all others were decoded
    nan = torch.full((len(last.payload) // 4,), torch.nan).numpy().tobytes()
    assert not region.handle(first).reply and held(region) != known
    with pytest.raises(Refused, match=r"a, part 1: fragment 3, chunk 2 of 2: .* not finite"):
        region.handle(replace(second, deltas=(*others, replace(last, payload=nan))))
    assert all(map(torch.equal, weights_of(region), before)) and held(region) == known
    worker.sequences = [0] * len(worker.sequences)
    again = *worker.joins(world.identity, "life-2"), *worker.parts(random_deltas(world, 1), incarnation="life-2")
    assert [region.handle(message).reply for message in again][-1] is True


def test_a_shard_applies_what_its_coordinator_has_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else that it may hold under the same number. Each payload is digested once."""
    digested: list[bytes] = []
    monkeypatch.setattr(shard, "digest", lambda payload: digested.append(payload) or digest(payload))
    world = make(config(), cut_a=halves, **CHUNKS)
    region, worker = world.regions["eu"], world.workers["a"][1]
    machine = ShardServer(region.shards.all[0], 0, 1, tuple(region.members), "worker")
    given: list[Any] = []
    far = RemoteShards(world.parameter_map, 1, region.shards.all[0].up_codec, changes=False)
    far.emit = given.append
    for message in (NewIncarnation("life"), *worker.joins(world.identity)):
        machine.handle(message)
    for part in worker.parts(random_deltas(world, 1)):
        (told,) = machine.handle(part).sends
        far.receive_part(far.unwrap(told.message))
        assert not machine.handle(
            replace(part, deltas=tuple(replace(d, payload=bytes(len(d.payload))) for d in part.deltas))
        ).sends  # what came first stays
    far.execute(Apply("a", 1, 1, 1, region.rule.on_delta(region.fragments[1], "a", 1, 2)[0]))
    payloads, before = machine.shard.members["a"].updates[1, 1], [x.clone() for x in weights_of(region)]
    chunk = world.parameter_map.chunks_of[1][0].index
    right = payloads[1, chunk]
    payloads[1, chunk] = HeldPayload(bytes(len(right.content)))
    with pytest.raises(PayloadLost, match=r"update a/1.1, .*: not what its coordinator has judged"):
        machine.handle(given[-1])
    assert all(map(torch.equal, weights_of(region), before))
    payloads[1, chunk] = right
    digested.clear()
    machine.handle(given[-1])
    assert not torch.equal(weights_of(region)[1], before[1]) and not digested


def test_a_shard_that_has_missed_a_join_gets_it_before_what_is_coded_for_that_member() -> None:
    """Its machine lost power: the last messages before are on no disk, though all commands that count are."""
    world = make(config(down=codec_config("int8")), **CHUNKS)
    heard_all, missed = (
        ShardServer(world.begun(GLOBAL).shards.all[0], 0, 1, tuple(world.regions), "region") for _ in range(2)
    )
    far = RemoteShards(world.parameter_map, 1, heard_all.shard.up_codec, changes=True)
    far.emit = lambda command: [machine.handle(command) for machine in there]
    there, join = [heard_all, missed], world.regions["eu"].join_message()
    far.begin_incarnation("life-1")
    far.execute(Forget("eu", mirrors=tuple(range(len(world.parameter_map.fragments)))))
    there.remove(missed)
    for _ in range(2):  # said twice, as where the welcome was lost
        far.receive(join)
    far.drop(missed.commands)
    for fragment in range(len(world.parameter_map.fragments)):
        far.execute(Freeze("eu", fragment, 0, 0))
    assert [type(message) for message in far.since(missed.commands)][:2] == [Join, Freeze]
    for message in far.since(missed.commands):
        missed.handle(message)
    there.append(missed)
    far.begin_incarnation("life-2")
    far.receive(join)
    for fragment in range(len(world.parameter_map.fragments)):
        asked = "eu", join.incarnation, 0, fragment, 0
        assert missed.answer(*asked) == heard_all.answer(*asked) is not None


def test_a_fault_in_one_chunk_of_global_weights_changes_no_mirror() -> None:
    world = make(config(updates_per_send=1, down=codec_config("int8")), shards=2, **CHUNKS)
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
    assert update.fragment not in region.in_flight


def test_a_state_that_is_cut_otherwise_is_refused() -> None:
    world, other = make(config(), **CHUNKS), make(config(), fragments=1, chunk_elements=12)
    with pytest.raises(
        ParameterMapError, match=r"not cut into chunks of 12 elements; resume with the outer\.fragments"
    ):
        other.top.load(*world.top.state())


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


def test_who_had_joined_is_noted_again_without_another_command() -> None:
    """Also while the shards have not reported what they have sent it."""
    world = make(config(down=codec_config("int8")), **CHUNKS)
    far = RemoteShards(world.parameter_map, 1, world.top.shards.all[0].up_codec, changes=True)
    top = GlobalServer(
        world.identity, world.parameter_map, world.config, {"eu": ("a",), "us": ("b",)}, 64, 1, shards=far
    )
    top.begin()
    join = world.regions["eu"].join_message()
    top.handle(join)
    for fragment in top.numbers:
        top.handle(AnswerWanted("eu", join.incarnation, fragment, 0))
    given = far.commands
    say_again(top, top)
    assert far.commands == given > 0 and top.members["eu"].complete


def test_a_join_that_is_refused_is_in_no_shard() -> None:
    world = make(config(), cut_a=halves, shards=2, **CHUNKS)
    region = world.regions["eu"]
    known = held(region)
    [first, _] = world.workers["a"][1].joins(world.identity, "life-2")
    short = replace(first, pushes=first.pushes[:-1])
    with pytest.raises(Refused, match="slices for 11 chunks, the run has 12"):
        region.handle(short)
    assert held(region) == known
    region.handle(first)
    assert held(region) != known  # what the former incarnation had said is forgotten


def test_a_server_has_as_many_shards_as_it_is_told() -> None:
    world = make(config(), **CHUNKS)
    server = GlobalServer(
        world.identity, world.parameter_map, world.config, {"eu": ("a",)}, int(UPDATES), 1, shards=4
    )
    sizes = [sum(chunk.numel for chunk in shard.chunks) for shard in server.shards.all]  # type: ignore[attr-defined]
    assert sum(sizes) == 64 and max(sizes) - min(sizes) <= 6


class Written(MomentumRegion):
    """Keeps, and so keeps alive, all vectors that it computes with and that are no state."""

    def __init__(self, decay: float) -> None:
        super().__init__(rule_config("region_momentum"), decay)  # type: ignore[arg-type]
        self.temporary: list[torch.Tensor] = []

    def apply(self, v: Vectors, member: str, delta: torch.Tensor, inputs: Inputs) -> None:
        super().apply(v, member, delta, inputs)
        self.temporary.append(delta)


def one_shard(size: int = 64, decay: float = 0.9) -> tuple[ServerShard, Written, Callable[[int], None]]:
    """A region's shard in bf16 with weights, its rule, and a call that applies update `number` there."""
    parameter_map, rule = ParameterMap([Parameter("a", (size,), None, "zeros")]), Written(decay)
    coded = codec_config("bf16")
    of = ServerShard(
        "eu", parameter_map, parameter_map.chunks, rule, make_codec(coded), coded, (coded, coded), False, True
    )
    whole = (parameter_map.whole(0),)
    of.receive(Join("r", "c", parameter_map.digest, "m", "w", "1", 0, 1, whole, whole))
    of.set_weights([torch.zeros(size)])
    rule.begin(of.vectors[0])
    payload = to_bytes(make_codec(coded).encode(torch.ones(size)).payload)

    def update(number: int) -> None:
        of.receive(UpdatePart("w", "1", 0, number, 0, (ChunkDelta(0, 0, payload),)))
        of.execute(Apply("w", 0, number, number, rule.on_delta(Counts(counts={"pending": 0}), "w", 1, 1)[0]))
        of.execute(Forget("w", updates=((0, number),)))

    return of, rule, update


def test_a_momentum_that_moves_by_less_than_bf16_can_tell_arrives_all_the_same() -> None:
    """After many updates the mean over elements is that of fp32, and none stays behind; rounding to the nearest stops
    on the way there."""
    of, _, update = one_shard(4096, decay=0.999)
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
    of, rule, update = one_shard()
    for number in range(1, 5):
        update(number)
        of.execute(SendUp(0, number, {}))
    assert len(rule.temporary) == 4 and len({vector.data_ptr() for vector in rule.temporary}) == 1


def test_a_snapshot_in_writing_copies_of_an_updates_vectors_those_that_it_changes() -> None:
    of, _, update = one_shard()
    update(1)
    before = {name: tensor.clone() for name, tensor in of.state().items()}
    frozen = FrozenState(of.state())
    of.will_change = frozen.before_write
    update(2)
    assert frozen.most_copied_bytes == (4 + 2) * 64  # weights and momentum, not the base
    of.execute(SendUp(0, 1, {}))
    for name in frozen.names():
        assert b"".join(map(bytes, frozen.chunks(name))) == bytes(before[name].view(torch.uint8).numpy()), name
    assert not torch.equal(of.state()["chunk.0.aux.base"], before["chunk.0.aux.base"])
