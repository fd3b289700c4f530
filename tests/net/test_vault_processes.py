"""Servers whose vaults are processes of their own: real sockets, TLS, disks and kills."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from geotrain.config import codec_config
from geotrain.net import server_process
from geotrain.net.certs import make_certificates
from geotrain.net.server_host import ServerHost
from geotrain.net.snapshots import read_weights
from geotrain.net.vault_sessions import VaultLost
from tests.support.server_processes import Server, Site

ROLES = ("global", "eu", "global.vault-0", "eu.vault-1")


def trained(site: Site, upset: Callable[[dict[str, Server]], None] = lambda servers: None) -> dict[str, Tensor]:
    """The final weights of a whole run of two workers."""
    servers = {name: site.serve(name) for name in site.processes}
    workers = [site.worker(name) for name in ("a", "b")]
    failed: list[BaseException] = []

    def run(worker: object) -> None:
        try:
            worker.run()  # type: ignore[attr-defined]
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        upset(servers)
        for thread in threads:
            thread.join(120)
    finally:
        for worker in workers:
            worker.close()
    assert not failed, failed
    for name, server in servers.items():
        assert server.ended(60)[0] == 0, (name, server.ended())
    return dict(read_weights(site.folder / "global", site.layout))


@pytest.fixture(params=["fp32", "int4"])
def settings(request: pytest.FixtureRequest) -> dict[str, object]:
    """Whole weights come down, or changes."""
    codec = codec_config(request.param)
    return {"up": codec, "down": codec}


def folder(tmp_path: Path, name: str) -> Path:
    (tmp_path / name).mkdir()
    return tmp_path / name


def test_a_run_with_vaults_ends_with_the_same_bits(tmp_path: Path, settings: dict[str, object]) -> None:
    """In synchronous rounds, where nothing depends on time: also when each role is killed on the way."""
    wanted = trained(Site(folder(tmp_path, "one"), "sync", 24, **settings))
    site = Site(folder(tmp_path, "two"), "sync", 24, vaults=2, certs=tmp_path / "certs", **settings)
    make_certificates(site.cluster, tmp_path / "certs")
    dice = random.Random(1)

    def kill(servers: dict[str, Server]) -> None:
        for name in ROLES:
            before = site.updates()
            deadline_s = time.monotonic() + 60
            while site.updates() < before + dice.randint(1, 3):
                assert time.monotonic() < deadline_s
                time.sleep(0.02)
            servers[name].send(signal.SIGKILL)
            servers[name].process.join(10)
            servers[name] = site.serve(name, resume=True)

    found = trained(site, kill)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_a_server_that_is_told_to_end_with_its_vaults_begins_no_new_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever it hears first: its own signal, or that a vault's stream has ended."""
    site, lives = Site(folder(tmp_path, "run"), "sync", 24, vaults=2), []

    class Told(ServerHost):
        async def run(self) -> None:
            lives.append(self)
            if len(lives) == 2:
                self.stop.set()
            assert len(lives) < 3
            raise VaultLost("the stream to vault 1 has ended")

    monkeypatch.setattr(server_process, "ServerHost", Told)
    assert server_process.serve_global(site.run, site.cluster, site.folder / "global", False) == 0
    assert len(lives) == 2  # the first was not told
