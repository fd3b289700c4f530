"""Input files as a stream of bounded, raw blocks; and a block as documents.

Reading (decompression, cutting into lines) is sequential and done by one process; parsing a block is pure and
done by any. Supported: .txt and .jsonl, each also .gz or .zst, and .parquet.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import pyarrow
import pyarrow.parquet
import zstandard

from geotrain.data.tokens import DataError

BLOCK_BYTES = 1 << 20  # about a block's size; a longer .txt file becomes several documents
LINE_LIMIT_BYTES = 64 << 20  # a longer line of JSON is refused: it would have to be held in memory whole
PARQUET_ROWS = 256  # rows taken from a parquet file at a time
SUFFIXES = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz", ".txt.zst", ".jsonl.zst", ".parquet")
_READ_BYTES = 1 << 20
_ZSTD_READ_BYTES = 1 << 14  # little, since what comes out at once may be many times as much
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Block:
    """A piece of one input file.

    kind: "text": `items` is one document; "jsonl": one JSON object each; "rows": one document each.
    first: number of the first line (or row), from 1. position_bytes: how far into the file it reaches.
    """

    path: str
    kind: Literal["text", "jsonl", "rows"]
    first: int
    items: tuple[bytes, ...]
    position_bytes: int


def find_inputs(patterns: Sequence[str]) -> list[Path]:
    """Files for the given files, folders and glob patterns: in the given order, within each sorted; each once.

    Raises DataError: nothing found, or a file of an unsupported kind was named.
    """
    found: list[Path] = []
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            matches = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(SUFFIXES))
        elif path.exists():
            matches = [path]
        else:
            within = Path(path.anchor)  # an absolute pattern is searched from its root
            matches = sorted(p for p in within.glob(str(path.relative_to(within))) if p.is_file())
        if not matches:
            raise DataError(f"{pattern}: no such file, or no file in it that ends in {', '.join(SUFFIXES)}")
        found += matches
    for path in found:
        if not path.name.endswith(SUFFIXES):
            raise DataError(f"{path}: unsupported kind of file; supported: {', '.join(SUFFIXES)}")
    return list(dict.fromkeys(found))


def read_blocks(path: Path, text_key: str) -> Iterator[Block]:
    """Stream a file; memory is bounded by a block and a line of JSON. Raises DataError: where reading stopped."""
    if path.name.endswith(".parquet"):
        yield from _parquet_blocks(path, text_key)
    elif path.name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
        yield from _jsonl_blocks(path)
    else:
        yield from _text_blocks(path)


def parse_block(block: Block, text_key: str) -> Iterator[str]:
    """The documents of a block; empty ones are left out. Raises DataError naming file and line."""
    number = block.first
    for item in block.items:
        try:
            text = item.decode() if block.kind != "jsonl" else _json_text(item, text_key)
            text.encode()  # JSON may hold lone surrogates, which no tokenizer takes
        except UnicodeDecodeError as error:
            line = number + item.count(b"\n", 0, error.start)
            raise DataError(f"{block.path}:{line}: not UTF-8 ({error.reason}); convert the file to UTF-8") from None
        except UnicodeEncodeError as error:
            raise DataError(f"{block.path}:{number}: not valid Unicode ({error.reason}); repair the line") from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{block.path}:{number}: {error}") from None
        if text:
            yield text
        number += 1


def _json_text(line: bytes, text_key: str) -> str:
    if not line.strip():
        return ""
    try:
        record = json.loads(line.decode())
    except json.JSONDecodeError as error:
        raise ValueError(
            f"not JSON: {error.msg} at column {error.colno}; each line must be one JSON object"
        ) from None
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__}, not a JSON object with the key {text_key!r}")
    if text_key not in record:
        raise ValueError(f"no key {text_key!r}; keys present: {', '.join(list(record)[:8])}; set the text key")
    if not isinstance(record[text_key], str):
        raise ValueError(f"the key {text_key!r} holds no string but a {type(record[text_key]).__name__}")
    return str(record[text_key])


# ------------------------------------------------------------------------------------------ text and JSON lines


def _jsonl_blocks(path: Path) -> Iterator[Block]:
    lines: list[bytes] = []
    first, size_bytes, rest, position_bytes = 1, 0, b"", 0
    for chunk, position_bytes in _decompressed(path):
        *whole, rest = (rest + chunk).split(b"\n")
        if len(rest) > LINE_LIMIT_BYTES:
            line = first + len(lines) + len(whole)
            raise DataError(f"{path}:{line}: a line longer than {LINE_LIMIT_BYTES >> 20} MiB; cut the document")
        for line_bytes in whole:
            lines.append(line_bytes)
            size_bytes += len(line_bytes)
            if size_bytes >= BLOCK_BYTES:
                yield Block(str(path), "jsonl", first, tuple(lines), position_bytes)
                first += len(lines)
                lines, size_bytes = [], 0
    if rest:
        lines.append(rest)
    if lines:
        yield Block(str(path), "jsonl", first, tuple(lines), position_bytes)


def _text_blocks(path: Path) -> Iterator[Block]:
    first, text, position_bytes = 1, b"", 0
    for chunk, position_bytes in _decompressed(path):
        text += chunk
        while len(text) > BLOCK_BYTES:
            end = _cut(text)
            yield Block(str(path), "text", first, (text[:end],), position_bytes)
            first += text.count(b"\n", 0, end)
            text = text[end:]
    if text:
        yield Block(str(path), "text", first, (text,), position_bytes)


def _cut(text: bytes) -> int:
    """Where a long text is cut: after the last line end within a block, else the last space, else a character."""
    for separator in (b"\n", b" "):
        if end := text.rfind(separator, 0, BLOCK_BYTES) + 1:
            return end
    end = BLOCK_BYTES
    while end > BLOCK_BYTES - 4 and text[end] & 0xC0 == 0x80:  # a continuation byte of UTF-8
        end -= 1
    return end


def _decompressed(path: Path) -> Iterator[tuple[bytes, int]]:
    """Chunks of the file's content, each with the position in the file on disk up to which was read."""
    lines = 0
    try:
        with path.open("rb") as file:
            for number, chunk in enumerate(_chunks(path, file)):
                yield chunk if number else chunk.removeprefix(_BYTE_ORDER_MARK), file.tell()
                lines += chunk.count(b"\n")
    except OSError as error:
        why = error.strerror or str(error)
        raise DataError(f"{path}: cannot be read after line {lines}: {why}") from None
    except (EOFError, zlib.error, zstandard.ZstdError) as error:
        raise DataError(f"{path}: damaged after line {lines}: {error}; fetch or compress the file again") from None


