"""The manifests for Kubernetes: by its official schema, and by the files, parsers and servers that they speak of. No
cluster is here: that pods start, and find each other, is not tested."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from geotrain.commands import cli
from geotrain.commands.configs import copy_configs
from geotrain.commands.dry_run import needs
from geotrain.common.names import GLOBAL
from geotrain.config import EXIT_FOR_GOOD, Topology, load_cluster, load_run, shards_of
from geotrain.launch.check import check_together
from geotrain.launch.guard import GRACE_S, KILL_DEADLINE_S
from geotrain.launch.host_rules import SHM_BYTES
from geotrain.launch.launchers.base import SCRIPT, WorkerPlace
from geotrain.launch.launchers.registry import worker_commands
from geotrain.net.transport.authority import make_certificates
from tests.support.process_trees import until
from tests.support.small_runs import MODEL

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs/kubernetes"
VERSIONS = "1.29", "1.31", "1.34", "1.37"
RUN, CERTS, STATE, DATA = "/etc/geotrain/run", "/etc/geotrain/certs", "/runs", "/data"
IMAGE_ROOT = Path("/opt/geotrain")
UNITS = {"Gi": 1 << 30, "Ti": 1 << 40}
UID = "5ac0b4e6-0b5e-4f6b-9a53-1d2f1c8f4d11"  # of a Job
SHIPPED = "us-east"  # the region of region.yaml and worker.yaml
FILES = load_run(FOLDER / "run.json"), load_cluster(FOLDER / "cluster.json")
REGIONS = [region.name for region in FILES[1].regions]
Manifest = dict[str, Any]


@pytest.fixture(autouse=True, scope="module")
def schemas_are_read_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kubernetes_validate.utils, "schema_contents", cache(kubernetes_validate.utils.schema_contents))
        yield


def read(name: str, region: str = SHIPPED) -> list[Manifest]:
    """The documents of a file, for a region: by the replacement that its first line names, if it is of a region."""
    text = (FOLDER / name).read_text()
    assert (SHIPPED in text) == (f"sed s/{SHIPPED}/NAME/g" in text.splitlines()[0])
    return list(yaml.safe_load_all(text.replace(SHIPPED, region)))


def everything(region: str = SHIPPED) -> list[Manifest]:
    return [d for name in ("global.yaml", "region.yaml", "worker.yaml") for d in read(name, region)]


def of_kind(manifests: list[Manifest], *kinds: str) -> dict[str, Manifest]:
    found = [m for m in manifests if m["kind"] in kinds]
    named = {m["metadata"]["name"]: m for m in found}
    assert len(named) == len(found)
    return named


def pod(workload: Manifest) -> Manifest:
    spec: Manifest = workload["spec"]["template"]["spec"]
    return spec


def container(workload: Manifest) -> Manifest:
    (only,) = pod(workload)["containers"]
    return only  # type: ignore[no-any-return]


def mounts(workload: Manifest) -> dict[str, Manifest]:
    """Mount path → its volume. Of a StatefulSet, also those that it makes for each pod."""
    volumes = {v["name"]: v for v in pod(workload)["volumes"]}
    volumes |= {c["metadata"]["name"]: c for c in workload["spec"].get("volumeClaimTemplates", ())}
    found = {m["mountPath"]: volumes.pop(m["name"]) for m in container(workload)["volumeMounts"]}
    assert not volumes, "nobody mounts them"
    return found


def size(text: str) -> int:
    return int(text[:-2]) * UNITS[text[-2:]]


def claimed(claim: Manifest) -> int:
    return size(claim["spec"]["resources"]["requests"]["storage"])


def words_of(workload: Manifest, index: int = 0) -> list[str]:
    """The command of the workload's pod of that number, variables filled in as the kubelet does."""
    labels = {
        "apps.kubernetes.io/pod-index": str(index),
        "batch.kubernetes.io/job-completion-index": str(index),
        "batch.kubernetes.io/controller-uid": UID,
    }
    values = {}
    for variable in container(workload).get("env", ()):
        path = variable["valueFrom"]["fieldRef"]["fieldPath"]
        values[variable["name"]] = labels[path.removeprefix("metadata.labels['").removesuffix("']")]
    return [re.sub(r"\$\((\w+)\)", lambda m: values[m[1]], word) for word in container(workload)["command"]]


