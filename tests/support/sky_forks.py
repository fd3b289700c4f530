"""SkyPilot, imported once: its import is most of what each of its commands takes. Run by SkyPilot's interpreter, this
answers a socket; a program that stands for the interpreter, `python`, has it fork, and the fork runs the script."""

from __future__ import annotations

import json
import os
import runpy
import select
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CLIENT = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    asked = {{"words": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ)}}
    socket.send_fds(server, [b"."], [0, 1, 2])
    server.sendall(json.dumps(asked).encode() + b"\\n")
    sys.exit(int(server.makefile().readline() or 1))
"""


@contextmanager
def sky_program(skypilot: Path, folder: Path, environment: dict[str, str]) -> Iterator[Path]:
    """Write `sky` and `python`, SkyPilot's, into a folder, and give it; they answer in the block. environment: of the
    import, which reads HOME."""
    address = str(folder / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        for name, text in (
            ("python", CLIENT.format(python=sys.executable, address=address)),
            ("sky", f"#!{folder}/python\n" + (skypilot / "bin/sky").read_text().partition("\n")[2]),
        ):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        command = [skypilot / "bin/python", "-P", __file__, str(listener.fileno())]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, env={**os.environ, **environment}, pass_fds=[listener.fileno()]
        ) as server:
            yield folder
            server.communicate()  # it ends with its standard input


def _run(connection: socket.socket) -> None:
    """Do in this fork what the client asks, as if the client did."""
    _, passed, _, _ = socket.recv_fds(connection, 1, 3)
    for number, descriptor in enumerate(passed):
        os.dup2(descriptor, number)
    asked = json.loads(connection.makefile().readline())
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.argv = asked["words"]
    code = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    connection.sendall(f"{code}\n".encode())
    os._exit(0)


def _answer(listener: socket.socket) -> None:
    import sky.client.cli.command  # noqa: F401

    while listener in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        with connection:
            if (child := os.fork()) == 0:
                _run(connection)
            os.waitpid(child, 0)


if __name__ == "__main__":
    _answer(socket.socket(fileno=int(sys.argv[1])))
