"""A headless Chromium, driven over its debugging pipe (Chrome DevTools Protocol), for the status page.

It starts with an empty profile, speaks to nobody on its own, and writes down every request and every line on the
console that its page makes.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)
ANSWER_S = 60.0


class Chromium:
    """A context manager. requests: URLs asked for. complaints: what the console and the engine call errors."""

    def __init__(self, width: int = 1440, height: int = 1000) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._size = width, height
        self._numbers = itertools.count(1)
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._session: str | None = None

    def __enter__(self) -> Chromium:
        program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        if program is None:
            raise FileNotFoundError("no Chromium here: apt-get install chromium")
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        to_read, self._to = os.pipe()
        from_fd, to_write = os.pipe()
        self._from: BinaryIO = os.fdopen(from_fd, "rb")
        flags = (*FLAGS, f"--user-data-dir={self._profile}", "--window-size={},{}".format(*self._size), "about:blank")
        redirect = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", redirect, "chromium", program, *flags],
            pass_fds=(to_read, to_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": self._profile},
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.command(f"{domain}.enable")
        self.resize(*self._size)
        return self

    def __exit__(self, *error: object) -> None:
        self._session = None
        try:
            self.command("Browser.close")
            self._process.wait(10)
        except (TimeoutError, subprocess.TimeoutExpired, OSError):
            os.killpg(self._process.pid, 9)
            self._process.wait(10)
        self._reader.join(10)
        os.close(self._to)
        self._from.close()
        shutil.rmtree(self._profile, ignore_errors=True)

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Raises TimeoutError, RuntimeError with what the browser says."""
        number = next(self._numbers)
        self._answers[number] = queue.Queue()
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        try:
            answer = self._answers[number].get(timeout=ANSWER_S)
        except queue.Empty:
            raise TimeoutError(f"Chromium gave no answer to {method}") from None
        finally:
            del self._answers[number]
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        found: dict[str, Any] = answer["result"]
        return found

    def open(self, url: str) -> None:
        """Returns when the document and its scripts are there."""
        self.command("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression; promises are waited for."""
        answer = self.command("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, script: str, within_s: float = 120.0, good: Callable[[Any], Any] = bool) -> Any:
        """Ask until the value is good. Raises TimeoutError with the last value."""
        deadline_s = time.monotonic() + within_s
        while not good(value := self.evaluate(script)):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{script} was still {value!r} after {within_s:g} s; {self.complaints}")
            time.sleep(0.1)
        return value

    def resize(self, width: int, height: int, phone: bool = False) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )

    # -- inside

    def _read(self) -> None:
        waiting = b""
        while chunk := os.read(self._from.fileno(), 1 << 16):
            *messages, waiting = (waiting + chunk).split(b"\0")
            for message in messages:
                self._take(json.loads(message))

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            if message["id"] in self._answers:
                self._answers[message["id"]].put(message)
            return
        said = message.get("params", {})
        match message["method"]:
            case "Network.requestWillBeSent":
                self.requests.append(said["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(said["exceptionDetails"])[:500])
            case "Runtime.consoleAPICalled" if said["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(said["args"])[:500])
            case "Log.entryAdded" if said["entry"]["level"] in ("error", "warning"):
                self.complaints.append(f"{said['entry']['text']} {said['entry'].get('url', '')}")
