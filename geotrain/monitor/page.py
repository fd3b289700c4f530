"""The status page: routes of an HTTP server for its files and for the data that it asks for."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from geotrain.monitor.history import History
from geotrain.monitor.http import Query, Response, Route

WEB = Path(__file__).with_name("web")
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def page_routes(history: History) -> Mapping[str, Route]:
    routes: dict[str, Route] = {}
    for path in sorted(WEB.iterdir()):
        if path.suffix in KINDS:
            routes["/" + path.name] = _file(path)
    routes["/"] = routes["/index.html"]
    routes["/state.json"] = lambda query: _state(history, query)
    return routes


def _file(path: Path) -> Route:
    response = Response(path.read_bytes(), KINDS[path.suffix])
    return lambda query: response


def _state(history: History, query: Query) -> Response:
    since = query.get("since", "0")
    number = int(since) if since.isdecimal() and len(since) < 16 else 0
    state = history.state(time.time(), number, query.get("epoch", ""))
    return Response(json.dumps(state, separators=(",", ":")).encode(), "application/json")
