"""Token files: round trips through Megatron-core's format, atomic writing, and refusal of damaged files."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from geotrain.data import tokens
from geotrain.data.tokens import DataError, TokenWriter, open_tokens
from geotrain.inner.runtime.platform import quiet_imports
from tests.support.hub import LFS_POINTER

DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8]]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write(prefix: Path, vocab_size: int = 100) -> str:
    prefix.parent.mkdir(exist_ok=True)
    with TokenWriter(str(prefix), vocab_size) as writer:
        for document in DOCUMENTS:
            writer.add_document(document)
    return str(prefix)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(100, np.uint16), (65_499, np.uint16), (151_936, np.int32)])
def test_round_trip(tmp_path: Path, vocab_size: int, dtype: type) -> None:
    file = open_tokens(write(tmp_path / "new" / "train", vocab_size))
    assert file.tokens.dtype == dtype
    assert isinstance(file.tokens, np.memmap)
    assert file.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (file.documents, file.document_ends(0, 3).tolist()) == (3, [3, 4, 8])
    assert file.document_ends(1, 2).tolist() == [4]
    assert file.document_ends(0, 3).dtype == np.int64
    assert names(tmp_path / "new") == ["train.bin", "train.idx"]


def test_megatron_reads_it(tmp_path: Path) -> None:
    with quiet_imports():
        from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(write(tmp_path / "train"))
    assert [dataset[i].tolist() for i in range(len(dataset))] == DOCUMENTS


def test_an_exception_discards(tmp_path: Path) -> None:
    """What was there before is kept by the folder, which appears whole: see `test_prepare`."""
    with pytest.raises(DataError), TokenWriter(str(tmp_path / "train"), 100) as writer:
        writer.add_document([9, 100])
    assert names(tmp_path) == []


@pytest.mark.parametrize("document", [[], [-1], [100], [1.5], [[1, 2]]])
def test_bad_documents_are_refused(tmp_path: Path, document: list) -> None:
    writer = TokenWriter(str(tmp_path / "train"), 100)
    with pytest.raises(DataError, match="train"):
        writer.add_document(document)
    writer.discard()


def test_an_empty_file_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no document"):
        TokenWriter(str(tmp_path / "train"), 100).close()
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("ending", "change", "message"),
    [
        ("idx", lambda b: None, "cannot be read"),
        ("bin", lambda b: None, "cannot be read"),
        ("idx", lambda b: b"", "empty"),
        ("bin", lambda b: b"", "empty"),
        ("idx", lambda b: b[:20], "truncated"),
        ("idx", lambda b: b[:-1], "truncated"),
        ("idx", lambda b: b + b"\0", "instead of"),
        ("idx", lambda b: b"X" + b[1:], "magic"),
        ("bin", lambda b: LFS_POINTER.encode(), "a Git LFS pointer"),
        ("idx", lambda b: b[:9] + b"\2" + b[10:], "version 2"),
        ("idx", lambda b: b[:17] + b"\7" + b[18:], "dtype code 7"),
        ("bin", lambda b: b[:-1], "truncated"),
        ("bin", lambda b: b[:-2], "do not belong together"),
        ("bin", lambda b: b + b"\0\0", "do not belong together"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, ending: str, change: object, message: str) -> None:
    prefix = write(tmp_path / "train")
    path = tmp_path / f"train.{ending}"
    content = change(path.read_bytes())  # type: ignore[operator]
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_tokens(prefix)


@pytest.mark.parametrize("bound", [6199499590824596226, -(2**62), 2**63 - 1])
def test_a_bound_far_off_is_refused_though_differences_overflow(tmp_path: Path, bound: int) -> None:
    index = Path(write(tmp_path / "train")).with_suffix(".idx")
    bounds = np.frombuffer(index.read_bytes()[-32:], "<i8").copy()
    assert bounds.tolist() == [0, 1, 2, 3]
    bounds[1] = bound
    index.write_bytes(index.read_bytes()[:-32] + bounds.tobytes())
    file = open_tokens(str(tmp_path / "train"))
    with pytest.raises(DataError, match="its documents are not in order"):
        file.document_ends(0, 3)
    with pytest.raises(DataError, match="its documents are not in order"):
        list(file.all_document_ends())


@pytest.mark.parametrize("begin", [1, 2**40, -(2**63)])
def test_documents_that_overlap_are_refused(tmp_path: Path, begin: int) -> None:
    index = Path(write(tmp_path / "train")).with_suffix(".idx")
    content = bytearray(index.read_bytes())
    content[-48:-40] = begin.to_bytes(8, "little", signed=True)  # of the second document
    index.write_bytes(content)
    with pytest.raises(DataError, match="its documents overlap"):
        open_tokens(str(tmp_path / "train")).document_ends(0, 3)


@pytest.fixture
def measured() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def test_opening_reads_nothing_of_a_large_index(tmp_path: Path, measured: None) -> None:
    """50 million documents of 1,000 tokens: files of 1 GB and 100 GB, almost all of it a hole."""
    documents, length = 50_000_000, 1000
    with (tmp_path / "train.bin").open("wb") as data, (tmp_path / "train.idx").open("wb") as index:
        data.truncate(documents * length * 2)
        index.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, documents, documents + 1))
        lengths_end = index.tell() + documents * 4
        begins_end = lengths_end + documents * 8
        for at, form, value in (
            (lengths_end - 4, "<i", length),
            (begins_end - 8, "<q", (documents - 1) * length * 2),
            (begins_end + documents * 8 - 8, "<q", documents - 1),
            (begins_end + documents * 8, "<q", documents),
        ):
            index.seek(at)
            index.write(struct.pack(form, value))
    file = open_tokens(tmp_path / "train")
    assert (len(file.tokens), file.documents) == (documents * length, documents)
    assert file.document_ends(documents - 1, documents).tolist() == [documents * length]
    assert tracemalloc.get_traced_memory()[1] < 1 << 20


def test_writing_holds_no_index_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: None) -> None:
    monkeypatch.setattr(tokens, "_AT_ONCE", 1000)
    with TokenWriter(tmp_path / "train", 100) as writer:
        for _ in range(20_500):  # a list of as many numbers has 800 kB
            writer.add_document([1, 2])
    assert tracemalloc.get_traced_memory()[1] < 300_000
    parts = list(open_tokens(tmp_path / "train").all_document_ends())
    assert np.concatenate(parts).tolist() == list(range(2, 41_002, 2))
    assert names(tmp_path) == ["train.bin", "train.idx"]
