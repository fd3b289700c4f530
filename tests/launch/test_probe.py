"""`geotrain probe`: figures against emulated links, trust, what it leaves of the cluster file, and failures."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from geotrain.commands.probe import probe, updated
from geotrain.commands.probe_step import MICRO_BATCHES, reduced
from geotrain.config import ClusterConfig, ConfigError, load_cluster, load_run, parse
from geotrain.emulate import wan
from geotrain.net.transport.authority import make_certificates
from geotrain.net.transport.certs import CertificateError
from geotrain.net.transport.link_probe import Limits, ProbeError, Way
from tests.support.programs import SSH, stand_in
from tests.support.small_runs import prepare_text, write_files

SHORT = Limits(0.5, 64 << 20)

TEXT = """{
  "name": "t",   "regions": [
    {"name": "eu", "hosts": [{"host": "localhost", "slots": 1, "device": "cpu"}]},
    {"name": "us", "hosts": [{"host": "localhost", "slots": 1, "device": "cpu"}]}
  ],
  "links": [
    {"regions": ["global", "eu"], "gbps": 0.1,   "usd_per_gb": 2e-2},
    {"regions": ["us", "global"], "rtt_ms": 10, "gbps": 0.02}
  ],
  "devices": {"cpu": {"tflops": 100.0, "memory_gb": 8}}
}
"""


def cluster_file(folder: Path, **more: Any) -> Path:
    path = folder / "cluster.json"
    path.write_text(json.dumps({**json.loads(TEXT), **more}, indent=1))
    return path


def test_only_the_figures_change() -> None:
    ways = {("eu", "global"): Way(31.0, 0.2, 0.12345678), ("eu", "us"): Way(5.0, 1.0, 2.0)}
    changed = json.loads(updated(TEXT, parse(ClusterConfig, json.loads(TEXT), "t"), ways, {"cpu": 0.25}))
    expected = json.loads(TEXT)
    expected["links"][0] |= {"gbps": 0.1235, "rtt_ms": 31.0}
    expected["links"].append({"regions": ["eu", "us"], "gbps": 1.0, "rtt_ms": 5.0})
    expected["devices"]["cpu"]["efficiency"] = 0.25
    assert changed == expected
    parse(ClusterConfig, changed, "t")


def test_links_that_cannot_be_emulated_are_not_probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wan, "cannot_emulate", lambda: "network namespaces need root")
    with pytest.raises(ConfigError, match="which cannot be here: network namespaces need root"):
        probe(cluster_file(tmp_path, emulate_links=True), None, SHORT, print)


def test_every_pair_over_tls(tmp_path: Path) -> None:
    path = cluster_file(tmp_path, security={"folder": str(tmp_path / "certs")})
    make_certificates(load_cluster(path), tmp_path / "certs")
    said: list[str] = []
    probe(path, None, SHORT, said.append)
    links = {frozenset(link.regions): link for link in load_cluster(path).links}
    assert set(links) == {frozenset(pair) for pair in (("eu", "us"), ("eu", "global"), ("us", "global"))}
    assert all(link.gbps not in (0.1, 0.02) and link.rtt_ms not in (0, 10) for link in links.values()), "measured"
    assert links[frozenset(("eu", "global"))].usd_per_gb == 0.02
    assert [line.split(":")[0] for line in said] == ["eu – global", "us – global", "eu – us"]
    (tmp_path / "certs/region-us.pem").unlink()
    before = path.read_text()
    with pytest.raises((ProbeError, CertificateError), match=r"us .*region-us.pem: cannot be read"):
        probe(path, None, SHORT, print)
    assert path.read_text() == before


@pytest.mark.long("geotrain/commands", "geotrain/emulate", "geotrain/net/transport")
@pytest.mark.root
@pytest.mark.slow
def test_emulated_links_are_measured_as_they_are(tmp_path: Path) -> None:
    asked = {("eu", "global"): (0.04, 20.0), ("us", "global"): (0.02, 5.0), ("eu", "us"): (0.05, 60.0)}
    links = [{"regions": pair, "gbps": gbps, "rtt_ms": rtt} for pair, (gbps, rtt) in asked.items()]
    left = set(asked)
    deadline_s = time.monotonic() + 500
    while left:  # a busy machine makes a link look slower than it is, never faster
        assert time.monotonic() < deadline_s, left
        # Anew each time: what was measured is written into the file, and would be emulated next.
        path = cluster_file(tmp_path, links=links, emulate_links=True)
        probe(path, None, Limits(2.0, 64 << 20), print)
        for link in load_cluster(path).links:
            gbps, rtt_ms = asked[link.regions]  # type: ignore[index]
            assert link.gbps <= 1.15 * gbps and link.rtt_ms >= rtt_ms, link
            if link.gbps >= 0.85 * gbps and link.rtt_ms <= 1.15 * rtt_ms + 2.0:
                left.discard(link.regions)  # type: ignore[arg-type]


def test_another_machine_by_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    stand_in(monkeypatch, tmp_path / "bin/ssh", SSH)
    hosts = [{"host": f"127.0.0.{i}", "slots": 8} for i in (2, 3)]
    region = {"name": "eu", "ssh": "eu.example.org", "server": {"host": "127.0.0.4", "port": free_port}}
    path = cluster_file(tmp_path, regions=[{**region, "hosts": hosts}], links=[], global_server={"host": "127.0.0.5"})
    told = list[str]()
    probe(path, None, SHORT, told.append)
    assert sum("gloo uses lo (127.0.0.1, " in line for line in told) == 2
    assert {link.regions for link in load_cluster(path).links} == {("eu", "global"), ("eu", "eu")}
    # To the region's machine; and from there to each of its hosts.
    assert (tmp_path / "bin/hosts.txt").read_text().split() == [
        *["eu.example.org"] * 2, "127.0.0.2", "eu.example.org", "127.0.0.3",
    ]  # fmt: skip


def test_an_unreachable_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, tmp_path / "bin/ssh", "#!/bin/bash\necho 'ssh: no route to host' >&2\nexit 255\n")
    region = {"name": "eu", "ssh": "eu.example.org", "hosts": [{"host": "n1", "slots": 8}]}
    path = cluster_file(tmp_path, regions=[region], links=[])
    before = path.read_text()
    with pytest.raises(
        ConfigError, match=r"'global' has the address 127.0.0.1:0, but eu.example.org is another machine"
    ):
        probe(path, None, SHORT, print)
    region["server"] = {"host": "127.0.0.4", "port": 7}
    path = cluster_file(tmp_path, regions=[region], links=[], global_server={"host": "127.0.0.5"})
    before = path.read_text()
    with pytest.raises(
        ProbeError, match=r"(?s)on eu.example.org is lost.*`ssh eu.example.org` needs no .*no route to"
    ):
        probe(path, None, SHORT, print)
    assert path.read_text() == before


def test_layers_are_left_out_until_the_model_fits(tmp_path: Path) -> None:
    raw = json.loads((Path(__file__).parents[2] / "configs/runs/70b.json").read_text())
    raw["model"]["config"] = json.loads((Path(__file__).parents[2] / "configs/models/llama-70b.json").read_text())
    raw["deepspeed"]["zero_optimization"]["reduce_bucket_size"] = "auto"
    (tmp_path / "run.json").write_text(json.dumps(raw))
    run = load_run(tmp_path / "run.json")
    small = reduced(run, 8, 80e9)
    assert small.parallel.pipeline == 1
    assert 1 <= small.model.config["num_hidden_layers"] < raw["model"]["config"]["num_hidden_layers"]
    assert "auto" not in json.dumps(small.deepspeed)
    assert small.deepspeed["train_batch_size"] % small.deepspeed["train_micro_batch_size_per_gpu"] == 0


def test_a_probe_keeps_what_shares_long_sequences() -> None:
    run = load_run(Path(__file__).parents[2] / "configs/runs/long-8b.json")
    whole, too_few = reduced(run, 8, 80e9), reduced(run, 4, 80e9)
    assert (whole.parallel.tensor, whole.parallel.context, whole.samples_per_step) == (2, 4, MICRO_BATCHES)
    assert (too_few.parallel.tensor, too_few.parallel.context) == (2, 1)


@pytest.mark.long("geotrain/commands", "geotrain/inner")
@pytest.mark.slow
def test_how_fast_a_run_trains(tmp_path: Path) -> None:
    prepare_text(tmp_path)
    run, _ = write_files(tmp_path, "run", 8, {"eu": [1]}, {})
    path = cluster_file(tmp_path, links=[])
    command = [sys.executable, "-m", "geotrain", "probe", str(path), "--run", str(run), "--seconds", "0.5"]
    done = subprocess.run(command, text=True, capture_output=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "cpu: a step of" in done.stdout and "2 layers, 1 ranks on localhost" in done.stdout
    assert 0 < load_cluster(path).devices["cpu"].efficiency < 0.01  # of 100 Tflop/s
