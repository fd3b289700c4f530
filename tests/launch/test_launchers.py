"""The commands that start a worker: their text, and what DeepSpeed's launcher makes of them."""

import base64
import json
import os
import signal
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from geotrain.common.names import SHARE_DEVICES
from geotrain.config import ConfigError, HostConfig, WorkerConfig
from geotrain.launch.launchers.base import SCRIPT, LauncherCommand, WorkerCommands, WorkerPlace, hostfile_path
from geotrain.launch.launchers.registry import launcher_of, launchers, worker_commands
from geotrain.launch.launchers.ssh import Ssh
from geotrain.launch.machine import HostMachine, assign_devices
from geotrain.launch.supervisor import guarded_there
from tests.support.programs import program

TELL_RANKS = """
import json, os, sys
from geotrain.launch.launchers.registry import launchers
from geotrain.launch.rank_environment import rank_environment
env = {**os.environ, **rank_environment(os.environ, launchers()["LAUNCHER"])}
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "WHO")
os.write(1, (json.dumps({name: env.get(name) for name in names}) + "\\n").encode())
"""

# Stand-ins for the programs that DeepSpeed's launchers call: they start the ranks on this machine.
FAKE = {
    "srun": """
import os, subprocess, sys
options = dict(a.split("=", 1) for a in sys.argv[1 : sys.argv.index("-u")] if a.startswith("--"))
nodes, per_node = int(options["--nodes"]), int(options["--ntasks-per-node"])
assert len(options["--nodelist"].split(",")) == nodes and options["--export"].startswith("ALL")
assert sys.argv[sys.argv.index("-n") + 1] == str(nodes * per_node)
command = sys.argv[sys.argv.index("-u") - 1 :]
for rank in range(nodes * per_node):
    ids = {"SLURM_PROCID": rank, "SLURM_NTASKS": nodes * per_node, "SLURM_LOCALID": rank % per_node}
    subprocess.check_call(command, env={**os.environ, **{k: str(v) for k, v in ids.items()}})
""",
    "mpirun": """
import os, subprocess, sys
count = int(sys.argv[sys.argv.index("-n") + 1])
exports = dict(sys.argv[i + 1].split("=", 1) for i, a in enumerate(sys.argv) if a == "-x")
command = sys.argv[sys.argv.index("-u") - 1 :]
for rank in range(count):
    ids = {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": count, "OMPI_COMM_WORLD_LOCAL_RANK": 0}
    subprocess.check_call(command, env={**os.environ, **exports, **{k: str(v) for k, v in ids.items()}})
""",
    "sinfo": "",
    "ompi_info": "",
}


def worker(launcher: str = "local", hosts: dict[str, int] | None = None, **more: Any) -> WorkerConfig:
    slots = hosts or {"localhost": 2}
    all_hosts = tuple(HostConfig(host=host, slots=count) for host, count in slots.items())
    return WorkerConfig(name="eu-0", hosts=all_hosts, launcher=launcher, **more)


def only_job(made: WorkerCommands) -> LauncherCommand:
    (job,) = made.commands
    return job


def options_of(job: LauncherCommand) -> str:
    """The command without the program, for reading."""
    assert job.command[0].endswith("deepspeed")
    return " ".join(job.command[1:])


def one_host(job: LauncherCommand) -> tuple[dict[str, list[int]], str]:
    """Read a command of DeepSpeed's launcher of one host: host → devices, and the other options."""
    program, world, options = job.command[:6], job.command[6], job.command[7:]
    assert program == (sys.executable, "-u", "-P", "-m", "geotrain.launch.loading", "deepspeed.launcher.launch")
    return json.loads(base64.urlsafe_b64decode(world.removeprefix("--world_info="))), " ".join(options)


def test_a_local_worker_on_the_cpu() -> None:
    made = worker_commands(WorkerPlace(Path("/runs/x"), 29511, threads=3), "eu", worker(env={"A": "b c"}))
    job = only_job(made)
    world, options = one_host(job)
    assert world == {"localhost": [0, 1]}
    assert options == (
        "--node_rank 0 --master_addr 127.0.0.1 --master_port 29511 "
        f"{SCRIPT} --run /runs/x/run.json --region eu --worker eu-0"
    )
    assert made.files == {"hosts/eu-0": "localhost slots=2\n"}
    assert (job.name, job.host) == ("eu-0", None)
    assert job.env["DS_ACCELERATOR"] == "cpu"
    assert job.env["OMP_NUM_THREADS"] == "3"
    assert job.env["A"] == "b c"


def test_a_local_worker_on_some_devices() -> None:
    made = worker_commands(WorkerPlace(Path("/runs/x"), 29511, devices=(2, 5), resume=True), "eu", worker())
    job = only_job(made)
    world, options = one_host(job)
    assert world == {"localhost": [2, 5]}
    assert options.endswith("--worker eu-0 --resume")
    assert made.files == {"hosts/eu-0": "localhost slots=2\n"}
    assert "DS_ACCELERATOR" not in job.env


