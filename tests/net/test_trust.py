"""Certificates: who may speak, and for whom."""

from __future__ import annotations

import datetime
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from geotrain.commands import cli
from geotrain.common.names import GLOBAL
from geotrain.config import Address, ClusterConfig, parse
from geotrain.net.transport import rpc
from geotrain.net.transport.authority import ending_soon, make_certificates
from geotrain.net.transport.certs import (
    CertificateError,
    Credentials,
    Trust,
    add_port,
    load_credentials,
    trust_between,
)
from geotrain.net.transport.grpc_client import GrpcClient, Unreachable
from geotrain.net.transport.operator_client import ask_status, command
from geotrain.net.transport.worker_client import WorkerClient
from geotrain.outer.messages import Join, LeaseRequest, Refused, Release, TakeBack, Validated
from tests.support.net_worlds import BUSY_S, halves, outer, wait_for, whole

PLAN = {"eu": {"a": halves, "b": whole}, "us": {"c": whole}}


def cluster_config(security: Path | None = None) -> ClusterConfig:
    regions = [
        {"name": r, "workers": [{"name": w, "hosts": [{"host": "h", "slots": 1}]} for w in workers]}
        for r, workers in PLAN.items()
    ]
    raw = {"name": "test", "regions": regions, "security": {"folder": str(security)} if security else None}
    return parse(ClusterConfig, raw, "test")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("certs")
    make_certificates(cluster_config(), made)
    return made


def test_a_region_asks_and_speaks_for_its_own_workers_only(make, folder):
    cluster = make(outer(), PLAN, certs=folder)
    wait_for(lambda: cluster.top.server.members["us"].complete)
    region = cluster.regions["us"].server

    async def attempts() -> None:
        link = GrpcClient(
            cluster.top.address, "us", region.incarnation, cluster.trust("region", "us", "global", GLOBAL)
        )
        for call in (
            link.lease(LeaseRequest("a", 1)),
            link.take_back(TakeBack("a", (1,))),
            link.validated(Validated("a", 1, 1, 1.0, 1.0)),
        ):
            with pytest.raises(Refused, match=r"us cannot (ask for the data of|speak for) 'a'"):
                await call
        await link.release(Release((lease.lease,)))  # of another region's worker: without effect
        await link.close()

    lease = cluster.joined("a").lease()
    cluster.loop.do(attempts())
    assert lease.lease in cluster.top.server.lease_table.open


def test_strangers_do_not_get_in(make, folder, tmp_path):
    """Plaintext; another authority; a server that is not the one meant."""
    cluster = make(outer(), PLAN, certs=folder)
    make_certificates(cluster_config(), tmp_path / "other")
    other = Trust(load_credentials(tmp_path / "other", "worker", "a"), "eu.region.geotrain")
    misled = cluster.trust("worker", "a", "region", "us")
    address = cluster.region_of("a").address
    join = Join("run", "config", "parameter_map", "model", "a", "incarnation", 0, 1, (), ())
    for trust in (None, other, misled):
        client = WorkerClient(address, connect_s=0.8, trust=trust)
        with pytest.raises(Unreachable):
            client.join(join)
        client.close()
        assert ask_status(address, 0.8, trust) is None
    status = ask_status(address, BUSY_S, cluster.trust("worker", "a", "region", "eu"))
    assert status is not None
    assert status["region"] == "eu"


def test_certificates_are_made_once_and_keys_are_private(tmp_path):
    made = make_certificates(cluster_config(), tmp_path)
    names = {"ca", "global-global", "operator-operator", "region-eu", "region-us", "worker-a", "worker-b", "worker-c"}
    assert {p.name for p in made} == {f"{name}.{end}" for name in names for end in ("pem", "key")}
    assert all(p.stat().st_mode & 0o077 == 0 for p in made)
    before = {p: p.read_bytes() for p in made}
    assert make_certificates(cluster_config(), tmp_path) == []
    (tmp_path / "worker-b.pem").unlink()
    assert [p.name for p in make_certificates(cluster_config(), tmp_path)] == ["worker-b.key", "worker-b.pem"]
    assert all(p.read_bytes() == content for p, content in before.items() if "worker-b" not in p.name)


def test_what_is_wrong_with_a_certificate_is_said(tmp_path):
    make_certificates(cluster_config(), tmp_path)
    with pytest.raises(CertificateError, match=r"worker-zoe\.key: cannot be read: No such file.*geotrain certs"):
        load_credentials(tmp_path, "worker", "zoe")
    (tmp_path / "worker-b.key").write_bytes((tmp_path / "worker-c.key").read_bytes())
    with pytest.raises(CertificateError, match=r"worker-b\.key is not the key of worker-b\.pem"):
        load_credentials(tmp_path, "worker", "b")
    (tmp_path / "worker-b.pem").write_bytes((tmp_path / "worker-c.pem").read_bytes())
    with pytest.raises(CertificateError, match=r"worker-b\.pem: is not the certificate of worker 'b'"):
        load_credentials(tmp_path, "worker", "b")
    (tmp_path / "worker-a.pem").write_text("nonsense")
    with pytest.raises(CertificateError, match="is damaged"):
        load_credentials(tmp_path, "worker", "a")
    make_certificates(cluster_config(), tmp_path / "other")
    (tmp_path / "other/ca.pem").write_bytes((tmp_path / "ca.pem").read_bytes())
    with pytest.raises(CertificateError, match=r"worker-a\.pem: is not signed by the authority of ca\.pem"):
        load_credentials(tmp_path / "other", "worker", "a")
    (tmp_path / "ca.key").unlink()
    (tmp_path / "worker-a.pem").unlink()
    with pytest.raises(CertificateError, match=r"worker-a\.pem is missing, and .*ca\.key is not there to sign it"):
        make_certificates(cluster_config(), tmp_path)
    (tmp_path / "worker-a.pem").write_text("nonsense")
    with pytest.raises(CertificateError, match=r"worker-a\.pem: is damaged .*; delete it"):
        make_certificates(cluster_config(), tmp_path)