def _chunks(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    if path.name.endswith(".zst"):
        yield from _zstd_chunks(file)
        return
    stream: Any = gzip.GzipFile(fileobj=file, mode="rb") if path.name.endswith(".gz") else file
    while chunk := stream.read(_READ_BYTES):
        yield chunk


def _zstd_chunks(file: IO[bytes]) -> Iterator[bytes]:
    """Decompress frame after frame. The library's own file reader takes a cut-off file for a complete one."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)  # archives made with --long
    frame, inside, pending = decompressor.decompressobj(), False, b""
    while pending or (pending := file.read(_ZSTD_READ_BYTES)):
        if chunk := frame.decompress(pending):
            yield chunk
        inside, pending = not frame.eof, frame.unused_data
        if not inside:
            frame = decompressor.decompressobj()
    if inside:
        raise EOFError("the compressed data end in the middle of a frame")


# --------------------------------------------------------------------------------------------- rows of parquet


def _parquet_blocks(path: Path, text_key: str) -> Iterator[Block]:
    size_bytes = path.stat().st_size
    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _check_column(path, file, text_key)
            rows = max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=[text_key]):
                column = batch.column(0)
                if column.null_count:
                    missing = column.is_null().to_pylist().index(True)
                    raise DataError(f"{path}: row {row + missing + 1}: the column {text_key!r} is null")
                items = tuple(text.encode() for text in column.to_pylist())
                yield Block(str(path), "rows", row + 1, items, size_bytes * (row + len(items)) // rows)
                row += len(items)
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{path}: damaged or no parquet file, after row {row}: {_first_line(error)}") from None


def _check_column(path: Path, file: pyarrow.parquet.ParquetFile, text_key: str) -> None:
    schema = file.schema_arrow
    if text_key not in schema.names:
        raise DataError(f"{path}: no column {text_key!r}; columns: {', '.join(schema.names[:8])}; set the text key")
    kind = schema.field(text_key).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise DataError(f"{path}: the column {text_key!r} holds {kind}, not strings")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
