"""Machines by one command: tasks as data, and what the real SkyPilot says of them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from geotrain.commands.sky_tasks import Shipment, Wanted, cluster_of, machines_of, machines_of_plan, shipped, tasks_of
from geotrain.commands.up import Sky, SkyError, _signals_raised, start_and_follow, tear_down, up
from geotrain.config import ClusterConfig, ConfigError, load_run, parse
from geotrain.launch.launcher import placed
from geotrain.launch.run_rules import misfits
from geotrain.launch.terminal import new_console
from tests.support.command_line import say
from tests.support.sky_forks import sky_program
from tests.support.small_runs import prepare_text, write_files

ROOT = Path(__file__).parents[2]
GPUS = "aws:2x8xh100@us-east-2,gcp:8xa100@europe-west4"
# Of SkyPilot's catalogue: on demand, spot.
AWS = """\
InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone,Arch
p5.48xlarge,H100,8.0,192.0,2048.0,,55.04,20.5,us-east-2,us-east-2a,x86_64
p5.48xlarge,H100,8.0,192.0,2048.0,,55.04,30.5,us-east-2,us-east-2b,x86_64
p5.48xlarge,H100,8.0,192.0,2048.0,,66.04,,us-west-2,us-west-2b,x86_64
m6i.xlarge,,,4.0,16.0,,0.25,0.1,us-east-2,us-east-2a,x86_64
m6i.24xlarge,,,96.0,384.0,,4.5,2.0,us-east-2,us-east-2a,x86_64
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """The run "mine" on local data, of batches that 16 ranks can share."""
    prepare_text(tmp_path)
    path = write_files(tmp_path, "mine", 320, {"eu": [1]}, {"rule": {"name": "halos"}})[0]
    raw = json.loads(path.read_text())
    block = {**raw["deepspeed"], "train_batch_size": 16, "train_micro_batch_size_per_gpu": 1}
    path.write_text(json.dumps({**raw, "name": "mine", "deepspeed": block}))
    return path


@pytest.fixture(scope="module")
def sky_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """The real SkyPilot's programs, with a catalogue in files, no network, and no server that starts machines; and
    what they need in their environment."""
    skypilot = Path(sys.prefix) / "skypilot"
    subprocess.run(["bash", "launch/test_skypilot.sh", sys.executable, skypilot], cwd=ROOT, check=True, timeout=600)
    home = tmp_path_factory.mktemp("home")
    catalogue = home / ".sky/catalogs/v8/aws/vms.csv"
    catalogue.parent.mkdir(parents=True)
    catalogue.write_text(AWS)
    environment = {
        "HOME": str(home),
        "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
        "SKYPILOT_API_SERVER_ENDPOINT": "http://127.0.0.1:9",
    }
    with sky_program(skypilot, tmp_path_factory.mktemp("sky"), environment) as folder:
        yield folder, environment


