"""A real sshd, and an `ssh` that speaks to it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.support.process_trees import MARK
from tests.support.programs import program

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")


@contextmanager
def sshd(folder: Path, port: int, own: Path | None = None) -> Iterator[psutil.Process]:
    """A server on the loopback interface that lets in a key of its own; in folder/bin an `ssh` that speaks to it, and
    gives a silent connection up after 2 s, notes the hosts that it is called for in folder/asked, and reaches none of
    those in folder/lost. own: a folder that each host has for itself, for which folder/disks/<host> stands."""
    assert SSHD and shutil.which("ssh"), "install openssh's client and server"
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    Path("/run/sshd").mkdir(exist_ok=True)  # else sshd, as root, does not start
    (folder / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\n"
        f"PidFile none\nStrictModes no\nUsePAM no\nAcceptEnv {MARK}\n"
        f"SetEnv PATH={folder}/bin:{os.environ['PATH']}\n"  # from host to host it is the same `ssh`
    )
    if own is not None:
        inside = f'mount --bind {folder}/disks/"$HOST" {own} && exec sh -c "$SSH_ORIGINAL_COMMAND"'
        program(folder / "bin/login", f"#!/bin/sh\nexec unshare -m sh -c '{inside}'\n")
        with (folder / "sshd_config").open("a") as config:
            config.write(f"AcceptEnv HOST\nForceCommand {folder}/bin/login\n")
    (folder / "ssh_config").write_text(
        f"Host *\nHostName 127.0.0.1\nPort {port}\nIdentityFile {folder}/user\nIdentitiesOnly yes\n"
        f"UserKnownHostsFile {folder}/known\nStrictHostKeyChecking accept-new\nLogLevel ERROR\n"
        f"SendEnv {MARK} HOST\n"
    )
    patience = "-o ServerAliveInterval=1 -o ServerAliveCountMax=2"  # the first word for an option counts
    ssh = f"exec {shutil.which('ssh')} -F {folder}/ssh_config {patience}"
    lost = f'! grep -qxF "$word" {folder}/lost 2> /dev/null || exit 255'
    note = f'echo "$word" >> {folder}/asked; {lost}; export HOST="$word"; break'
    note = f'for word; do case "$word" in *[!a-z0-9.]*) ;; *.*) {note};; esac; done'
    program(folder / "bin/ssh", f'#!/bin/sh\n{note}\n{ssh} "$@"\n')
    with subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "sshd_config"], stderr=subprocess.PIPE) as server:
        try:
            assert server.stderr and b"listening" in server.stderr.readline()
            yield psutil.Process(server.pid)
        finally:
            sessions = psutil.Process(server.pid).children(recursive=True)
            server.kill()
            for session in sessions:
                with suppress(psutil.NoSuchProcess):  # one whose connection has ended goes on its own
                    session.kill()


def fall_silent(server: psutil.Process, what: str = "") -> None:
    """Cut the links of the sessions in which `what` runs; "": of all. This end gives up, the far end does not know,
    and what it runs there goes on."""
    for session in server.children():
        if any(what in " ".join(process.cmdline()) for process in session.children(recursive=True)):
            session.suspend()
