"""A server's state machine on a thread of its own: one message at a time, while the event loop stays free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from geotrain.outer.global_server import GlobalServer
from geotrain.outer.messages import (
    Answer,
    Finished,
    Join,
    Lease,
    LeaseRequest,
    Leave,
    Message,
    Refused,
    Release,
    Send,
    UpdatePart,
    Welcome,
)
from geotrain.outer.region_server import RegionServer

T = TypeVar("T")


def take(server: GlobalServer | RegionServer, message: Message) -> Any:
    """Give a message to the state machine and return its reply. Raises Refused.

    A region server's own Leave, coming back, means that the global server took it.
    """
    match message:
        case Join():
            return server.on_join(message)
        case UpdatePart():
            return server.on_part(message)
        case LeaseRequest():
            return server.on_lease_request(message)
    if isinstance(server, RegionServer):
        match message:
            case Welcome():
                return server.on_welcome(message)
            case Answer():
                return server.on_global_weights(message)
            case Lease() | Finished():
                return server.on_lease(message)
            case Leave() if message.member == server.name:
                return server.on_farewell()
    if isinstance(message, Release) and isinstance(server, GlobalServer):
        return server.on_release(message)
    if isinstance(message, Leave):
        return server.on_leave(message.member)
    raise Refused(f"a {type(message).__name__} means nothing to this server")


class Machine:
    """Serializes all calls on one thread.

    deliver: called in the event loop with what a region server wants to send.
    watch: called on the machine's thread after each accepted message, with the message and the reply.
    `status` is what the server said of itself after the last message: reading it never waits for tensor work.
    `failure` is set when the state machine raised anything but Refused: its state is then not to be trusted.
    """

    def __init__(
        self,
        server: GlobalServer | RegionServer,
        deliver: Callable[[Send], None] = lambda send: None,
        watch: Callable[[Message, Any], None] = lambda message, reply: None,
    ) -> None:
        self.server = server
        self.deliver, self.watch = deliver, watch
        self.status: dict[str, Any] = server.status()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state-machine")
        self._changed = asyncio.Event()

    async def say(self, message: Message) -> Any:
        """The state machine's reply. Raises Refused."""
        return await self._loop.run_in_executor(self._thread, self._say, message)

    async def read(self, call: Callable[[], T]) -> T:
        """Run something that leaves the durable state as it is, between messages."""
        return await self._loop.run_in_executor(self._thread, self._guarded, call)

    async def until(self, call: Callable[[], T | None], wait_s: float) -> T | None:
        """Like `read`, again after every message until there is a value; None after `wait_s`."""
        deadline = self._loop.time() + wait_s
        while True:
            changed = self._changed
            value = await self.read(call)
            left_s = deadline - self._loop.time()
            if value is not None or left_s <= 0:
                return value
            try:
                await asyncio.wait_for(changed.wait(), left_s)
            except TimeoutError:
                return None

    def wake(self) -> None:
        """Let everyone look again. In the event loop."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def close(self) -> None:
        """Waits for the message that is being worked on."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _say(self, message: Message) -> Any:
        reply = self._guarded(lambda: take(self.server, message))
        self.watch(message, reply)
        sends = self.server.outgoing() if isinstance(self.server, RegionServer) else []
        status = self.server.status()
        self._loop.call_soon_threadsafe(self._after, sends, status)
        return reply

    def _guarded(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except Refused:
            raise
        except Exception as error:
            self._loop.call_soon_threadsafe(self._fail, error)
            raise

    def _fail(self, error: Exception) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)

    def _after(self, sends: list[Send], status: dict[str, Any]) -> None:
        self.status = status
        for send in sends:
            self.deliver(send)
        self.wake()