@pytest.fixture
def sky(sky_folder: tuple[Path, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of SkyPilot's programs, which is on the PATH."""
    folder, environment = sky_folder
    for key, value in {**environment, "PATH": f"{folder}:/usr/bin:/bin"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.chdir(tmp_path)
    return folder


def tasks(run_file: Path, said: str, wanted: Wanted | None = None, ends_s: int | None = None) -> dict[str, Any]:
    run = load_run(run_file)
    machines = machines_of(said, wanted is not None and wanted.spot)
    shipment = Shipment(Path("/here"), {"files/0/a.bin": "/data/a.bin"}, "id", 18, Path("/checkout"), ends_s)
    return tasks_of(run, cluster_of(run, machines), machines, wanted or Wanted(), shipment)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("8xh100", "write CLOUD:[HOSTSx]COUNTxKIND[@REGION]"),
        ("aws:h100", "--gpu 'aws:h100': write CLOUD:"),
        ("aws:0xh100@x", "write CLOUD:"),
        ("aws:1000*8xh100@x", "write CLOUD:"),
        ("aws:8xh100@x,aws:4xa100@x", "names aws-x twice; a region is one entry"),
        ("slurm:8xh100@x", "slurm has no spot machines; leave --spot out"),
    ],
)
def test_machines_that_cannot_be_asked_for(said: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        machines_of(said, spot=True)


def test_a_task_a_region_and_one_for_the_global_server(run_file: Path) -> None:
    made = tasks(run_file, GPUS, Wanted(spot=True, results="s3://bucket/a/b"), ends_s=5000)
    top, aws, gcp = made.values()
    assert list(made) == ["global", "aws-us-east-2", "gcp-europe-west4"]
    assert top["resources"] == {
        "infra": "aws/us-east-2",
        "cpus": "4+",
        "memory": "18+",
        "ports": [7070],
        "autostop": {"idle_minutes": 60, "down": True},
    }
    assert "use_spot" not in top["resources"]  # it holds the run's weights
    assert gcp["resources"] == {
        "infra": "gcp/europe-west4",
        "accelerators": {"A100": 8},
        "use_spot": True,
        "job_recovery": {"strategy": "FAILOVER"},
    }
    assert (aws["num_nodes"], gcp["num_nodes"]) == (2, 1)
    assert top["file_mounts"]["/geotrain-results"] == {"source": "s3://bucket", "mode": "MOUNT_CACHED"}
    assert "geotrain export runs/mine /geotrain-results/a/b || code=$?\nexit $code" in top["run"]
    assert "left=$((5900 - $(date +%s)))" in aws["run"] and "timeout -s TERM $left geotrain launch" in aws["run"]
    # each machine has its own keys and no other's
    keys = {
        site: {Path(path).name for path in task["file_mounts"] if path.endswith(".key")}
        for site, task in made.items()
    }
    assert keys == {
        "global": {"global-global.key", "operator-operator.key"},
        "aws-us-east-2": {"region-aws-us-east-2.key", "worker-aws-us-east-2-w0.key"},
        "gcp-europe-west4": {"region-gcp-europe-west4.key", "worker-gcp-europe-west4-w0.key"},
    }
    assert not {"ports", "autostop"} & tasks(run_file, "slurm:2xcpu@here")["global"]["resources"].keys()
    hub = tasks(run_file, GPUS, Wanted(results="hf://me/mine", image="docker:geotrain"))
    assert hub["global"]["secrets"] == {"HF_TOKEN": None} and "runs/mine hf://me/mine ||" in hub["global"]["run"]
    assert all("setup" not in task and "workdir" not in task for task in hub.values())


def test_a_plan_gives_its_machines() -> None:
    def plan(others: Sequence[Any] = (), top: dict[str, Any] | None = None, **more: Any) -> ClusterConfig:
        hosts = [{"host": f"a{i}", "slots": 8, "device": "H100", "spot": True} for i in range(2)]
        worker = {"name": "w", "hosts": hosts, "parallel": {"tensor": 2}, **more}
        kinds = {kind: {"memory_gb": 80, "tflops": 989} for kind in ("H100", "A100")}
        workers = [worker, *others]
        raw = {"name": "p", "devices": kinds, "regions": [{"name": "aws-us-east-2", "workers": workers}]}
        return parse(ClusterConfig, {**raw, **(top or {})}, "plan")

    (found,) = machines_of_plan(plan())
    assert (found.infra, found.kind, found.hosts, found.slots, found.spot) == ("aws/us-east-2", "H100", 2, 8, True)
    run = load_run(ROOT / "configs/runs/1b.json")
    (region,) = cluster_of(run, (found,), plan()).regions
    assert region.workers[0].parallel is not None and region.workers[0].parallel.tensor == 2
    assert region.workers[0].name == "aws-us-east-2-w0"  # as its certificate
    assert region.workers[0].launcher == "ssh" and region.workers[0].ranks == 16
    other = {"name": "x", "hosts": [{"host": "b", "slots": 8, "device": "H100", "spot": True}]}
    shards = {"global_shards": [{}, {}, {}]}
    (found,) = machines_of_plan(plan([other], shards))
    assert found.hosts == 3
    cluster = cluster_of(run, (found,), plan([other], shards))
    assert [(w.name, len(w.hosts)) for _, w in cluster.workers] == [("aws-us-east-2-w0", 2), ("aws-us-east-2-w1", 1)]
    assert cluster.workers[0][1].parallel == region.workers[0].parallel and cluster.devices
    top, task = tasks_of(run, cluster, (found,), Wanted(), Shipment(Path("/here"), {}, "id", 18)).values()
    addresses = [cluster.global_server, *cluster.global_shards]
    assert top["resources"]["ports"] == [address.port for address in addresses] and len(addresses) == 4
    assert "~/geotrain-run/certs/shard-global.key" in top["file_mounts"] and task["num_nodes"] == 3
    assert "~/geotrain-run/certs/worker-aws-us-east-2-w1.key" in task["file_mounts"]
    with_hosts = placed(cluster, ("aws-us-east-2=a,b,c",))
    assert [[host.host for host in worker.hosts] for _, worker in with_hosts.workers] == [["a", "b"], ["c"]]
    mixed = [{"host": "a", "slots": 8, "device": "H100"}, {"host": "b", "slots": 8, "device": "A100"}]
    with pytest.raises(
        ConfigError, match="region 'aws-us-east-2': `geotrain up` asks for hosts with one kind of device"
    ):
        machines_of_plan(plan(hosts=mixed))


def test_files_go_along_and_urls_stay(run_file: Path) -> None:
    raw = load_run(run_file).model_dump(by_alias=True, mode="json", exclude_defaults=True)
    moved, copies = shipped(raw)
    prefix = moved["data"]["train"][0]["prefix"]
    assert {f"{prefix}.bin", f"{prefix}.idx"} <= copies.keys() and "folder" not in moved
    assert Path(copies[f"{prefix}.bin"]).exists()
    raw["data"]["train"] = "s3://bucket/train"
    assert shipped(raw)[0]["data"]["train"] == "s3://bucket/train"
    raw["data"]["train"] = "/none/train"
    with pytest.raises(ConfigError, match=r"data.train = '/none/train': nothing is there to copy to the machines"):
        shipped(raw)


@pytest.mark.parametrize("by_shell", [False, True])
def test_skypilot_takes_the_tasks_and_prices_them_from_its_catalogue(
    run_file: Path,
    sky: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    by_shell: bool,
) -> None:
    """by_shell: `sky` as installers write it where the interpreter's path does not fit its first line."""
    if by_shell:
        tool = tmp_path / "a tool"
        tool.mkdir()
        (tool / "python").symlink_to(sky / "python")
        (tool / "sky").write_text(f"#!/bin/sh\nexec '{sky}/sky' \"$@\"\n")
        (tool / "sky").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tool}:/usr/bin:/bin")
    wanted = Wanted("aws:2x8xh100@us-east-2", spot=True, results="s3://bucket", budget=100.0)
    told = up(run_file, None, wanted, dry_run=True)
    assert told.data["usd_per_hour"] == pytest.approx(2 * 30.5 + 0.25)  # of its zones the dearer
    shown = capsys.readouterr().out
    assert "mine-aws-us-east-2  aws/us-east-2  2 × 8 H100 spot  61.00" in shown and "100 USD last 1.63 hours" in shown
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys, sky\nfor task in json.load(sys.stdin):\n"
        " t = sky.Task.from_yaml_config(task); (r,) = t.resources\n"
        " print(t.num_nodes, r.region, r.use_spot, r.ports, r.accelerators, r.job_recovery)"
    )
    listed = subprocess.run(
        [sky / "python", script],
        input=json.dumps(list(told.data["tasks"].values())),
        capture_output=True,
        text=True,
        check=True,
    )
    assert listed.stdout.splitlines()[-2:] == [
        "1 us-east-2 False ['7070'] None None",
        "2 us-east-2 True None {'H100': 8} {'strategy': 'FAILOVER'}",
    ]