def test_a_clock_that_is_behind_the_certificates_is_named(tmp_path):
    make_certificates(cluster_config(), tmp_path, now=ago(hours=-2))
    with pytest.raises(CertificateError, match=r"worker-a\.pem: is valid from .* this machine's clock is at"):
        load_credentials(tmp_path, "worker", "a")


def ago(**time: float) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) - datetime.timedelta(**time)


def made_earlier(folder: Path, days: int, lasts: int, but: str = "") -> dict[str, bytes]:
    """Make certificates as they were so many days ago; of those that begin with `but`, or of all. Returns all
    files."""
    make_certificates(cluster_config(), folder, **({} if but else {"days": lasts, "now": ago(days=days)}))
    for path in folder.glob(f"{but}*") if but else ():
        path.unlink()
    make_certificates(cluster_config(), folder, lasts, ago(days=days))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(("days", "lasts"), [(10, 5), (705, 730), (6, 8)])
def test_certificates_that_end_are_renewed_and_all_else_is_kept(tmp_path, days, lasts):
    """Expired ones; those with less than 30 days; those with less than a third of a short life."""
    before = made_earlier(tmp_path, days, lasts, but="worker-a")
    assert ending_soon(tmp_path).keys() == {"worker-a.pem"}
    assert [path.name for path in make_certificates(cluster_config(), tmp_path)] == ["worker-a.pem"]
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {name for name in after if after[name] != before[name]} == {"worker-a.pem"}
    assert load_credentials(tmp_path, "worker", "a") and not ending_soon(tmp_path)
    assert make_certificates(cluster_config(), tmp_path) == []


def test_an_authority_that_ends_is_renewed_and_old_certificates_go_with_the_new(tmp_path, capsys):
    """Machines get their files one after another while the run goes on."""
    made_earlier(tmp_path / "old", 720, 730)
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    cluster = tmp_path / "cluster.json"
    cluster.write_text(cluster_config().model_dump_json())
    cli.certs(cluster=cluster, folder=tmp_path / "new")
    told = capsys.readouterr().out
    assert "ca.pem (renewed)" in told and "copy ca.pem to every machine" in told and ".key" not in told
    old, new = tmp_path / "old", tmp_path / "new"
    for server in (old, new):
        for client in (old, new):
            assert call(credentials(server, "region", "eu"), credentials(client, "worker", "a")) == "unimplemented"
    (old / "ca.key").unlink()
    with pytest.raises(CertificateError, match=r"ca\.pem ends on \d{4}-\d\d-\d\d, and .*ca\.key is not there"):
        make_certificates(cluster_config(), old)


def test_an_expired_certificate_is_told_at_the_start_and_when_calls_fail_of_it(tmp_path):
    made_earlier(good := tmp_path / "good", 0, 730)
    shutil.copytree(good, mixed := tmp_path / "mixed")
    for path in (*mixed.glob("region-eu.*"), *mixed.glob("worker-a.*")):
        path.unlink()
    make_certificates(cluster_config(), mixed, 5, ago(days=10))
    made_earlier(ended := tmp_path / "ended", 10, 5)
    shutil.copy(good / "worker-a.pem", ended)
    shutil.copy(good / "worker-a.key", ended)
    server, client = credentials(good, "region", "eu"), credentials(good, "worker", "a")
    with pytest.raises(CertificateError, match=r"worker-a\.pem: expired on \d{4}-\d\d-\d\d; renew it with `geotrain"):
        load_credentials(mixed, "worker", "a")
    with pytest.raises(CertificateError, match=r"ca\.pem: the authority's own, .*, expired on .*; renew it with"):
        load_credentials(ended, "worker", "a")
    theirs = call(credentials(mixed, "region", "eu"), client)
    assert "the certificate of eu.region.geotrain, or its ca.pem, has expired: renew it" in theirs
    mine = call(server, credentials(mixed, "worker", "a"))
    assert "this process's certificate, a.worker.geotrain, expired on 20" in mine
    assert "ca.pem expired on 20" in call(server, credentials(ended, "worker", "a"))


def credentials(folder: Path, role: str, name: str) -> Credentials:
    """A process's, as it read them when they were good."""
    files = (f"{role}-{name}.key", f"{role}-{name}.pem", "ca.pem")
    return Credentials(f"{name}.{role}.geotrain", *((folder / file).read_bytes() for file in files))


def call(server: Credentials, client: Credentials) -> str:
    """What a client says that calls a server over TLS; "unimplemented": they have met."""
    listening = grpc.server(ThreadPoolExecutor(1))
    port = add_port(listening, Address(), server)
    listening.start()
    try:
        command(f"127.0.0.1:{port}", rpc.Control("stop"), 20, Trust(client, server.identity))
    except Unreachable as error:
        return "unimplemented" if "(unimplemented)" in str(error) else str(error)
    finally:
        listening.stop(None)
    raise AssertionError("there is nobody")


def test_links_are_plaintext_without_a_security_block(folder):
    assert trust_between(cluster_config(), "worker", "a", "region", "eu") is None
    trust = trust_between(cluster_config(folder), "worker", "a", "region", "eu")
    assert trust is not None and trust.server == "eu.region.geotrain"
