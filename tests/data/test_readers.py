import bz2
import gzip
import json
import lzma
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from geotrain.data import readers
from geotrain.data.inputs import find_inputs
from geotrain.data.readers import check_inputs, parse_block, read_blocks
from geotrain.data.tokens import DataError
from tests.support.hub import LFS_POINTER

PACKED = {".gz": gzip.compress, ".zst": zstandard.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
TEXTS = ["one", "two\nlines", "ünï©ödé \U0001f600", "x" * 300]


def documents(path: Path, key: str = "text") -> list[str]:
    return [text for block in read_blocks(path, key) for text in parse_block(block, key)]


def passing_over(path: Path, key: str = "text") -> tuple[list[str], list[str]]:
    """Documents, and what is wrong with what was passed over."""
    broken = list[str]()
    return [text for block in read_blocks(path, key) for text in parse_block(block, key, broken)], broken


def json_lines(texts: list[str], key: str = "text") -> bytes:
    return "".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(texts)).encode()


def compress(suffix: str, content: bytes) -> bytes:
    return {"": bytes, **PACKED}[suffix](content)


@pytest.mark.parametrize("suffix", ["", *PACKED])
@pytest.mark.parametrize("name", ["a.jsonl{}", "a.ndjson{}", "a.jsonl", "a.jsonl.gz"])
def test_json_lines_with_any_compression(tmp_path: Path, suffix: str, name: str) -> None:
    """Whatever the name says."""
    path = tmp_path / name.format(suffix)
    path.write_bytes(compress(suffix or ".gz", json_lines(TEXTS)))
    assert documents(path) == TEXTS


@pytest.mark.parametrize("suffix", ["", *PACKED])
def test_a_text_file_is_a_document(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(compress(suffix, "\n".join(TEXTS).encode()))
    assert documents(path) == ["\n".join(TEXTS)]


@pytest.mark.parametrize("suffix", PACKED)
def test_compressed_files_may_have_several_parts(tmp_path: Path, suffix: str) -> None:
    first, second = (compress(suffix, json_lines(texts)) for texts in (TEXTS[:1], TEXTS[1:]))
    path = tmp_path / f"a.jsonl{suffix}"
    padding = bytes(8) * (suffix in (".gz", ".xz"))  # which these may have
    path.write_bytes(first + padding + second + padding)
    assert documents(path) == TEXTS
    wrong = [first + second[:size] for size in range(1, len(second))]  # cut anywhere
    for content in (b"", *wrong, first + b"\xff" + second[1:], first + b"rest"):
        path.write_bytes(content)
        found, broken = passing_over(path)
        assert found == TEXTS[: len(found)] and [told.count("damaged after line") for told in broken] == [1]


def test_parquet_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "BLOCK_ROWS", 3)
    texts = [f"row {i}" for i in range(10)]
    table = pyarrow.table({"other": list(range(10)), "body": texts})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    assert documents(tmp_path / "a.parquet", "body") == texts
    positions = [block.position_bytes for block in read_blocks(tmp_path / "a.parquet", "body")]
    assert positions == sorted(positions)
    assert positions[-1] == (tmp_path / "a.parquet").stat().st_size


def test_the_text_key_can_be_chosen_and_blank_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"body": "a"}\r\n\r\n{"body": ""}\n{"body": "b"}')
    assert documents(path, "body") == ["a", "b"]


def test_blocks_are_bounded_and_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "BLOCK_BYTES", 100)
    texts = [f"document {i} " * (i % 7) for i in range(200)]
    (tmp_path / "a.jsonl").write_bytes(json_lines(texts))
    blocks = list(read_blocks(tmp_path / "a.jsonl", "text"))
    assert len(blocks) > 50
    assert documents(tmp_path / "a.jsonl") == [text for text in texts if text]
    lines = [number for block in blocks for number in range(block.first, block.first + len(block.items))]
    assert lines == list(range(1, 201))


@pytest.mark.parametrize("text", ["line\n" * 100, "word " * 100, "x" * 500, "\U0001f600" * 125])
def test_a_long_text_is_cut_between_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(readers, "BLOCK_BYTES", 97)
    (tmp_path / "a.txt").write_text(text)
    pieces = documents(tmp_path / "a.txt")
    assert "".join(pieces) == text
    assert all(len(piece.encode()) <= 97 for piece in pieces)
    if " " in text or "\n" in text:
        assert all(piece.endswith((" ", "\n")) for piece in pieces)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', r"a\.jsonl:3: not JSON: .* column \d+; each line must be one JSON object"),
        (b"[1]", r"a\.jsonl:3: a list, not a JSON object with the key 'text'"),
        (b'{"body": "a", "id": 1}', r"a\.jsonl:3: no key 'text'; keys present: body, id; name it by --text-key"),
        (b'{"text": null}', r"a\.jsonl:3: the key 'text' holds no string but a NoneType"),
        (b'{"text": "\xff"}', r"a\.jsonl:3: not UTF-8"),
        (b'{"text": "\\ud800"}', r"a\.jsonl:3: not valid Unicode"),
        (b'{"text": ' + b"[" * 100_000, r"a\.jsonl:3: "),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines(["one", "two"]) + line + b"\n" + json_lines(["four"]))
    with pytest.raises(DataError, match=message):
        documents(path)


