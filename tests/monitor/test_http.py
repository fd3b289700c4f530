"""The page's HTTP server: who may ask, how long, how many."""

from __future__ import annotations

import gzip
import http.client
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from geotrain.config import ConfigError, MonitorConfig, parse
from geotrain.monitor.http import HttpServer, Response, read_token

TOKEN = "0123456789abcdefghij"
Make = Callable[..., HttpServer]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[HttpServer] = []

    def start(token: str | None = None) -> HttpServer:
        routes = {"/": lambda query: Response(b"page " + query.get("q", "").encode()), "/long": long}
        made.append(HttpServer("127.0.0.1", 0, routes, token))
        made[-1].start()
        return made[-1]

    yield start
    for server in made:
        server.stop()


def long(query: object) -> Response:
    return Response(b"x" * 5000)


def get(server: HttpServer, path: str, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    return connection.getresponse()


def test_answers_with_strict_headers(make: Make) -> None:
    answer = get(make(), "/?q=1")
    assert (answer.status, answer.read()) == (200, b"page 1")
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert get(make(), "/other").status == 404


def test_where_others_find_it() -> None:
    for host, name in (("127.0.0.1", "127.0.0.1"), ("0.0.0.0", socket.gethostname()), ("::1", "[::1]")):
        server = HttpServer(host, 0, {}, TOKEN)
        assert server.url == f"http://{name}:{server.port}/"
        server.close()


def test_only_get_is_answered(make: Make) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", make().port, timeout=60)
    connection.request("POST", "/", body=b"x")
    assert connection.getresponse().status == 501


def test_long_answers_are_compressed_when_asked_for(make: Make) -> None:
    server = make()
    answer = get(server, "/long", Accept_Encoding="gzip")
    assert answer.headers["Content-Encoding"] == "gzip" and gzip.decompress(answer.read()) == b"x" * 5000
    assert get(server, "/long").read() == b"x" * 5000


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "127.evil.example", ""])
def test_without_a_token_other_names_are_refused(make: Make, host: str) -> None:
    """A web page elsewhere may let its own name point here."""
    assert get(make(), "/", Host=host).status == get(make(), "/", host=host).status == 403


@pytest.mark.parametrize("host", ["localhost:1234", "127.0.0.1", "[::1]:80"])
def test_a_tunnel_from_another_port_is_welcome(make: Make, host: str) -> None:
    assert get(make(), "/", Host=host).status == get(make(), "/", host=host).status == 200


def test_a_token_is_asked_for_and_becomes_a_cookie(make: Make) -> None:
    server = make(TOKEN)
    assert get(server, "/").status == 401
    assert get(server, "/", Authorization="Bearer wrong").status == 401
    assert get(server, "/?token=" + TOKEN[:-1]).status == 401
    assert get(server, "/", Authorization=f"Bearer {TOKEN}", Host="metrics.example").status == 200
    answer = get(server, f"/?token={TOKEN}")
    assert (answer.status, answer.headers["Location"]) == (303, "/")
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert get(server, "/", Cookie=cookie.split(";")[0]).status == 200
    assert get(server, "/", Cookie="geotrain=wrong; \x01=").status == 401


def test_who_says_nothing_or_drips_is_cut_off(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("geotrain.monitor.http.REQUEST_S", 1.0)
    server = make()
    address = "127.0.0.1", server.port
    with socket.create_connection(address, timeout=60) as dripping, socket.create_connection(address, 60) as silent:
        dripping.sendall(b"GET / HTTP/1.1\r\nX: ")
        begin = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - begin < 12:  # sooner than a silent connection's own timeout
                dripping.sendall(b"y")  # of one header: too many would end it, too
                time.sleep(0.1)
        assert silent.recv(1) == b"" and time.monotonic() - begin < 12


def test_connections_are_bounded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("geotrain.monitor.http.MAX_CONNECTIONS", 3)
    server = make()
    idle = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(3)]  # accepted in order
    with pytest.raises((http.client.HTTPException, OSError)):
        get(server, "/")
    for connection in idle:
        connection.close()
    deadline = time.monotonic() + 60
    while True:
        try:
            assert get(server, "/").status == 200
            break
        except (http.client.HTTPException, OSError):
            assert time.monotonic() < deadline


def test_a_taken_port_is_told(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 127.0.0.1:\d+: .*choose another port"):
        HttpServer("127.0.0.1", make().port, {})


def test_other_machines_need_a_token(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"'0.0.0.0' can be reached from other machines: set token_file"):
        parse(MonitorConfig, {"host": "0.0.0.0"}, "run")
    parse(MonitorConfig, {"host": "0.0.0.0", "page_port": None}, "run")
    parse(MonitorConfig, {"host": "0.0.0.0", "token_file": "x"}, "run")
    assert read_token(None) is None
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(str(tmp_path / "none"))
    (tmp_path / "token").write_text("short\n")
    with pytest.raises(ConfigError, match="at least 16 letters and digits"):
        read_token(str(tmp_path / "token"))
    (tmp_path / "token").write_text(TOKEN + "\nmore")
    assert read_token(str(tmp_path / "token")) == TOKEN