def documented_files() -> dict[str, set[str]]:
    """ConfigMap or Secret → the files that docs/operations.md puts into it."""
    text = (ROOT / "docs/operations.md").read_text().partition("## Kubernetes")[2].partition("\n## ")[0]
    named = re.findall(r"create (?:configmap|secret generic) (\S+) ((?:[^\n]*\\\n)*[^\n]*)", text)
    return {name: set(re.findall(r"--from-file=(\S+)", rest)) for name, rest in named}


# ------------------------------------------------------------------------------------------ the official schema


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda p: p.name)
def test_every_manifest_is_as_the_official_schema_has_it(path: Path, version: str) -> None:
    manifests = read(path.name)
    assert manifests
    for manifest in manifests:
        assert kubernetes_validate.validate(manifest, version, strict=True) == version
        with pytest.raises(kubernetes_validate.ValidationError, match="labls"):
            kubernetes_validate.validate(
                {**manifest, "metadata": {**manifest["metadata"], "labls": {}}}, version, strict=True
            )


# ------------------------------------------------------------------------------------------ the product's files


def test_the_files_beside_them_are_a_run_that_its_cluster_can_train() -> None:
    check_together(*FILES)
    run, cluster = FILES
    assert str(run.run_folder).startswith(f"{STATE}/") and run.checkpoint_folder.is_relative_to(run.run_folder)
    assert cluster.security is not None and cluster.security.folder == CERTS
    assert all(each.startswith(f"{DATA}/") for each in (*run.data.prefixes, str(run.data.tokenizer)))


def test_they_are_packaged_and_copied(tmp_path: Path) -> None:
    copy_configs(tmp_path / "configs")
    files = {path.name: path.read_bytes() for path in FOLDER.iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "configs/kubernetes").iterdir()} == files
    (globs,) = re.findall(r'"geotrain.configs": (\[.*\])', (ROOT / "setup.py").read_text())
    packaged = {
        path.name for glob in json.loads(globs) for path in (ROOT / "configs").glob(glob) if path.parent == FOLDER
    }
    assert packaged == set(files)


@pytest.mark.parametrize("region", REGIONS)
def test_who_listens_is_found_under_the_name_and_port_of_the_cluster_file(region: str) -> None:
    run, cluster = FILES
    manifests = everything(region)
    services, workloads = of_kind(manifests, "Service"), of_kind(manifests, "Job", "StatefulSet")
    for site in (GLOBAL, region):
        server, shards = workloads.pop(f"geotrain-{site}"), workloads.pop(f"geotrain-{site}-shard")
        assert shards["spec"]["replicas"] == len(shards_of(cluster, site)) > 1
        assert shards["spec"]["serviceName"] in services
        for workload, addresses in (
            (server, (Topology(run, cluster).servers[site],)),
            (shards, shards_of(cluster, site)),
        ):
            (port,) = container(workload)["ports"]
            assert container(workload)["readinessProbe"]["tcpSocket"]["port"] == port["name"]
            (alias,) = pod(workload)["hostAliases"]  # in their own pods these names are all addresses
            assert alias == {"ip": "0.0.0.0", "hostnames": [a.host for a in addresses]}
            for number, address in enumerate(addresses):
                pod_name = f"{workload['metadata']['name']}-{number}"
                labels = workload["spec"]["template"]["metadata"]["labels"]
                if workload is shards:
                    labels = {**labels, "statefulset.kubernetes.io/pod-name": pod_name}
                name, _, domain = address.host.partition(".")
                service = services[domain or name]["spec"]
                if domain:  # of one pod, by its name in a headless service
                    assert name == pod_name and service["clusterIP"] == "None"
                assert service["selector"].items() <= labels.items()
                assert [p["port"] for p in service["ports"]] == [address.port] == [port["containerPort"]]
                if workload is shards and not domain:
                    assert service["selector"] == {"statefulset.kubernetes.io/pod-name": pod_name}
    assert list(workloads) == [w.name.join(("geotrain-", "")) for w in cluster.region(region).workers]