def test_a_bad_byte_in_a_text_file_is_named_by_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "BLOCK_BYTES", 10)
    (tmp_path / "a.txt").write_bytes(b"12345\n" * 7 + b"\xe9t\xe9\n")
    with pytest.raises(DataError, match=r"a\.txt:8: not UTF-8"):
        documents(tmp_path / "a.txt")


def test_an_endless_line_is_refused_and_never_held_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LINE_LIMIT_BYTES", 1 << 20)
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines(["one"]) + b"x" * (9 << 20) + b"\n" + json_lines(["three"]))
    with pytest.raises(DataError, match=r"a\.jsonl:2: a line longer than 1 MiB"):
        documents(path)
    found, broken = passing_over(path)
    assert found == ["one", "three"] and len(broken) == 1
    assert max(len(item or b"") for block in read_blocks(path, "text") for item in block.items) < 3 << 20


@pytest.mark.parametrize("suffix", PACKED)
@pytest.mark.parametrize("damage", ["cut", "flipped", "not compressed"])
def test_damaged_compression_is_an_error(tmp_path: Path, suffix: str, damage: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    content = bytearray(compress(suffix, json_lines([f"document {i * i}" for i in range(20_000)])))
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "flipped":
        content[len(content) // 2 : len(content) // 2 + 64] = bytes(64)
    else:
        content = bytearray(json_lines(TEXTS))
    path.write_bytes(content)
    found, broken = passing_over(path)
    assert len(broken) >= 1
    if damage == "cut":  # what came before it is kept, but for the last block of zstd
        assert found == [f"document {i * i}" for i in range(len(found))] and len(broken) == 1
        assert "damaged after line" in broken[0], "not taken for the whole, with a last line that is broken"
        assert len(found) >= {".gz": 9_500, ".bz2": 0}.get(suffix, 5_000)  # bzip2 has blocks of 900 kB
    with pytest.raises(DataError, match=r"a\.jsonl\.\w+(: (damaged|cannot be read) after line \d+|:\d+: not)"):
        documents(path)


def test_damaged_parquet_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"a\.parquet: damaged or no parquet file, after row 0"):
        documents(path)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b", None]}), path)
    with pytest.raises(DataError, match=r"a\.parquet:3: the column 'text' is null"):
        documents(path)
    with pytest.raises(DataError, match=r"no column 'body'; columns: text"):
        documents(path, "body")
    pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2]}), path)
    with pytest.raises(DataError, match="holds int64, not strings"):
        documents(path)
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["text", "text"])
    pyarrow.parquet.write_table(twice, path)
    with pytest.raises(DataError, match="has several columns 'text'"):
        documents(path)


COLUMNS = {  # as pandas writes categories, polars views, and crawlers bytes
    "strings": pyarrow.array(TEXTS),
    "large": pyarrow.array(TEXTS, pyarrow.large_string()),
    "views": pyarrow.array(TEXTS, pyarrow.string_view()),
    "categories": pyarrow.array(TEXTS).dictionary_encode(),
    "bytes": pyarrow.array([text.encode() for text in TEXTS]),
    "views of bytes": pyarrow.array([text.encode() for text in TEXTS], pyarrow.binary_view()),
}


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("name", COLUMNS)
def test_texts_may_be_stored_in_any_way(tmp_path: Path, name: str, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    table = pyarrow.table({"text": COLUMNS[name]})
    if suffix == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    assert documents(path) == TEXTS


def test_rows_without_a_text_are_passed_over_as_lines_are(tmp_path: Path) -> None:
    rows = [b"one", None, b"three\n\xff", b"", b"five"]
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "a.parquet")
    found, broken = passing_over(tmp_path / "a.parquet")
    assert found == ["one", "five"]
    assert [told.partition("a.parquet:")[2][:20] for told in broken] == [
        "2: the column 'text'",
        "3: not UTF-8 (invali",
    ]


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"a.jsonl": json_lines(TEXTS), "b.jsonl.gz": b"no gzip", "c.jsonl": b"{}"}, r"^\S*b\.jsonl\.gz: damaged"),
        ({"a.jsonl": json_lines(TEXTS), "b.parquet": b"no parquet"}, r"b\.parquet: damaged or no parquet file"),
        (dict.fromkeys(("b.txt", "c.parquet"), LFS_POINTER.encode()), r"b\.txt: a Git LFS pointer.* \S*c\.parquet:"),
        ({f"{i}.txt.gz": b"x" for i in range(1, 5)}, r"1\.txt\.gz: damaged .*; \S*3\.txt\.gz: .*; and 1 more files$"),
        ({"a.jsonl": json_lines(TEXTS, "body"), "b.jsonl": b""}, r"no input begins with a text: \S*a\.jsonl:1: no k"),
    ],
)  # fmt: skip
def test_inputs_of_which_nothing_can_be_read_are_found_at_their_beginning(
    tmp_path: Path, files: dict[str, bytes], told: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=told):
        check_inputs(find_inputs([str(tmp_path)]), "text")


def test_a_beginning_with_a_text_is_enough(tmp_path: Path) -> None:
    whole = gzip.compress(json_lines([f"document {i * i}" for i in range(5000)]))
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "b.jsonl").write_bytes(b"\xff\n")
    (tmp_path / "c.txt").write_bytes(b"")
    check_inputs(find_inputs([str(tmp_path)]), "text")
