"""What a server is said to need, against the live tensors of real ones."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from torch import Tensor

from benchmarks import ROOT
from benchmarks.servers.rates import PAGE, literal, markdown, rounded
from geotrain.commands.dry_run import needs, show
from geotrain.config import codec_config, load_cluster, load_run
from geotrain.net.storage.disk_mirror_store import DiskMirrorStore, on_disk
from geotrain.outer import downlink
from geotrain.outer.server import store
from geotrain.outer.server.server import Server
from geotrain.parameters.parameter_map import parameter_map_of
from geotrain.plan.model.server_rates import MEASURED, ServerRates
from geotrain.plan.model.servers import place_of, server_needs
from geotrain.staging.interface import from_bytes
from tests.support.outer_world import FakeWorker, World, config, parameter_map, random_deltas, start_vector, whole

CONFIGS = ROOT / "configs"
LAYOUT = parameter_map(1)  # four fragments, of 24, 16, 16 and 8 elements
EVERY = tuple(range(len(LAYOUT.fragments)))
# How the names of a state's tensors begin → as what they are counted.
PARTS = {"residual.": "residual", "mirror.": "mirror", "held.": "mirrors of members"}
WHERE = "memory", "disk"
COMING, ON_DISK = "payloads and answers", "on disk"


def kept(server: Server) -> dict[str, int]:
    """Bytes of live tensors and payloads, by part. Each memory counts once: a mirror begins as that of a payload.
    What lies on the disk is a part of its own."""
    found = dict.fromkeys(("vectors", *PARTS.values(), COMING, ON_DISK), 0)
    seen: set[int] = set()
    for part, tensor in held(server):
        if tensor.data_ptr() not in seen:
            found[ON_DISK if on_disk(tensor) else part] += tensor.nbytes
            seen.add(tensor.data_ptr())
    return found


def held(server: Server) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in server.state()[0].items():
        if name.startswith("chunk."):
            yield COMING if ".waiting." in name else "vectors", tensor
        elif not name.startswith(("answer.", "in_flight.")):
            yield next(part for head, part in PARTS.items() if name.startswith(head)), tensor
    # Payloads as they lie in memory, not as the state names some of them.
    yield from ((COMING, from_bytes(payload)) for payload in server.store.in_flight.values())
    for known in server.store.members.values():
        for answer in known.answers.values():
            yield from ((COMING, from_bytes(weights.payload)) for weights in answer.weights.values())


def play(world: World) -> Iterator[int]:
    """A join, and some rounds in which each worker sends one fragment after another; it stops where most is held.
    Yields the number of the round."""
    for worker in world.workers:
        world.weights(worker, dict.fromkeys(EVERY, 0))
    yield 0
    for turn in range(5):
        for worker, (_, fake) in world.workers.items():
            for fragment, delta in random_deltas(world, turn).items():
                fake.job = turn  # rounds are taken in order
                world.push(worker, {fragment: delta})
            yield turn  # with the last of them, all fragments are on their way up
        for region in world.regions:
            while (sent := world.deliver_up(region)) is not None:
                yield turn  # the answer is frozen, and not here yet
                assert sent.member == region
        yield turn
        for region, server in world.regions.items():
            for update in list(server.uplink.in_flight.values()):
                world.deliver_down(region, update)
        yield turn


@pytest.mark.parametrize("state", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("up", "down", "mirrors"),
    [
        *(("fp32", "fp32", "memory"), ("bf16", "bf16", "memory"), ("topk2", "int8", "memory")),
        *(("int4", "int4", "memory"), ("int4", "int4", "disk")),
    ],
)
@pytest.mark.parametrize("rule", ["halos", "region_momentum", "sync"])
def test_a_servers_memory_is_that_of_its_live_tensors(
    rule: str, up: str, down: str, mirrors: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly, part by part, of what is kept, at its most."""
    more = {} if rule == "sync" else {"updates_per_send": 2}
    codecs = {"up": codec_config(up), "down": codec_config(down)}
    settings = config(rule, **codecs, server_state=state, mirrors=mirrors, **more)
    for module in (store, downlink) if mirrors == "disk" else ():
        monkeypatch.setattr(module, "MirrorStore", lambda: DiskMirrorStore(tmp_path, pytest.fail))
    workers = {"eu": ("a", "b"), "us": ("c", "d")}
    fakes = {r: [FakeWorker(name, LAYOUT, whole(LAYOUT)) for name in names] for r, names in workers.items()}
    start = [start_vector()[: f.numel].clone() for f in LAYOUT.fragments]
    world = World(settings, fakes, start, LAYOUT)
    servers = {"region": world.regions["eu"], "global": world.top}
    most: dict[str, dict[str, int]] = {role: {} for role in servers}
    largest = dict.fromkeys(servers, 0)
    for turn in play(world):
        for role, server in servers.items():
            most[role] = {part: max(size, most[role].get(part, 0)) for part, size in kept(server).items()}
            if turn:  # before, the first weights lie in a snapshot twice
                largest[role] = max(largest[role], sum(tensor.nbytes for tensor in server.state()[0].values()))
    for role, server in servers.items():
        needs = server_needs(place_of(role, settings, 2), settings, LAYOUT, snapshots=2)
        assert most[role] == dict.fromkeys(most[role], 0) | needs.kept | {ON_DISK: needs.mirrors_bytes}, role
        assert largest[role] <= needs.snapshot_bytes <= 1.25 * largest[role]
        buffers = sum(buffer.nbytes for buffer in (*server.store._spare, *server.store._deltas.values()))
        assert buffers == needs.passing["decoding"]


