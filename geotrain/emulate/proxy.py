"""Shapes links where there are no network namespaces: carries TCP connections on to a server, with a link's rate and
distance.

    python proxy.py RATE DELAY_S HOST LISTEN:TARGET[,LISTEN:TARGET …] [RATE …]

Each link has a RATE in bytes a second each way, which all its connections share; a DELAY_S of one way; and ports of
a HOST at which it LISTENs, each in front of a server at the port TARGET there. It runs until SIGTERM, then prints
what it did and the CPU time that this took, as a line of JSON. It uses only the standard library: `python -I -S`.
"""

import asyncio
import contextlib
import json
import resource
import signal
import sys
import time
from functools import partial

CHUNK_BYTES = 1 << 16
QUEUE_S = 0.1  # so much traffic waits in front of a link; what is behind it stays with its sender


class ShapedWay:
    """One direction of a link. It reads no clock."""

    def __init__(self, rate_bytes_s: float, delay_s: float) -> None:
        self._rate_bytes_s, self._delay_s = rate_bytes_s, delay_s
        self._free_s = 0.0  # when what was taken in has left
        self.carried_bytes = 0

    def take(self, count_bytes: int, now_s: float) -> tuple[float, float]:
        """Take in bytes; returns when they arrive, and when the next may be taken in."""
        self._free_s = max(self._free_s, now_s) + count_bytes / self._rate_bytes_s
        self.carried_bytes += count_bytes
        return self._free_s + self._delay_s, self._free_s - QUEUE_S


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: ShapedWay) -> None:
    """Carry one direction of a connection, until its end."""
    under_way = asyncio.Queue[tuple[float, bytes]]()  # the rate and the delay bound it

    async def deliver() -> None:
        while True:
            due_s, data = await under_way.get()
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            if not data:
                break
            writer.write(data)
            await writer.drain()
        writer.write_eof()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(deliver())
        data = b"-"
        while data:
            data = await reader.read(CHUNK_BYTES)
            due_s, next_s = way.take(len(data), time.monotonic())
            under_way.put_nowait((due_s, data))
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))


class ProxiedLink:
    """One link, and the connections that cross it."""

    def __init__(self, rate: str, delay: str, host: str, ports: str) -> None:
        self.there, self.back = (ShapedWay(float(rate), float(delay)) for _ in range(2))
        self._host, self._ports = host, [tuple(map(int, pair.split(":"))) for pair in ports.split(",")]

    async def listen(self) -> None:
        for port, target in self._ports:
            await asyncio.start_server(partial(self._connected, target), self._host, port)

    async def _connected(self, target: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry a connection until both its ways have ended, or either breaks. A target that cannot be reached closes
        it: whoever connects tries again."""
        with contextlib.closing(writer), contextlib.suppress(OSError, ExceptionGroup):
            far_reader, far_writer = await asyncio.open_connection(self._host, target)
            with contextlib.closing(far_writer):
                async with asyncio.TaskGroup() as ways:
                    ways.create_task(carry(reader, far_writer, self.there))
                    ways.create_task(carry(far_reader, writer, self.back))


async def serve(links: list[ProxiedLink]) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    for link in links:
        await link.listen()
    await ended.wait()


def main(arguments: list[str]) -> None:
    links, begin = [ProxiedLink(*arguments[i : i + 4]) for i in range(0, len(arguments), 4)], time.monotonic()
    asyncio.run(serve(links))
    used = resource.getrusage(resource.RUSAGE_SELF)
    report = {
        "wall_s": round(time.monotonic() - begin, 3),
        "cpu_s": round(used.ru_utime + used.ru_stime, 3),
        "carried_bytes": sum(link.there.carried_bytes + link.back.carried_bytes for link in links),
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