def test_over_ssh_each_host_has_its_launcher() -> None:
    made = worker_commands(
        WorkerPlace(Path("/runs/x"), 29500), "eu", worker("ssh", {"n1": 8, "n2": 8}, env={"A": "b"})
    )
    assert made.files == {"hosts/eu-0": "n1 slots=8\nn2 slots=8\n"}
    assert [(job.name, job.host) for job in made.commands] == [("eu-0.0", "n1"), ("eu-0.1", "n2")]
    world, options = one_host(made.commands[1])
    assert world == {"n1": list(range(8)), "n2": list(range(8))}
    assert options.startswith("--node_rank 1 --master_addr n1 --master_port 29500 ")
    assert made.commands[1].env == {"A": "b"}


def test_a_launcher_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds it in the folder, or among what other packages register."""
    assert sorted(launchers()) == ["impi", "local", "mpich", "openmpi", "pdsh", "slurm", "ssh"]
    with pytest.raises(ConfigError, match=r"worker 'eu-0': launcher = 'slrum': did you mean 'slurm'\?"):
        launcher_of(worker("slrum"))
    point = EntryPoint("far", "geotrain.launch.launchers.ssh:Ssh", "geotrain.launchers")
    monkeypatch.setattr("geotrain.common.entry_points.entry_points_on", lambda *_: EntryPoints([point]))
    assert isinstance(launcher_of(worker("far")), Ssh)


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi", "mpich", "impi"])
def test_deepspeeds_own_launchers(launcher: str) -> None:
    more = {"env": {"NCCL_IB_HCA": "mlx5_0,mlx5_1"}, "launcher_args": "--mca x y"}
    made = worker_commands(WorkerPlace(Path("/runs/x"), 29501), "eu", worker(launcher, {"n1": 8, "n2": 8}, **more))
    job = only_job(made)
    text = options_of(job)
    assert f"--master_addr n1 --master_port 29501 --launcher {launcher} --force_multi " in text
    assert ("--no_ssh_check" in text) == (launcher != "pdsh")
    assert "--launcher_args=--mca x y" in job.command
    assert job.env == {"DS_ENV_FILE": "/runs/x/hosts/eu-0.env"}
    assert made.files["hosts/eu-0.env"] == "MASTER_ADDR=n1\nMASTER_PORT=29501\nNCCL_IB_HCA=mlx5_0,mlx5_1\n"


def test_slurm_hands_the_environment_on() -> None:
    more = {"env": {"NCCL_IB_HCA": "mlx5_0,mlx5_1"}, "launcher_args": "--partition=long"}
    made = worker_commands(WorkerPlace(Path("/runs/x"), 29501), "eu", worker("slurm", {"n1": 8, "n2": 8}, **more))
    job = only_job(made)
    assert "--launcher_args=--nodes=2 --ntasks-per-node=8 --nodelist=n1,n2 --partition=long" in job.command
    assert job.env == {"MASTER_ADDR": "n1", "MASTER_PORT": "29501", "NCCL_IB_HCA": "mlx5_0,mlx5_1"}
    assert list(made.files) == ["hosts/eu-0"]


def test_no_secret_stands_on_a_command_line() -> None:
    """Everybody on a machine can read those; what runs gets it by standard input, from `guard --env`."""
    env = {"HF_TOKEN": "s3cret", "CC": "clang 'x", "TOKENIZERS_PARALLELISM": "0"}
    for launcher in ("ssh", "pdsh"):
        asks = launcher_of(worker(launcher)).inquiry(worker(launcher, env=env), ("a",), ("look",))
        assert asks is not None
        line = " ".join(asks.command)
        assert "s3cret" not in line and "clang" in line and "TOKENIZERS_PARALLELISM=0" in line
    script = "import os; print(os.environ['HF_TOKEN'], os.environ['CC'], open('/proc/self/cmdline').read())"
    command, first = guarded_there((sys.executable, "-c", script), env)
    assert "s3cret" not in " ".join(command)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as there:
        assert there.stdin is not None and there.stdout is not None
        there.stdin.write(first)
        there.stdin.flush()
        said = there.stdout.read().decode()
    assert there.returncode == 0 and said.startswith("s3cret clang 'x ")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as alone:
        assert alone.communicate(first[:-3], timeout=60)[0] == b"" and alone.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (worker("local", {"a": 1, "b": 1}), "hosts has 2 entries; keep one"),
        (worker("slurm", {"a": 1, "b": 2}), "slurm needs the same slots on every host"),
        (worker("pdsh", {"a": 1}, env={"A": "b c"}), "env.A = 'b c': DeepSpeed's launchers pass no spaces"),
        (worker("mpich", {"a": 1}, env={"A_TOKEN": "b"}), "env.A_TOKEN: DeepSpeed's launcher 'mpich' puts it on"),
        *(
            (worker(name, {"n1": 1, "fd00::2": 1}), f"launcher '{name}' does not take IPv6 addresses such as fd00::2")
            for name in ("slurm", "mpich", "impi")
        ),
        (worker("ssh").model_copy(update={"hosts": (HostConfig(host="a", slots=1),) * 2}), r"a host twice \(a, a\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_started(wrong: WorkerConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        worker_commands(WorkerPlace(Path("/runs/x"), 29501), "eu", wrong)


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi", "ssh"])
def test_hosts_may_be_ipv6_addresses(launcher: str) -> None:
    made = worker_commands(WorkerPlace(Path("/runs/x"), 29501), "eu", worker(launcher, {"fd00::1": 1, "fd00::2": 1}))
    assert made.files["hosts/eu-0"] == "fd00::1 slots=1\nfd00::2 slots=1\n"
    for job in made.commands:
        assert "--master_addr fd00::1 --master_port 29501" in " ".join(job.command)


def test_pdsh_names_a_host_before_its_lines() -> None:
    asked = launchers()["pdsh"].inquiry(worker("pdsh"), ("n1", "fd00::2"), ("true",))
    assert asked is not None
    assert [asked.launcher.host_of(asked, line, "") for line in ("n1: a: b", "fd00::2: c")] == ["n1", "fd00::2"]


def test_local_workers_share_the_machine() -> None:
    workers = {"a": worker(), "b": worker(), "far": worker("ssh"), "cpu": worker(env={"DS_ACCELERATOR": "cpu"})}
    assert assign_devices(workers, HostMachine(cores=13)) == {"a": ((), 2), "b": ((), 2), "cpu": ((), 2)}
    found = assign_devices(workers, HostMachine(4, (0, 2, 3, 7)))
    assert found == {"a": ((0, 2), 1), "b": ((3, 7), 1), "cpu": ((), 1)}
    with pytest.raises(ConfigError, match=r"want 4 CUDA devices \(a 2, b 2\), this machine has 3"):
        assign_devices(workers, HostMachine(4, (0, 1, 2)))
    # Shared in turn: by all, or by none.
    for devices, (a, b) in {
        (5,): ((5, 5), (5, 5)),
        (0, 1, 2): ((0, 1), (2, 0)),
        (0, 2, 3, 7): ((0, 2), (3, 7)),
    }.items():
        shared = assign_devices(workers, HostMachine(4, devices, shares=True))
        assert (shared["a"], shared["b"], shared["cpu"]) == ((a, 1), (b, 1), ((), 1))
    one, other = worker(env={SHARE_DEVICES: "1"}), worker()
    assert assign_devices({"a": one, "b": one}, HostMachine(4, (1,))) == {"a": ((1, 1), 1), "b": ((1, 1), 1)}
    with pytest.raises(ConfigError, match=f"this machine has 1; .*{SHARE_DEVICES}=1 for all of them"):
        assign_devices({"a": one, "b": other}, HostMachine(4, (1,)))


def run_job(job: LauncherCommand, made: WorkerCommands, place: WorkerPlace, script: str, path: Path) -> list[Any]:
    """Start the job for real, with another script in the training script's place. Gives the JSON lines it printed."""
    for name, text in made.files.items():
        (place.folder / name).parent.mkdir(exist_ok=True)
        (place.folder / name).write_text(text)
    other = place.folder / "script.py"
    other.write_text(script)
    command = [str(other) if part == str(SCRIPT) else part for part in job.command]
    env = {**os.environ, **job.env, "DS_ACCELERATOR": "cpu", "PATH": f"{path}:{os.environ['PATH']}"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "hosts"), [("slurm", {"n1": 1, "n2": 1}), ("openmpi", {"n1": 1, "n2": 1})])
def test_deepspeeds_launchers_start_every_rank(launcher: str, hosts: dict[str, int], tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    for name, source in FAKE.items():
        program(programs / name, f"#!{sys.executable}\n{source}")
    place = WorkerPlace(tmp_path, 29507)
    made = worker_commands(place, "eu", worker(launcher, hosts, env={"WHO": "a,b"}))
    assert hostfile_path("eu-0") in made.files
    seen = run_job(only_job(made), made, place, TELL_RANKS.replace("LAUNCHER", launcher), programs)
    ranks = sorted((int(s["RANK"]), int(s["LOCAL_RANK"])) for s in seen)
    assert ranks == [(0, 0), (1, 0)]
    assert {(s["WORLD_SIZE"], s["MASTER_ADDR"], s["MASTER_PORT"], s["WHO"]) for s in seen} == {
        (str(len(ranks)), "n1", "29507", "a,b")
    }
