"""Data sets at URLs: real servers, which are killed and started again, and the cache between them and the loader."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import s3fs

from geotrain.config import DataConfig, DataSet
from geotrain.data import remote
from geotrain.data.dataset import adopt, open_dataset, training_digest
from geotrain.data.loader import LeasedLoader, open_source, open_training
from geotrain.data.remote import BlockCache, RemoteTokens
from geotrain.data.tokens import BLOCK_BYTES, DataError, TokenWriter
from geotrain.launch.check import free_ports
from tests.support.hub import hub_for_tests
from tests.support.object_storage import make_bucket, s3_server
from tests.support.process_trees import until

TOKENS = 5 * BLOCK_BYTES // 2 + 1001  # of 2 bytes: six blocks, the last one short
SEQUENCE = 500
SERVER = """
import sys
from aiohttp import web

@web.middleware
async def told(request, handler):
    with open(sys.argv[1] + "/asked", "a") as file:
        file.write(f"{request.method} {request.path} {request.headers.get('Range')}\\n")
    return await handler(request)

app = web.Application(middlewares=[told])
app.router.add_static("/", sys.argv[1])
web.run_app(app, host="127.0.0.1", port=int(sys.argv[2]), print=None)
"""


class Server:
    """An HTTP server of a folder, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", SERVER, str(self.folder), str(self.port)])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def asked(self) -> list[str]:
        """The ranges of the .bin that were asked for since the last call."""
        path = self.folder / "asked"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [line for line in lines if line.startswith("GET") and ".bin" in line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    values = np.random.default_rng(1).integers(0, 1000, TOKENS)
    with TokenWriter(folder / "train", 1000) as writer:
        for document in np.array_split(values, 700):
            writer.add_document(document)
    adopt(folder / "train")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    server = Server(folder)
    yield server
    server.kill()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "LAST_PAUSE_S", 0.3)


def opened(prefix: str, cache: BlockCache) -> RemoteTokens:
    _, tokens = open_dataset(prefix, 1000, cache)
    assert isinstance(tokens, RemoteTokens)
    return tokens


def here(folder: Path) -> np.ndarray:
    return np.fromfile(folder / "train.bin", "<u2")


def test_a_run_reads_the_same_from_afar_and_every_block_once(tmp_path: Path, folder: Path, server: Server) -> None:
    def data(prefix: str) -> DataConfig:
        sets = (DataSet(prefix=prefix),)
        cache = {"cache_folder": str(tmp_path), "cache_gb": 0.01}
        return DataConfig(train=sets, sequence_length=SEQUENCE, train_samples=999, **cache)

    local, source = (open_training(data(at), 1000, 3) for at in (str(folder / "train"), f"{server.url}/train"))
    server.asked()
    for step, wanted in zip(
        LeasedLoader(source, 64, 8, 0, 2).steps(128, 640),
        LeasedLoader(local, 64, 8, 0, 2).steps(128, 640),
        strict=True,
    ):
        assert all((a == b).all() for a, b in zip(step.own, wanted.own, strict=True))
    asked = server.asked()
    assert 5 <= len(asked) == len(set(asked)), "no block twice"
    assert training_digest(data(f"{server.url}/train")) == open_dataset(folder / "train", 1000)[0].sha256


@pytest.mark.parametrize("slots", [1, 4, 100])
def test_a_cache_is_as_large_as_it_may_be_and_answers_right(
    tmp_path: Path, folder: Path, server: Server, slots: int
) -> None:
    size_bytes = slots * (BLOCK_BYTES + 24)
    tokens, whole = opened(f"{server.url}/train", BlockCache(tmp_path, size_bytes)), here(folder)
    rng = np.random.default_rng(2)
    for start in rng.integers(0, TOKENS, 12).tolist():
        assert (tokens[start : start + 70_000] == whole[start : start + 70_000]).all()
    assert (tokens[:] == whole).all()
    [file] = tmp_path.iterdir()
    assert file.stat().st_blocks * 512 <= size_bytes + 4096


