"""A TCP link that breaks."""

from __future__ import annotations

import asyncio

from geotrain.net.transport.tcp_counters import TcpCounters


class BreakingLink:
    """A link to a port: it breaks each time that so many more bytes have gone one way, as often as told."""

    def __init__(self, port: int, way: str, every_bytes: int, times: int) -> None:
        self.target, self.way, self.every_bytes, self.times = port, way, every_bytes, times
        self.moved = {"up": 0, "down": 0}
        self.broken = 0
        self.tcp_counters = TcpCounters()
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> int:
        self.server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = int(self.server.sockets[0].getsockname()[1])
        return self.port

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        above, below = await asyncio.open_connection("127.0.0.1", self.target)
        self._writers += [writer, below]
        await asyncio.gather(
            self._pump("up", reader, below), self._pump("down", above, writer), return_exceptions=True
        )

    async def _pump(self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            self.moved[way] += len(data)  # before it waits, since what it gave may arrive even if the link breaks
            await writer.drain()
            if (
                way == self.way
                and self.broken < self.times
                and self.moved[way] > (self.broken + 1) * self.every_bytes
            ):
                self.broken += 1
                self.tcp_counters.sample()
                for each in self._writers:
                    each.transport.abort()
                self._writers.clear()
                return