@pytest.mark.parametrize(
    ("gpu", "budget", "told"),
    [
        ("aws:8xh100@us-east-2", 1.0, "--budget 1: the machines cost 55.29 USD an hour"),
        ("aws:8xh100@mars-1", None, "SkyPilot refuses the tasks: .*: SkyPilot's catalogue has no .* in mars-1"),
        ("aws:8xa100@us-east-2", None, "mine-aws-us-east-2: SkyPilot's catalogue has no .*A100.* in us-east-2"),
        ("gcp:8xa100@europe-west4", 10.0, "--budget: SkyPilot knows no prices here"),
    ],
)
def test_what_cannot_be_had_is_told_before_anything_starts(
    run_file: Path, sky: Path, gpu: str, budget: float | None, told: str
) -> None:
    with pytest.raises((ConfigError, SkyError), match=told):
        up(run_file, None, Wanted(gpu, results="s3://bucket", budget=budget))
    assert not (load_run(run_file).run_folder / "up").exists()


def test_the_readmes_machines_are_to_be_had(sky: Path, tmp_path: Path) -> None:
    """By its line, with its run file, and data where its line before makes them."""
    texts = "".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(20))
    (tmp_path / "texts.jsonl").write_text(texts)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (line,) = re.findall(r"^geotrain (up .*)$", (ROOT / "README.md").read_text(), re.M)
    for words in (["prepare", "texts.jsonl", "--out", "data/web", "--bytes"], shlex.split(line)):
        done = say(*words, cwd=tmp_path)
        assert done.returncode == 0, done.text
    assert "aws/us-east-2 1 × 8 H100" in done.text and "gcp/europe-west4 1 × 8 A100" in done.text


