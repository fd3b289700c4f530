"""A Hugging Face hub for tests: the part of its HTTP API by which models go there and come back, in memory."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKEN = "hf_test"

# What a clone holds in place of a large file.
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345678\n"


class Hub:
    """repositories: name, of data sets with datasets/ before it → file → content; with @COMMIT behind, what one
    commit has. made: name → whether it was made private. asked: files and the ranges of them that were asked for.
    Weights go as LFS objects."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.made: dict[str, bool] = {}
        self.asked: list[tuple[str, str]] = []
        self.objects: dict[str, bytes] = {}
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def run(self, folder: Path, *command: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
        """Run Python with this hub as its own."""
        env = {"HF_ENDPOINT": self.url, "HF_TOKEN": token, "HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_XET": "1"}
        return subprocess.run(
            [sys.executable, *command], env={**os.environ, **env}, capture_output=True, text=True, timeout=120
        )


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, content: Any, status: int = 200, **headers: str) -> None:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            _, *way = self.path.partition("?")[0].split("/")
            if self.headers.get("authorization") != f"Bearer {TOKEN}":
                return self.answer({"error": "Invalid username or password."}, 401)
            if way == ["api", "repos", "create"]:
                said = json.loads(body)
                name = f"{said.get('organization', 'me')}/{said['name']}"
                hub.made[name] = bool(said.get("private")) or said.get("visibility") == "private"
                hub.repositories.setdefault(name, {})
                return self.answer({"url": f"{hub.url}/{name}", "name": name, "id": name})
            if way[-2:-1] == ["preupload"]:
                files = [each["path"] for each in json.loads(body)["files"]]
                kinds = {path: "lfs" if path.endswith(".safetensors") else "regular" for path in files}
                told = [{"path": p, "uploadMode": kind, "shouldIgnore": False} for p, kind in kinds.items()]
                return self.answer({"files": told})
            if way[-2:] == ["objects", "batch"]:
                wanted = json.loads(body)["objects"]
                uploads = [
                    {**each, "actions": {"upload": {"href": f"{hub.url}/objects/{each['oid']}"}}} for each in wanted
                ]
                return self.answer({"transfer": "basic", "objects": uploads})
            if way[-2:-1] == ["commit"]:
                name = "/".join(way[2:4])
                for line in map(json.loads, body.splitlines()):
                    value = line["value"]
                    if line["key"] == "file":
                        hub.repositories[name][value["path"]] = base64.b64decode(value["content"])
                    elif line["key"] == "lfsFile":
                        hub.repositories[name][value["path"]] = hub.objects[value["oid"]]
                return self.answer({"commitUrl": f"{hub.url}/{name}/commit/{'1' * 40}", "commitOid": "1" * 40})
            return self.answer({"error": self.path}, 404)

        def do_PUT(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            assert hashlib.sha256(content).hexdigest() == self.path.rpartition("/")[2]
            hub.objects[self.path.rpartition("/")[2]] = content
            self.answer({})

        def do_GET(self) -> None:
            _, *way = self.path.partition("?")[0].split("/")
            api = way[0] == "api"
            way = way[2 if way[1:2] == ["models"] else 1 :] if api else way
            owned = 3 if way[0] == "datasets" else 2
            name, way = "/".join(way[:owned]), way[owned:]
            files = hub.repositories.get(f"{name}@{way[1]}" if len(way) > 1 else name, hub.repositories.get(name))
            if files is None:
                return self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
            if "tree" in way:
                return self.answer(
                    [{"type": "file", "path": p, "size": len(c), "oid": "0"} for p, c in files.items()]
                )
            if api:
                return self.answer({"id": name, "sha": "1" * 40, "siblings": [{"rfilename": path} for path in files]})
            content = files["/".join(way[2:])]
            etag = f'"{hashlib.sha256(content).hexdigest()}"'
            if asked := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", "")):
                hub.asked.append(("/".join(way[1:]), asked[0]))
                return self.answer(content[int(asked[1]) : int(asked[2]) + 1], 206)
            return self.answer(content, X_Repo_Commit="1" * 40, ETag=etag)

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


@contextmanager
def hub_for_tests() -> Iterator[Hub]:
    made = Hub()
    try:
        yield made
    finally:
        made.server.shutdown()
        made.server.server_close()
