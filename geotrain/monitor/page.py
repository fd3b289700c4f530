"""The status page: routes of an HTTP server for its files and for the data that it asks for."""

from __future__ import annotations

import json
import mimetypes
import time
from collections.abc import Mapping
from pathlib import Path

from geotrain.monitor.history import History
from geotrain.monitor.http import Query, Response, Route

WEB = Path(__file__).with_name("web")


def page_routes(history: History) -> Mapping[str, Route]:
    """Make the routes of the page's files and of its data. history: what the page shows."""

    def state(query: Query) -> Response:
        since = query.get("since", "0")
        number = int(since) if since.isdecimal() and len(since) < 16 else 0
        found = history.state(time.time(), number, query.get("epoch", ""))
        return Response(json.dumps(found, separators=(",", ":")).encode(), "application/json")

    routes = {f"/{path.name}": _file(path) for path in sorted(WEB.iterdir()) if path.is_file()}
    return {**routes, "/": routes["/index.html"], "/state.json": state}


def _file(path: Path) -> Route:
    response = Response(path.read_bytes(), f"{mimetypes.guess_type(path.name)[0]}; charset=utf-8")
    return lambda query: response
