"""A Slurm cluster of one node, of Debian's own daemons: munged, slurmctld, slurmd."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from geotrain.launch.check import free_ports
from tests.support.process_trees import until

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmdParameters=config_overrides
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=3
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=1,sched_interval=1
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=train Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
DAEMONS = (("munged.pid", "munged"), ("slurmctld.pid", "slurmctld"), ("slurmd.pid", "slurmd"))


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """The cluster during the block; gives the environment in which its programs find it."""
    folder.mkdir(mode=0o755)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(secrets.token_bytes(1024))
    (folder / "munge.key").chmod(0o400)
    conf = folder / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    conf.write_text(CONF.format(host=host, folder=folder, ports=free_ports(2)))
    env = {**os.environ, "SLURM_CONF": str(conf)}
    files = {
        "key": "munge.key",
        "socket": "munge.sock",
        "pid": "munged.pid",
        "log": "munged.log",
        "seed": "munge.seed",
    }
    names = {"key": "key-file", "pid": "pid-file", "log": "log-file", "seed": "seed-file"}
    munge = [f"--{names.get(what, what)}={folder / file}" for what, file in files.items()]
    try:
        # --force: the folders above are the test's, with rights that a real installation would not have
        subprocess.run(["munged", "--force", *munge], check=True, capture_output=True, timeout=120)
        for daemon in ("slurmctld", "slurmd"):
            subprocess.run([daemon], env=env, check=True, capture_output=True, timeout=120)
        assert until(lambda: b"idle" in subprocess.run(["sinfo", "-h"], env=env, capture_output=True).stdout)
        yield env
    finally:
        subprocess.run(["scancel", "--user", "root"], env=env, capture_output=True, timeout=120)
        for pid_file, _ in reversed(DAEMONS):
            stop(folder / pid_file)


def stop(pid_file: Path) -> None:
    """End the daemon whose number the file holds, if it runs."""
    if pid_file.exists():
        pid = int(pid_file.read_text())
        subprocess.run(["kill", str(pid)], capture_output=True)
        assert until(lambda: not Path(f"/proc/{pid}").exists())