def test_one_that_cannot_be_ended_is_named_and_keeps_no_other(run_file: Path, tmp_path: Path) -> None:
    class Stuck:
        def run(self, *words: str) -> tuple[int, str]:
            if words[0] == "down":
                raise SkyError("did not end")
            return int(words[-1] == "mine-us"), ""

    (tmp_path / "up/tasks").mkdir(parents=True)
    sites: Any = ("eu", "global", "us"), new_console()
    left = tear_down(cast(Sky, Stuck()), load_run(run_file), tmp_path / "up", *sites)
    assert left == ["mine-global", "mine-us"] and (tmp_path / "up/tasks").exists()


def test_what_cannot_be_started_is_torn_down(run_file: Path, sky: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SkyError, match=r"(?s)sky launch -y -d -c mine-global .* failed:\n[^']*Could not connect"):
        up(run_file, None, Wanted("aws:8xh100@us-east-2", results="s3://bucket"))
    shown = capsys.readouterr().out
    assert "sky down -y mine-global: " in shown and "sky jobs cancel -y -n mine-aws-us-east-2: " in shown
    folder = load_run(run_file).run_folder.absolute() / "up"
    assert {path.stem for path in (folder / "tasks").iterdir()} == {"global", "aws-us-east-2"}
    assert (folder / "certs/region-aws-us-east-2.key").exists()
    with pytest.raises(
        ConfigError, match=r"up/tasks: machines were started, and not ended: `geotrain up RUN --down`"
    ):
        up(run_file, None, Wanted("aws:8xh100@us-east-2", results="s3://bucket"))
    assert up(run_file, None, Wanted(), down=True).data == {"left": ["mine-aws-us-east-2", "mine-global"]}


def test_a_budget_alone_gets_machines(run_file: Path, sky: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = up(run_file, None, Wanted(budget=400.0), dry_run=True)
    shown = capsys.readouterr().out
    assert "hours (" in shown and "USD an hour; 400 USD last" in shown
    top, first, *_ = told.data["tasks"].values()
    assert first["resources"] == {"infra": "aws/us-east-2", "accelerators": {"H100": 8}}
    assert top["resources"]["infra"] == "aws/us-east-2"
    assert 0 < told.data["usd_per_hour"] < 400


@pytest.mark.parametrize(
    "said",
    ["aws:2x8xh100@a,gcp:2x8xa100@b", "aws:2*8xh100@a,aws:8xh100@a", "gcp:2*8xh100@northamerica-northeast1-a"],
)
def test_several_regions_have_hosts_of_their_own(run_file: Path, said: str) -> None:
    cluster = cluster_of(load_run(run_file), machines_of(said))
    assert not list(misfits(load_run(run_file), cluster))


def test_a_name_that_is_taken_is_told(run_file: Path) -> None:
    with pytest.raises(ConfigError, match="no region or worker may be called 'global'"):
        cluster_of(load_run(run_file), machines_of("global:8xh100"))


def test_a_machine_that_is_a_region_of_its_own_is_brought_back_alone(run_file: Path) -> None:
    _, *regions = tasks(run_file, "aws:3*8xh100@us-east-2", Wanted(spot=True)).values()
    assert [task["name"] for task in regions] == [f"mine-aws-us-east-2-{n}" for n in range(3)]
    for task in regions:  # a managed job each, which ends and begins without the others
        assert (task["num_nodes"], task["resources"]["infra"]) == (1, "aws/us-east-2")
        assert f"--only {task['name'].removeprefix('mine-')} " in task["run"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_the_start_tears_down(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    calls, program = tmp_path / "calls", tmp_path / "bin/sky"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\nimport os, sys, time\nopen({str(calls)!r}, 'a')"
        ".write(' '.join(sys.argv[1:3]) + '\\n')\n"
        f"if sys.argv[1] == 'launch':\n os.kill(os.getppid(), {number})\n time.sleep(60)\n"
        f"if sys.argv[1] == 'down':\n os.kill(os.getppid(), {number})\n time.sleep(1)\n"
    )
    program.chmod(0o755)
    tasks_folder = tmp_path / "up/tasks"
    tasks_folder.mkdir(parents=True)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    run, tasks_now = load_run(run_file), {"global": {}, "aws-x": {}}
    inherited = signal.signal(number, signal.SIG_DFL)  # under nohup SIGHUP is ignored, and stays so
    try:
        with pytest.raises(SystemExit) as ended, _signals_raised():
            start_and_follow(Sky(), run, tmp_path / "up", tasks_now, new_console())
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, inherited)
    assert ended.value.code == 128 + number
    assert calls.read_text().splitlines() == ["launch -y", "down -y", "jobs cancel"]
    assert not tasks_folder.exists(), "nothing is left to end"


def test_without_skypilot_one_is_told_where_to_get_it(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SkyError, match=r"there is no program `sky`.*uv tool install"):
        up(run_file, None, Wanted("aws:8xh100@us-east-2"), dry_run=True)