def test_what_is_in_the_cache_needs_no_server_and_what_is_damaged_there_is_fetched_again(
    tmp_path: Path, folder: Path, server: Server
) -> None:
    cache = BlockCache(tmp_path, 10 * BLOCK_BYTES)
    tokens, whole = opened(f"{server.url}/train", cache), here(folder)
    assert (tokens[:] == whole).all()
    server.asked()
    again = opened(f"{server.url}/train", BlockCache(tmp_path, 10 * BLOCK_BYTES))  # as another process
    assert (again[:] == whole).all()
    assert server.asked() == []
    [file] = tmp_path.iterdir()
    with file.open("r+b") as stored:  # as after a write that a power failure cut off
        stored.seek(cache._place(2) + 5000)
        stored.write(b"\0" * 4096)
    assert (again[:] == whole).all()
    assert len(server.asked()) == 1


def test_a_server_that_is_killed_and_started_again_is_waited_for(
    tmp_path: Path, folder: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    class Told(remote.RetryBackoff):
        def pause_s(self) -> float:
            failed.set()
            return super().pause_s()

    monkeypatch.setattr(remote, "RetryBackoff", Told)
    tokens, whole = opened(f"{server.url}/train", BlockCache(tmp_path, 1)), here(folder)
    assert (tokens[:1000] == whole[:1000]).all()
    server.kill()
    found: list[np.ndarray] = []
    reader = threading.Thread(target=lambda: found.append(tokens[BLOCK_BYTES : BLOCK_BYTES + 1000]))
    reader.start()
    assert failed.wait(60), "there is nobody who could have answered"
    server.start()
    reader.join(60)
    assert (found[0] == whole[BLOCK_BYTES : BLOCK_BYTES + 1000]).all()


def test_a_store_that_is_gone_is_told_by_name(
    tmp_path: Path, folder: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = opened(f"{server.url}/train", BlockCache(tmp_path, 1))
    monkeypatch.setattr(remote, "FETCH_DEADLINE_S", 0.5)
    server.kill()
    try:
        with pytest.raises(DataError, match=rf"{server.url}/train\.bin: could not be read in 0 s: .*reachable"):
            tokens[:10]
    finally:
        server.start()
    monkeypatch.undo()
    assert (tokens[:10] == here(folder)[:10]).all()


def test_what_comes_damaged_is_told_and_a_file_of_another_length_is_refused(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for suffix in (".json", ".crc"):
        (other / f"train{suffix}").write_bytes((folder / f"train{suffix}").read_bytes())
    content = bytearray((folder / "train.bin").read_bytes())
    content[BLOCK_BYTES + 7] ^= 1
    (other / "train.bin").write_bytes(content)
    tokens = opened(f"file://{other}/train", BlockCache(tmp_path / "cache", 10 * BLOCK_BYTES))
    assert (tokens[:1000] == here(folder)[:1000]).all()
    monkeypatch.setattr(remote, "FETCH_DEADLINE_S", 0.2)
    with pytest.raises(DataError, match=r"train\.bin: .*bytes from 262144 on do not match their checksum"):
        tokens[BLOCK_BYTES // 2 : BLOCK_BYTES // 2 + 10]
    (other / "train.bin").write_bytes(content[: BLOCK_BYTES + 8])  # while it is read
    with pytest.raises(DataError, match=r"train\.bin: .*8 bytes came where"):
        tokens[BLOCK_BYTES // 2 : BLOCK_BYTES // 2 + 10]
    (other / "train.bin").write_bytes(content[:-2])
    with pytest.raises(DataError, match=r"train\.bin: has \d+ bytes, its manifest states"):
        opened(f"file://{other}/train", BlockCache(tmp_path / "cache", 1))


def test_the_next_lease_is_fetched_before_it_is_trained(tmp_path: Path, folder: Path, server: Server) -> None:
    cache = BlockCache(tmp_path, 10 * BLOCK_BYTES)
    source = open_source(f"{server.url}/train", SEQUENCE, 1000, 5, cache)
    server.asked()
    loader = LeasedLoader(source, 64, 8, 0, 1)
    loader.expect(0, 640)
    asked: list[str] = []

    def fetched() -> bool:
        asked.extend(server.asked())
        return len(asked) >= 5 and not source._tokens._coming  # type: ignore[attr-defined]

    assert until(fetched)
    assert len(list(loader.steps(0, 640))) == 10
    assert server.asked() == []


def test_processes_of_a_machine_fetch_a_block_once(tmp_path: Path, folder: Path, server: Server) -> None:
    read = (
        "import sys\nfrom pathlib import Path\n"
        "from geotrain.data.remote import BlockCache\nfrom geotrain.data.dataset import open_dataset\n"
        f"cache = BlockCache(Path({str(tmp_path)!r}), 10 * {BLOCK_BYTES})\n"
        f"_, tokens = open_dataset('{server.url}/train', 1000, cache)\n"
        "print('ready', flush=True)\nsys.stdin.readline()\nprint(int(tokens[:].sum()))\n"
    )
    readers = [
        subprocess.Popen([sys.executable, "-c", read], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for reader in readers:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "ready\n"
        server.asked()
        for reader in readers:
            assert reader.stdin is not None
            reader.stdin.write("\n")
            reader.stdin.flush()
        sums = [int(reader.communicate(timeout=60)[0]) for reader in readers]
    finally:
        for reader in readers:
            reader.kill()
    assert sums == [int(here(folder).sum())] * 2
    assert len(server.asked()) == 6


def test_a_bucket_is_read(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server() as environment:
        for key, value in environment.items():
            monkeypatch.setenv(key, value)
        bucket = make_bucket("texts", environment)
        for suffix in (".json", ".crc", ".bin"):
            s3fs.S3FileSystem().put_file(str(folder / f"train{suffix}"), f"{bucket}/web/train{suffix}")
        tokens = opened(f"{bucket}/web/train", BlockCache(tmp_path, 10 * BLOCK_BYTES))
        assert (tokens[:] == here(folder)).all()
        with pytest.raises(DataError, match=r"s3://texts/web/none\.json: no such file"):
            opened(f"{bucket}/web/none", BlockCache(tmp_path, 1))


FROM_A_HUB = """
import sys
from geotrain.config import DataConfig
from geotrain.data.loader import LeasedLoader, open_training
from geotrain.data.tokens import DataError
out, *urls = sys.argv[1:]
for url in urls:
    data = DataConfig(train=url, sequence_length=500, train_samples=999, cache_folder="cache", cache_gb=0.01)
    try:
        steps = LeasedLoader(open_training(data, 1000, 3), 64, 8, 0, 1).steps(128, 640)
        open(out, "wb").write(b"".join(batch.numpy().tobytes() for step in steps for batch in step.own))
    except DataError as error:
        print(error)
"""


def test_a_lease_reads_what_a_commit_of_a_hub_has_by_the_real_client(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, cut, files = "c0" * 20, "d0" * 20, {f"web/{p.name}": p.read_bytes() for p in folder.glob("train.*")}
    monkeypatch.chdir(tmp_path)
    with hub_for_tests() as hub:
        hub.repositories[f"datasets/me/texts@{commit}"] = files
        hub.repositories[f"datasets/me/texts@{cut}"] = {**files, "web/train.bin": files["web/train.bin"][:-2]}
        hub.repositories["datasets/me/texts"] = {}  # the branch has moved on
        urls = [f"hf://datasets/me/texts{at}/web/train" for at in (f"@{commit}", f"@{cut}", "", "@main")]
        done = hub.run(tmp_path, "-c", FROM_A_HUB, "read", *urls)
        assert done.returncode == 0, done.stderr
        sets = (DataSet(prefix=str(folder / "train")),)
        local = open_training(DataConfig(train=sets, sequence_length=SEQUENCE, train_samples=999), 1000, 3)
        steps = LeasedLoader(local, 64, 8, 0, 1).steps(128, 640)
        wanted = b"".join(batch.numpy().tobytes() for step in steps for batch in step.own)
        assert (tmp_path / "read").read_bytes() == wanted
        asked = [range_ for path, range_ in hub.asked if path == f"{commit}/web/train.bin"]
        blocks = {f"bytes={at}-{min(at + BLOCK_BYTES, 2 * TOKENS) - 1}" for at in range(0, 2 * TOKENS, BLOCK_BYTES)}
        assert 5 <= len(asked) == len(set(asked)) and {*asked} <= blocks, "each block alone, and once"
        of_a_cut, *of_branches = done.stdout.splitlines()
        assert "its manifest states" in of_a_cut
        for url, told in zip(urls[2:], of_branches, strict=True):
            assert f"{url}.json: names no commit" in told


def test_a_url_of_no_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere://a/train\.json: cannot be used"):
        open_dataset("nowhere://a/train", 1000)
