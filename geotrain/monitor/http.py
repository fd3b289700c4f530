"""A small HTTP server for page and metrics: GET only, with few connections, deadlines, and a token if one is set."""

from __future__ import annotations

import gzip
import hmac
import http.cookies
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from geotrain.config import ConfigError, host_port, is_loopback

MAX_CONNECTIONS = 64
REQUEST_S = 20.0  # the time for one request, and between two on one connection
COOKIE = "geotrain"
MIN_TOKEN_CHARACTERS = 16
COMPRESS_FROM_BYTES = 1024
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class Response:
    body: bytes
    kind: str = "text/plain; charset=utf-8"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


Query = Mapping[str, str]
Route = Callable[[Query], Response]


def read_token(file: str | None) -> str | None:
    """Read the token from the first line of a file; None without a file.

    Raises ConfigError if the file cannot be read or the token is easy to guess.
    """
    if file is None:
        return None
    try:
        token = Path(file).read_text(encoding="utf-8").split("\n", 1)[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"monitor.token_file = {file!r}: cannot be read: {error}") from None
    if len(token) < MIN_TOKEN_CHARACTERS or not token.isascii() or not token.isalnum():
        raise ConfigError(
            f"monitor.token_file = {file!r}: its first line must be at least {MIN_TOKEN_CHARACTERS} letters and "
            "digits; `openssl rand -hex 24` makes one"
        )
    return token


class HttpServer:
    """Serves `routes` (path → answer) on threads of its own.

    port: 0 takes a free one; the attribute `port` says which. token: a request must show it, or gets 401. It may come
    once as ?token=… (the answer sets a cookie), as that cookie, or as a bearer token. Without a token only requests
    that name a loopback host are answered. Otherwise any web page in a browser on this machine could read the
    answers, by letting a name of its own resolve to this machine (DNS rebinding). Raises ConfigError if it cannot
    listen.
    """

    def __init__(self, host: str, port: int, routes: Mapping[str, Route], token: str | None = None) -> None:
        self.host, self.routes, self.token = host, routes, token
        try:
            self._server = _Server((host, port), self)
        except OSError as error:
            raise ConfigError(
                f"monitor: cannot listen on {host_port(host, port)}: {error.strerror}; choose another port, or 0 for "
                "a free one"
            ) from None
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.2,), name=f"http-{self.port}", daemon=True
        )

    @property
    def url(self) -> str:
        """The address for a browser; a server on all addresses of this machine goes by the machine's name."""
        name = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{host_port(name, self.port)}/"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self.close()

    def close(self) -> None:
        """Close a server that was not started."""
        self._server.server_close()

    def answer(self, target: str, headers: Message) -> Response:
        """The answer to a GET request. target: path and query. headers: found in any case, as host."""
        parts = urlsplit(target)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        if self.token is None:
            # The name that the browser asked for, without the port: "[::1]:80", "localhost:80".
            host = headers.get("Host", "")
            host = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
            if not is_loopback(host):
                return Response(b"This page is for this machine; ask for it as localhost.\n", status=403)
        elif not self._may(query, headers):
            return Response(b"401: add ?token=... to the address, with the token of the run.\n", status=401)
        if self.token is not None and "token" in query:
            # The browser goes on without the token in the address, which would show and stay in its history.
            cookie = f"{COOKIE}={self.token}; HttpOnly; SameSite=Strict; Path=/"
            return Response(b"", status=303, headers={"Location": parts.path, "Set-Cookie": cookie})
        route = self.routes.get(parts.path)
        return route(query) if route else Response(b"404: no such page\n", status=404)

    def _may(self, query: Query, headers: Message) -> bool:
        assert self.token is not None
        jar: http.cookies.SimpleCookie = http.cookies.SimpleCookie()
        with suppress(http.cookies.CookieError):
            jar.load(headers.get("Cookie", ""))
        shown = [query.get("token", ""), headers.get("Authorization", "").removeprefix("Bearer ")]
        shown.append(jar[COOKIE].value if COOKIE in jar else "")
        # A list and no generator, so that all three are compared and the time does not reveal which one fits.
        return any([hmac.compare_digest(text.encode(), self.token.encode()) for text in shown])


class _Server(ThreadingTCPServer):  # `HTTPServer` would look up the host's name, which may take seconds
    daemon_threads = allow_reuse_address = True
    request_queue_size = 16

    def __init__(self, address: tuple[str, int], site: HttpServer) -> None:
        self.site = site
        self.deadlines: dict[socket.socket, float] = {}
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self.deadlines) >= MAX_CONNECTIONS:
            self.shutdown_request(request)
            return
        self.deadlines[request] = time.monotonic() + REQUEST_S
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.deadlines.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called a few times a second: end connections whose deadline is over. A socket's own timeout would not do,
        because each byte that a slow client sends begins it anew."""
        now_s = time.monotonic()
        for connection, deadline_s in list(self.deadlines.items()):
            if now_s > deadline_s:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a broken connection concerns nobody."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "GeoTrain", ""
    timeout = REQUEST_S
    server: _Server

    def do_GET(self) -> None:
        response = self.server.site.answer(self.path, self.headers)
        body = response.body
        self.send_response(response.status)
        for name, value in {**HEADERS, **response.headers, "Content-Type": response.kind}.items():
            self.send_header(name, value)
        if len(body) >= COMPRESS_FROM_BYTES and "gzip" in self.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body, 3)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.server.deadlines[self.connection] = time.monotonic() + REQUEST_S

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: they may hold the token."""
