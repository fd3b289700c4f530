"""A Slurm cluster of Debian's own daemons: munged, slurmctld, and a slurmd for each node, which is a namespace."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from geotrain.launch.check import free_ports
from tests.support.process_trees import until

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={port}
SlurmdParameters=config_overrides
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=3
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
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
PartitionName=train Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeHostname={name} NodeAddr=127.0.0.{number} Port={port} CPUs=8 State=UNKNOWN\n"
OWN = socket.gethostname().partition(".")[0]


MUNGE = "key-file=munge.key socket=munge.sock pid-file=munge.pid log-file=munge.log seed-file=seed"
ISOLATED = ("unshare", "--uts", "--pid", "--mount-proc", "--fork", "--kill-child", "sh", "-c")


class Slurm:
    """The cluster. env: the environment in which its programs find it."""

    def __init__(self, folder: Path, nodes: Sequence[str]) -> None:
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._running = dict[str, subprocess.Popen[bytes]]()
        for name in ("state", *nodes):
            (folder / name).mkdir()
        (folder / "munge.key").write_bytes(secrets.token_bytes(1024))
        (folder / "munge.key").chmod(0o400)
        text, (port, *ports) = CONF, free_ports(1 + len(nodes))
        for number, name in enumerate(nodes):
            text += NODE.format(name=name, number=number + 1, port=ports[number])
        (folder / "slurm.conf").write_text(text.format(host=OWN, folder=folder, port=port))

    def begin(self, folder: Path, nodes: Sequence[str]) -> None:
        # --force: the folders above are the test's, with rights that a real installation would not have
        options = (f"--{option.replace('=', f'={folder}/')}" for option in MUNGE.split())
        self._start("munged", "munged", "--foreground", "--force", *options)
        assert until((folder / "munge.sock").exists)
        self._start("slurmctld", "slurmctld", "-D")
        for node in nodes:
            self.start(node)
        assert until(lambda: self.said("sinfo", "-h", "-o", "%D %t", check=False) == f"{len(nodes)} idle\n")

    def _start(self, name: str, *command: str) -> None:
        self._running[name] = subprocess.Popen(command, env=self.env, stderr=subprocess.DEVNULL)

    def start(self, node: str) -> None:
        self._start(node, *ISOLATED, 'hostname "$0"; exec slurmd -D -N "$0"', node)

    def said(self, *command: str, check: bool = True) -> str:
        return subprocess.run(command, env=self.env, capture_output=True, check=check, text=True, timeout=60).stdout

    def lose(self, name: str) -> None:
        """Kill all that a node has, or a daemon."""
        process = self._running.pop(name)
        process.kill()
        process.wait()

    def close(self) -> None:
        self.said("scancel", "--user", "root", check=False)
        for name in reversed([*self._running]):
            self.lose(name)


@contextmanager
def slurm(folder: Path, *nodes: str) -> Iterator[Slurm]:
    """A cluster during the block. nodes: their names; this machine's by default."""
    folder.mkdir(mode=0o755)
    with closing(Slurm(folder, nodes := nodes or (OWN,))) as cluster:
        cluster.begin(folder, nodes)
        yield cluster