def test_other_clusters_know_the_global_server_and_its_shards() -> None:
    _, cluster = FILES
    names = of_kind(read("elsewhere.yaml"), "Service")
    assert set(names) == {a.host for a in (cluster.global_server, *cluster.global_shards)}
    here = of_kind(read("global.yaml"), "Service")
    for name, service in names.items():
        assert service["spec"]["type"] == "ExternalName" and here[name]["spec"]["type"] == "LoadBalancer"


@pytest.mark.parametrize("region", REGIONS)
def test_all_paths_are_mounted_and_all_volumes_are_there(region: str) -> None:
    manifests = everything(region)
    claims = of_kind(manifests, "PersistentVolumeClaim")
    for name, workload in of_kind(manifests, "Job", "StatefulSet").items():
        site = GLOBAL if name.startswith("geotrain-global") else region
        volumes = mounts(workload)
        assert volumes[RUN]["configMap"] == {"name": "geotrain-run"}
        assert volumes[CERTS]["secret"] == {"secretName": f"geotrain-certs-{site}", "defaultMode": 0o400}
        assert STATE in volumes and (DATA in volumes) == ("-w" in name)
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                claims.pop(volume["persistentVolumeClaim"]["claimName"])
        read_only = {m["mountPath"] for m in container(workload)["volumeMounts"] if m.get("readOnly")}
        assert read_only == set(volumes) - {STATE, "/dev/shm"}
    assert not claims, "nobody mounts them"


def test_each_server_has_the_memory_and_the_disk_that_dry_run_asks_for() -> None:
    wanted = needs(*FILES).servers
    for region in REGIONS:
        manifests = everything(region)
        workloads = of_kind(manifests, "Job", "StatefulSet")
        claims = of_kind(manifests, "PersistentVolumeClaim")
        for site in (GLOBAL, region):
            shards = workloads[f"geotrain-{site}-shard"]
            number, (claim,) = shards["spec"]["replicas"], shards["spec"]["volumeClaimTemplates"]
            parts = [(workloads[f"geotrain-{site}"], 1), (shards, number)]
            for workload, _ in parts:
                resources = container(workload)["resources"]
                assert resources["requests"]["memory"] == resources["limits"]["memory"]
            memory = sum(size(container(w)["resources"]["limits"]["memory"]) * n for w, n in parts)
            assert memory >= wanted[site].memory_bytes
            assert claimed(claims[f"geotrain-{site}"]) + number * claimed(claim) >= wanted[site].disk_bytes


# ------------------------------------------------------------------------------------------ commands


@pytest.mark.parametrize("region", REGIONS)
def test_servers_and_shards_are_started_as_the_command_line_takes_it(region: str) -> None:
    _, cluster = FILES
    app: Any = typer.main.get_command(cli.app)
    workloads, started = of_kind(everything(region), "Job", "StatefulSet"), []
    for name, workload in workloads.items():
        if "-w" in name:
            continue
        for number in range(workload["spec"].get("replicas", 1)):
            program, *words = words_of(workload, number)
            assert program == "geotrain" and words[0] == "serve"
            group = app.commands["serve"]
            command = group.commands[words[1]]
            context = command.make_context(words[1], words[2:])  # raises where the words are not its own
            assert context.params.pop("run") == Path(RUN) / "run.json"
            assert context.params.pop("resume") and context.params.pop("cluster") is None
            # A Job's pods are of one launch; a StatefulSet starts shards again for ever, and they end by their
            # coordinator.
            assert workload["kind"] == "StatefulSet" or context.params.pop("launch_id") == UID
            started.append((words[1], *context.params.values()))
    wanted: list[tuple[Any, ...]] = [("global",), ("region", region)]
    wanted += [("shard", site, i) for site in (GLOBAL, region) for i in range(len(shards_of(cluster, site)))]
    assert sorted(started, key=str) == sorted(wanted, key=str)


