"""Runs without files: `geotrain serve` alone, and loops that join by an address and a token."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
import torch.distributed as dist
from grpc import aio
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

import geotrain
from geotrain.commands.export import export_run
from geotrain.commands.serve import run_alone
from geotrain.common.ports import why_not_bound
from geotrain.config import Address, ConfigError, changed_run
from geotrain.launch.check import free_ports
from geotrain.net.server.enrollment_server import CERTIFICATES, EnrollmentServer
from geotrain.net.storage.snapshots import StoreError, alone_in
from geotrain.net.transport import rpc
from geotrain.net.transport.certs import SECRET, CertificateError, Credentials, Trust, open_channel
from geotrain.net.transport.enrollment import Enrollment, EnrollmentClient, Token
from geotrain.outer.messages import Refused
from geotrain.own_loop import loop as own_loop
from geotrain.worker import rank_watch
from tests.support.hub import hub_for_tests
from tests.support.inner_worlds import run_world
from tests.support.own_loops import AloneRun, own_runs
from tests.support.small_runs import status

LONG = pytest.mark.long("examples", "geotrain/own_loop", "geotrain/net", "geotrain/commands")
Alone = Callable[[str], AloneRun]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    with own_runs(tmp_path_factory.mktemp("runs"), AloneRun) as made:
        yield made


@pytest.fixture(scope="module")
def serving(alone: Alone) -> AloneRun:
    """A run that goes on for as long as nobody leaves, with one worker that is at work."""
    run = alone("serving")
    run.serve()
    run.join("eu", 1_000_000)
    run.until(lambda: run.events("UpdateApplied"))
    return run


def network(*sizes: int) -> nn.Module:
    """That of examples/one_line.py, by default."""
    first, hidden, last = sizes or (8, 32, 1)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(first, hidden), nn.Tanh(), nn.Linear(hidden, last))


def loss_of(weights: dict[str, torch.Tensor]) -> float:
    model = network()
    model.load_state_dict(weights)
    x = torch.randn(1000, 8, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        return float((model(x) - x.sin().sum(1, keepdim=True)).square().mean())


def test_each_step_counts_once_though_a_worker_and_the_server_are_killed(alone: Alone, tmp_path: Path) -> None:
    run, steps = alone("killed"), 2400
    server = run.serve(steps=steps)
    run.join("eu", steps)
    run.until(lambda: len(run.events("UpdateApplied")) > 5)
    us = run.join("us", steps)
    run.until(lambda: len({event["member"] for event in run.events("UpdateApplied")}) == 2)
    run.kill(us)
    us, seen = run.join("us", steps), len(run.events("UpdateApplied"))
    run.until(lambda: "us-0" in {event["member"] for event in run.events("UpdateApplied")[seen:]})
    run.kill(server)
    run.serve(steps=steps, resume=True)
    run.ended()
    ended = status(run.run / "run.json", "global")
    assert ended["committed_samples"] == steps and ended["open_leases"] == 0
    # The ledger tells what counts. The update that the server was at when it was killed may have no event.
    assert sum(event["samples"] for event in run.events("UpdateApplied")) in (steps, steps - 8)
    incarnations = {(event["member"], event["incarnation"]) for event in run.events("Joined") if event["new"]}
    assert sorted(member for member, _ in incarnations) == ["eu-0", "us-0", "us-0"]
    export_run(run.run, tmp_path / "exported", "float32")
    exported = load_file(tmp_path / "exported/model.safetensors")
    assert loss_of(exported) < 0.2 * loss_of(network().state_dict())
    first = load_file(run.run / "weights.safetensors")
    assert all(torch.equal(first[name], tensor) for name, tensor in network().state_dict().items())


def test_a_served_run_goes_on_in_another_folder_at_another_port(alone: Alone) -> None:
    run, steps = alone("here"), 2400
    server = run.serve(steps=steps)
    eu = run.join("eu", steps)
    run.until(lambda: run.events("UpdateApplied"))
    os.kill(eu.pid, signal.SIGSTOP)  # else it may have trained all before the other joins
    page = run.status()["page"]
    us = run.join("us", steps)
    run.until(lambda: "us-0" in {event["member"] for event in run.events("UpdateApplied")})
    assert page and run.status()["page"] == page  # at which people look
    run.kill(eu, us, server)
    run.move()
    run.serve(steps=steps, resume=True)
    run.until(lambda: f"listens at 127.0.0.1:{run.port}. In each" in run.said())
    for name in ("eu", "us"):
        run.join(name, steps)
    run.ended()
    assert status(run.run / "run.json", "global")["committed_samples"] == steps


def test_who_gets_no_data_passes_over_a_step_and_has_finished(alone: Alone, tmp_path: Path) -> None:
    """Two join for one lease: whoever is late ends as well, and is told where its loop goes on all the same."""
    run = alone("late")
    server, eu = run.serve(steps=8, workers=2), run.join("eu", 8)
    with geotrain.OuterLoop.join(
        f"127.0.0.1:{run.port}", "us", network(), every=8, token=run.token, folder=tmp_path
    ) as outer:
        while not outer.finished:
            outer.after_step(1.0)
        with pytest.raises(RuntimeError, match="leave the loop where `finished` says so"):
            outer.after_step(1.0), outer.after_step(1.0)
    run.ended(server, eu)
    assert sum(event["samples"] for event in run.events("UpdateApplied")) == 8


@LONG
@pytest.mark.parametrize("rule", ["halos", "diloco", "local-sgd"])
def test_rules_by_name(alone: Alone, rule: str) -> None:
    run = alone(rule)
    run.serve(rule, steps=160, workers=2)
    run.join("eu", 160)
    run.join("us", 160)
    run.ended()
    applied = run.events("UpdateApplied")
    assert {event["member"] for event in applied} == {"eu-0", "us-0"}
    assert sum(event["samples"] for event in applied) == 160
    staleness = {event["staleness"] for event in applied}
    assert rule == "halos" or staleness == {0}  # all wait for all


@LONG
def test_who_leaves_an_endless_run_has_what_all_learned_and_the_last_to_leave_ends_it(
    alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = alone("left")
    server = run.serve()
    monkeypatch.setenv("GEOTRAIN_TOKEN", run.token)
    monkeypatch.chdir(run.folder)
    model = network()
    with geotrain.OuterLoop.join(f"127.0.0.1:{run.port}", "eu", model, every=4) as outer:
        for _ in range(10):
            with torch.no_grad():
                model[0].bias += 0.5
            outer.after_step(1.0)
        assert outer.step == 10 and not outer.finished
    assert outer.finished
    run.ended(server)
    assert [event["member"] for event in run.events("Left")] == ["eu-0"]
    assert sum(event["samples"] for event in run.events("UpdateApplied")) == 8  # two leases; the third is begun only
    export_run(run.run, tmp_path / "exported", "float32")
    bias = load_file(tmp_path / "exported/model.safetensors")["0.bias"]
    assert torch.allclose(bias, model[0].bias.detach(), atol=0.02)  # answers travel in bf16
    assert torch.allclose(bias, network()[0].bias.detach() + 8 * 0.5, atol=0.02)
    with hub_for_tests() as hub:
        words = "export", str(run.run), "hf://me/left", "--dtype", "float32"
        done = hub.run(tmp_path, "-m", "geotrain", *words)
        assert done.returncode == 0, done.stderr
        exported = (tmp_path / "exported/model.safetensors").read_bytes()
        assert hub.repositories == {"me/left": {"model.safetensors": exported}}
    assert not list(run.run.glob("tmp*"))


class Numbers:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(index))


@LONG
def test_a_data_set_is_leased(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    run = alone("data")
    server = run.serve(steps=16)
    monkeypatch.chdir(run.folder)
    seen: list[float] = []
    here: Any = {"every": 4, "samples_per_step": 4, "token": run.token}
    with geotrain.OuterLoop.join(f"127.0.0.1:{run.port}", "eu", network(), **here) as outer:
        for batch in outer.batches(Numbers()):
            seen += batch[:, 0].tolist()
            outer.after_step()
    assert outer.finished and sorted(seen) == list(range(64))
    run.ended(server)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": network(8, 16, 1)}, r"parameter 0.bias is \(16,\) at us, and \(32,\) in the run"),
        ({"model": network().append(nn.Linear(1, 1))}, r"parameter 3.bias is \(1,\) at us, and missing in the run"),
        ({"model": network().append(nn.Linear(1, 1).requires_grad_(False))}, r"frozen parameter 3.bias is \d+ at us"),
        ({"every": 16}, "every is 16 at us, and 8 in the run"),
        ({"samples_per_step": 2}, "samples_per_step is 2 at us, and 1 in the run"),
        ({"name": "EU"}, "region"),
        ({"name": "eu-0"}, "need names of their own"),
        ({"token": "geotrain2." + "0" * 64 + "." + "0" * 32}, "is not the one that printed this token"),
        ({"token": lambda token: token[:-32] + "0" * 32}, "the token's password is not this server's"),
    ],
)
def test_who_is_refused_changes_nothing(
    serving: AloneRun, change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    cluster = (serving.run / "cluster.json").read_bytes()
    options: dict[str, Any] = {"name": "us", "model": network(), "every": 8, "token": serving.token, **change}
    if callable(options["token"]):
        options["token"] = options["token"](serving.token)
    with pytest.raises(Refused, match=words):
        geotrain.OuterLoop.join(f"127.0.0.1:{serving.port}", folder=tmp_path / "us", **options)
    assert (serving.run / "cluster.json").read_bytes() == cluster and not (tmp_path / "us").exists()


SAID = {"every": 8, "samples_per_step": 1, "shapes": {"w": (4,)}, "fixed": {}}


@asynccontextmanager
async def enrolling(folder: Path) -> AsyncIterator[EnrollmentServer]:
    """A server to which no worker has come yet; it listens."""
    raw = {
        "name": "set", "model": {"weights": str(folder / "weights.safetensors")}, "folder": str(folder),
        "data": {"train_samples": 64, "samples_per_step": 1}, "outer": {"levels": 1},
    }  # fmt: skip
    address = Address(port=free_ports(1)[0])
    server = EnrollmentServer(folder, lambda *_: changed_run(raw, ("outer.local_steps=8",), ""), address, 1)
    serving = asyncio.create_task(server.first_members())
    while not why_not_bound("127.0.0.1", address.port):
        await asyncio.sleep(0.01)
        assert not serving.done()
    yield server
    serving.cancel()


def test_the_first_worker_is_refused_before_it_sends_its_weights(tmp_path: Path) -> None:
    def refused(server: EnrollmentServer) -> None:
        with closing(EnrollmentClient(str(server.address), server.token)) as client:
            with pytest.raises(Refused, match=r"every is 16 at eu, and 8 in the run, as .* --set said"):
                client.ask("eu", {**SAID, "every": 16})
            client._text = b"[" * 200_000
            client.send(memoryview(b""))
            with pytest.raises(Refused, match="maximum recursion depth"):
                client.finish()

    async def play() -> None:
        async with enrolling(tmp_path) as server:
            await asyncio.to_thread(refused, server)

    asyncio.run(play())


def test_strangers_get_no_word_and_keep_nobody_out(tmp_path: Path) -> None:
    """However many: with a connection that is silent once TLS has begun, with calls whose requests never come."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])

    def silent(port: int) -> ssl.SSLSocket:
        return context.wrap_socket(socket.create_connection(("127.0.0.1", port), 30))

    def begins_the_run(server: EnrollmentServer) -> None:
        with closing(EnrollmentClient(str(server.address), server.token)) as client:
            assert client.ask("eu", SAID) is None
            client.send(memoryview(bytes(16)))
            with pytest.raises(Refused, match="the server is starting"):
                client.finish()

    async def play() -> None:
        async with enrolling(tmp_path) as server, AsyncExitStack() as held:
            for _ in range(200):
                held.enter_context(await asyncio.to_thread(silent, server.address.port))
            for claimed, password in (("eu-0.worker", "0" * 32), ("operator.operator", server.token.password)):
                nobody = Credentials(f"{claimed}.geotrain", None, None, server._own.authority, password)
                trust = Trust(nobody, "global.global.geotrain")
                async with open_channel(aio, str(server.address), trust, rpc.OPTIONS) as channel:
                    with pytest.raises(aio.AioRpcError) as refused:
                        await channel.stream_unary(f"/{rpc.SERVICE}/enroll")()  # without a request
                    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            await asyncio.to_thread(begins_the_run, server)
            assert server.run is not None
            server._enroll(server.run, Enrollment.model_validate({**SAID, "region": "us"}))  # more than it waits for
            assert server.cluster is not None and [each.name for each in server.cluster.regions] == ["eu", "us"]
            assert (server.folder / CERTIFICATES / SECRET).stat().st_mode & 0o077 == 0

    asyncio.run(play())


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({}, ConfigError, "needs the token that `geotrain serve` prints: token=, or GEOTRAIN_TOKEN"),
        ({"token": "geotrain2.00"}, CertificateError, "not whole, or another version's"),
    ],
)
def test_an_address_alone_is_too_little(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        geotrain.OuterLoop.join("127.0.0.1:1", "eu", network(), every=8, **options)
    with pytest.raises(ConfigError, match=r"OuterLoop.join\('127.0.0.1:1', name"):
        geotrain.OuterLoop("127.0.0.1:1", "eu", network())
    with pytest.raises(ConfigError, match="no parameter that requires a gradient"):
        geotrain.OuterLoop.join("127.0.0.1:1", "eu", nn.Tanh(), every=8, token=str(Token("0" * 64, "0" * 32)))


def test_a_folder_is_served_once_at_a_time(tmp_path: Path) -> None:
    with alone_in(tmp_path / "a"), pytest.raises(StoreError, match="another server is running in this folder"):
        run_alone(tmp_path / "a", "async", free_ports(1)[0], "127.0.0.1", None, None, True)
    (tmp_path / "b" / CERTIFICATES).mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds a run already; give --resume"):
        run_alone(tmp_path / "b", "async", free_ports(1)[0], "127.0.0.1", None, None, False)


def _sharded(port: int, token: str, folder: Path) -> list[float]:
    dist.init_process_group("gloo")
    model = network()
    fully_shard(model)
    here: Any = {"every": 2, "token": token, "folder": folder}
    with geotrain.OuterLoop.join(f"127.0.0.1:{port}", "eu", model, **here) as outer:
        while not outer.finished:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 1.0
            outer.after_step()
    bias: Any = model.get_parameter("2.bias")
    return list(bias.full_tensor().tolist())


def _hangs(port: int, token: str, folder: Path, how: str) -> list[str]:
    """Two ranks, of which the second hangs in its sixth step; what the first is told before its collective ends."""
    rank_watch.BEAT_S = 0.2
    dist.init_process_group("gloo", timeout=timedelta(seconds=300.0))
    told: list[str] = []
    model = network()

    def say(line: str, _: Any) -> None:
        if "hangs" in line:
            told.append(line)
            os.kill(int(outer.loop.watch._all[1].process.rpartition(" ")[2]), signal.SIGKILL)

    own_loop.say = say  # type: ignore[attr-defined]
    outer = geotrain.OuterLoop.join(f"127.0.0.1:{port}", "eu", model, every=8, token=token, folder=folder)
    outer.loop.watch.hang_s = 6.0
    for step in range(8):
        if step == 5 and dist.get_rank() == 1:
            if how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(90.0)  # longer than it takes to tell
        try:
            dist.all_reduce(torch.zeros(1))
        except RuntimeError:
            return told
        outer.after_step()
    raise AssertionError("it hung not")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("asleep", r"rank 1 .* after 5 steps, last seen in _hangs \(own_loop/.*; others wait in .*all_reduce"),
        pytest.param("stopped", "rank 1 .*its process does not answer; others wait in .*all_reduce", marks=LONG),
    ],
)
def test_a_rank_that_hangs_between_two_steps_is_told(alone: Alone, tmp_path: Path, how: str, words: str) -> None:
    run = alone(f"hangs-{how}")
    run.serve()
    told, _ = run_world(2, _hangs, run.port, run.token, tmp_path / "eu", how, lost=[1])
    assert len(told) == 1 and re.match(f"geotrain: worker eu-0: hangs: {words}", told[0]), told


@LONG
def test_a_sharded_model_gives_whole_first_weights(alone: Alone, tmp_path: Path) -> None:
    run = alone("sharded")
    server = run.serve(steps=4)
    ends = run_world(2, _sharded, run.port, run.token, tmp_path / "eu")
    run.ended(server)
    first = load_file(run.run / "weights.safetensors")
    assert all(torch.equal(first[name], tensor) for name, tensor in network().state_dict().items())
    assert ends == [[pytest.approx(float(first["2.bias"]) + 4, rel=1e-2)]] * 2
