"""The manifests for Kubernetes: by its official schema, and by the files, parsers and servers that they speak of. No
cluster is here: that pods start, and find each other, is not tested."""

from __future__ import annotations

import json
import re
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
from geotrain.config import load_cluster, load_run, shards_of
from geotrain.launch.check import check_together

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs/kubernetes"
VERSIONS = "1.29", "1.31", "1.34", "1.37"
RUN, CERTS, STATE, DATA = "/etc/geotrain/run", "/etc/geotrain/certs", "/runs", "/data"
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