@pytest.mark.parametrize("region", REGIONS)
def test_ranks_are_started_as_the_launcher_starts_them_on_each_host(
    region: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.launcher import launch, runner

    from geotrain.launch.pretrain import arguments

    _, cluster = FILES
    (worker,) = cluster.region(region).workers
    (job,) = of_kind(read("worker.yaml", region), "Job").values()
    services = of_kind(read("worker.yaml", region), "Service")
    spec, name = job["spec"], job["metadata"]["name"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == len(worker.hosts)
    domain = pod(job)["subdomain"]
    assert services[domain]["spec"]["publishNotReadyAddresses"] and services[domain]["spec"]["clusterIP"] == "None"
    assert services[domain]["spec"]["selector"] == spec["template"]["metadata"]["labels"]
    assert [h.host for h in worker.hosts] == [f"{name}-{i}.{domain}" for i in range(len(worker.hosts))]
    assert {h.slots for h in worker.hosts} == {container(job)["resources"]["limits"]["nvidia.com/gpu"]}

    place = WorkerPlace(Path(RUN), worker.master_port or 0, resume=True)
    ours = worker_commands(place, region, worker)
    (hostfile,) = ours.files.values()
    assert (FOLDER / f"{worker.name}.hosts").read_text() == hostfile
    for number, launcher in enumerate(ours.commands):
        words = words_of(job, number)
        split = words.index("--")
        assert words[:split] == ["python", "-m", "geotrain.launch.guard"] and container(job)["stdin"] is True
        assert words[split + 1] == "deepspeed"
        theirs = runner.parse_args(words[split + 2 :])
        monkeypatch.setattr(sys, "argv", list(launcher.command[launcher.command.index(launch.__name__) :]))
        own = launch.parse_args()
        assert Path(theirs.hostfile) == Path(RUN) / f"{worker.name}.hosts" and theirs.no_ssh
        slots = runner.fetch_hostfile(FOLDER / f"{worker.name}.hosts")
        world = runner.parse_inclusion_exclusion(slots, theirs.include, theirs.exclude)
        assert runner.encode_world_info(world) == own.world_info
        assert Path(theirs.user_script) == IMAGE_ROOT / SCRIPT.relative_to(ROOT)
        assert Path(own.training_script) == SCRIPT
        parsed = []
        for said in (theirs.user_args, own.training_script_args):
            monkeypatch.setattr(sys, "argv", ["pretrain.py", *said])
            parsed.append(vars(arguments()))
        assert parsed[0] == parsed[1] and parsed[0]["resume"]
        assert theirs.node_rank == own.node_rank == number
        (port,) = container(job)["ports"]
        assert theirs.master_port == own.master_port == port["containerPort"]
        assert theirs.master_addr == own.master_addr == worker.hosts[0].host
    for containers in (ROOT / "containers").glob("*.Dockerfile"):
        assert f"WORKDIR {IMAGE_ROOT}\n" in containers.read_text()
        assert f"ENV PATH={IMAGE_ROOT}/.venv/bin:" in containers.read_text()


@pytest.mark.parametrize("region", REGIONS)
def test_what_a_person_must_mend_is_not_tried_again_and_ends_are_waited_for(region: str) -> None:
    for name, job in of_kind(everything(region), "Job").items():
        assert pod(job)["restartPolicy"] == "Never" and job["spec"]["podReplacementPolicy"] == "Failed"
        mend, moved = job["spec"]["podFailurePolicy"]["rules"]
        codes = {"containerName": container(job)["name"], "operator": "In", "values": [EXIT_FOR_GOOD]}
        assert mend == {"action": "FailJob", "onExitCodes": codes}
        assert moved["action"] == "Ignore" and moved["onPodConditions"][0]["type"] == "DisruptionTarget"
        assert pod(job)["terminationGracePeriodSeconds"] > GRACE_S + KILL_DEADLINE_S
        if "-w" in name:
            memory = mounts(job)["/dev/shm"]["emptyDir"]
            assert memory["medium"] == "Memory" and size(memory["sizeLimit"]) >= SHM_BYTES


def test_other_pods_do_not_reach_the_ranks() -> None:
    (policy,) = of_kind(read("worker.yaml"), "NetworkPolicy").values()
    (job,) = of_kind(read("worker.yaml"), "Job").values()
    ranks = {"matchLabels": job["spec"]["template"]["metadata"]["labels"]}
    assert policy["spec"] == {
        "podSelector": ranks, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": ranks}]}]
    }  # fmt: skip


def test_secrets_and_the_config_map_get_all_files_that_processes_look_for() -> None:
    """And no others: a host has its own keys only."""
    files = documented_files()
    hosts = {f"{w.name}.hosts" for region in FILES[1].regions for w in region.workers}
    assert files["geotrain-run"] == {"run.json", "cluster.json", *hosts}
    pairs = {
        GLOBAL: ["global-global", "shard-global", "operator-operator"],
        SHIPPED: [f"region-{SHIPPED}", f"shard-{SHIPPED}", f"worker-{SHIPPED}-w0"],
    }
    for site, stems in pairs.items():
        wanted = {f"certs/{stem}.{end}" for stem in stems for end in ("pem", "key")}
        assert files[f"geotrain-certs-{site}"] == {"certs/ca.pem", *wanted}


# ------------------------------------------------------------------------------------------ a pod without a cluster


# A root folder as a container's: this machine's, with the pod's own /etc/hosts and mounts ("source=target"). No
# network but loopback, so that nobody else has the port.
POD = """
set -eu
root=$1 hosts=$2
shift 2
ip link set lo up
mount -t tmpfs tmpfs "$root"
for entry in /*; do
  if [ -L "$entry" ]; then cp -P "$entry" "$root/"
  elif [ "$entry" = /etc ]; then cp -a /etc "$root/"
  elif [ -d "$entry" ]; then mkdir "$root$entry"; mount --rbind "$entry" "$root$entry"
  fi
done
printf '%s\\n' "$hosts" > "$root/etc/hosts"
while [ "$1" != -- ]; do
  mkdir -p "$root${1#*=}"
  mount --bind "${1%%=*}" "$root${1#*=}"
  shift
done
shift
exec chroot "$root" "$@"
"""


def listening(pid: int) -> set[tuple[str, int]]:
    """(address, port) of the TCP sockets that listen in this process's network, IPv4 and 6."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            address, _, port = line.split()[1].partition(":")
            if line.split()[3] == "0A":
                found.add((address, int(port, 16)))
    return found


@pytest.mark.root
@pytest.mark.long("configs/kubernetes", "geotrain/net/server", "geotrain/net/transport")
def test_a_server_and_a_shard_listen_in_pods_of_their_own_and_end_when_told(tmp_path: Path) -> None:
    """The manifests' own commands, volumes, certificates and host aliases, on a small model. The server's shards
    are not there: it ends nevertheless."""
    run = json.loads((FOLDER / "run.json").read_text())
    run["model"]["config"] = MODEL
    files, secrets = tmp_path / "run", tmp_path / "certs"
    files.mkdir()
    (files / "run.json").write_text(json.dumps(run))
    shutil.copy(FOLDER / "cluster.json", files)
    make_certificates(FILES[1], secrets)
    pods: dict[str, tuple[subprocess.Popen[bytes], int, Path]] = {}
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    try:
        workloads = of_kind(everything(), "Job", "StatefulSet")
        for name in ("geotrain-global", f"geotrain-{SHIPPED}-shard"):  # a name without and one with a dot
            workload, folder = workloads[name], tmp_path / name
            sources = {RUN: files, CERTS: folder / "certs", STATE: folder / "state"}
            for each in (folder / "root", *list(sources.values())[1:]):
                each.mkdir(parents=True)
            for file in documented_files()[mounts(workload)[CERTS]["secret"]["secretName"]]:
                shutil.copy(secrets / Path(file).name, sources[CERTS])
            (alias,) = pod(workload)["hostAliases"]
            hosts = " ".join([alias["ip"], *alias["hostnames"]])
            binds = [f"{sources[path]}={path}" for path in mounts(workload)]
            command = ["unshare", "--mount", "--net", "--propagation", "private", "sh", "-c", POD, "pod"]
            command += [str(folder / "root"), hosts, *binds, "--", *words_of(workload)]
            with (folder / "log").open("wb") as log:
                process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
            pods[name] = process, container(workload)["ports"][0]["containerPort"], folder / "log"
        for name, (process, port, log) in pods.items():
            any_address = {("0" * 8, port), ("0" * 32, port), ("0" * 16 + "FFFF0000" + "0" * 8, port)}
            assert until(lambda: process.poll() is not None or bool(any_address & listening(process.pid)), 120.0)  # noqa: B023
            assert process.poll() is None, f"{name}: {log.read_text()}"
        for process, _, _ in pods.values():
            process.send_signal(signal.SIGTERM)
        assert {name: process.wait(120) for name, (process, _, _) in pods.items()} == dict.fromkeys(pods, 0)
    finally:
        for process, _, _ in pods.values():
            process.kill()
            process.wait()