def test_the_dry_run_tells_each_servers_needs() -> None:
    run = load_run(CONFIGS / "runs/1b.json", ["outer.server_state=bf16"])
    cluster = load_cluster(CONFIGS / "clusters/four-regions-ssh.json")
    found = needs(run, cluster)
    assert list(found.servers) == ["global", *(region.name for region in cluster.serving)]
    lay = parameter_map_of(run)
    assert cluster.security is not None
    assert found.servers["asia"] == server_needs(
        place_of("region", run.outer, 1), run.outer, lay, run.checkpoint.keep, MEASURED.over(True)
    )
    output = StringIO()
    show(found, Console(file=output, width=200))
    told = " ".join(output.getvalue().split())
    of_parameter = found.servers["global"].memory_bytes / lay.numel
    assert f" {of_parameter:.1f} " in told and MEASURED.hardware in told


def test_the_dry_run_tells_what_mirrors_on_the_disk_would_be_worth() -> None:
    cluster = load_cluster(CONFIGS / "clusters/four-regions-ssh.json")
    here, there = (load_run(CONFIGS / "runs/1b.json", [f"outer.mirrors={m}"]) for m in WHERE)
    found, of_disk = needs(here, cluster), needs(there, cluster)
    assert found.on_disk == of_disk.servers == of_disk.on_disk
    numel, mine, other = found.parameters, found.servers["global"], of_disk.servers["global"]
    # read ahead, used, on its way out, read for a snapshot
    in_use = 4 * 4 * max(chunk.numel for chunk in parameter_map_of(here).chunks)
    assert mine.memory_bytes - other.memory_bytes == 4 * 4 * numel - in_use
    assert other.mirrors_bytes == 4 * 4 * numel == other.disk_bytes - mine.disk_bytes
    more_s = MEASURED.of_parameter["mirror"] * numel / 1e9
    assert other.update_s - mine.update_s == pytest.approx(more_s)
    output = StringIO()
    show(found, Console(file=output, width=200))
    assert 'outer.mirrors = "disk" takes' in output.getvalue() and "of the memory of global" in output.getvalue()
    whole = needs(load_run(CONFIGS / "runs/1b.json", ["outer.down.name=bf16"]), cluster)
    assert all(n.memory_bytes == whole.on_disk[name].memory_bytes for name, n in whole.servers.items())


def test_the_page_has_the_table_that_follows_from_the_rates() -> None:
    """If this fails: `python -m benchmarks.servers.rates`."""
    assert f"<!-- servers: begin -->\n\n{markdown()}\n\n<!-- servers: end -->" in PAGE.read_text()
    written = {"ServerRates": ServerRates}
    exec(literal(rounded(MEASURED)), written)
    assert written["MEASURED"] == MEASURED
