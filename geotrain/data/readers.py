"""Reads input files as streams of raw blocks of bounded size, and parses blocks into documents.

Reading (decompression, cutting into lines) is sequential, and one process does it. Parsing needs nothing but the
block, so many processes can do it. Texts and JSON lines may be compressed, whatever the file is called.
"""

from __future__ import annotations

import bz2
import json
import lzma
import re
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import pyarrow
import pyarrow.parquet
import zstandard

from geotrain.common.files import git_lfs_pointer
from geotrain.data.tokens import DataError

BLOCK_BYTES = 1 << 20  # approximate size of a block; a longer .txt file becomes several documents
LINE_LIMIT_BYTES = 64 << 20  # a longer line of JSON is broken, since it would have to be held in memory whole
BLOCK_ROWS = 256  # rows of a parquet or Arrow file in a block
_READ_BYTES = 1 << 20
_PACKED_READ_BYTES = 1 << 14  # little: all that comes out of it is in memory at once, and may be many times as much
# Name's end → how a compressed file begins, and what decompresses one of the parts that it is made of (of zstd also
# made with --long). The libraries' own file readers take some cut files for whole ones, and some damage for the end.
_PACKED: dict[str, tuple[bytes, Callable[[], Any]]] = {
    ".gz": (rb"\x1f\x8b", lambda: zlib.decompressobj(wbits=31)),
    ".zst": (rb"\x28\xb5\x2f\xfd", lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()),
    ".bz2": (rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", bz2.BZ2Decompressor),
    ".xz": (rb"\xfd7zXZ\x00", lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ)),
}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class UnreadableError(DataError):
    """Raised where a disk or a network fails, whatever the file holds: what follows in it must not be passed over."""


@dataclass(frozen=True)
class TextBlock:
    """A part of one input file, not yet parsed.

    kind: what the items are. "text": one item, a document. "jsonl": lines, a JSON object each. "rows": documents,
    None for a null. "fault": one item, which says why the rest of the file cannot be read.
    first: number of the first line or row, from 1, for errors.
    position_bytes: how much of the file on disk has been read with this block, for the progress display.
    """

    path: str
    kind: Literal["text", "jsonl", "rows", "fault"]
    first: int
    items: tuple[bytes | None, ...]
    position_bytes: int


def ending(path: Path) -> tuple[str, str]:
    """Split the end of a file's name into its kind and its compression: (".jsonl", ".gz"), or ""."""
    packed = path.suffix if path.suffix in _PACKED else ""
    return Path(path.name.removesuffix(packed)).suffix, packed


def read_blocks(path: Path, text_key: str) -> Generator[TextBlock, None, None]:
    """Stream a file. Memory is bounded by a block and a line of JSON. text_key: the column in parquet and Arrow.

    Where reading stops before the end, as in a file that was cut, the last block is a fault, behind all that came
    before it. Raises UnreadableError.
    """
    try:
        if pointer := git_lfs_pointer(path):
            raise DataError(f"{path}: {pointer}")
        if (kind := ending(path)[0]) in (".parquet", ".arrow"):
            yield from _row_blocks(path, text_key)
        else:
            yield from (_text_blocks if kind == ".txt" else _jsonl_blocks)(path)
    except UnreadableError:
        raise
    except DataError as error:
        yield TextBlock(str(path), "fault", 1, (str(error).encode(),), path.stat().st_size if path.exists() else 0)


def check_inputs(files: Sequence[Path], text_key: str) -> None:
    """Read the beginning of each input file, before anything is made of them.

    Raises DataError: naming the files of which nothing can be read, or what is wrong with the first line where no
    file begins with a text.
    """
    useless, broken, found = list[str](), list[str](), False
    for path in files:
        with closing(read_blocks(path, text_key)) as blocks:
            block = next(blocks, None)
        if block is not None and block.kind == "fault":
            list(parse_block(block, text_key, useless))
        elif block is not None:
            found |= any(parse_block(block, text_key, broken))
    if useless:
        more = f"; and {len(useless) - 3} more files" if len(useless) > 3 else ""
        raise DataError("; ".join(useless[:3]) + more)
    if broken and not found:
        raise DataError(f"no input begins with a text: {broken[0]}")


def parse_block(block: TextBlock, text_key: str, broken: list[str] | None = None) -> Iterator[str]:
    """Parse a block into documents; empty ones are left out. text_key: of the text in a JSON object.

    broken: a list to which the faults of items are appended, each naming file and line or row; such items are passed
    over. None: they raise DataError.
    """
    number = block.first
    for item in block.items:
        text, fault = "", None
        try:
            if item is None:
                raise ValueError(f"the column {text_key!r} is null")
            text = item.decode() if block.kind != "jsonl" else _json_text(item, text_key)
            text.encode()  # JSON may hold lone surrogates, which no tokenizer accepts: found here, they have a line
            fault = text if block.kind == "fault" else None
        except UnicodeDecodeError as error:
            before = error.object[: error.start] if block.kind == "text" else b""
            line = number + before.count(b"\n")
            fault = f"{block.path}:{line}: not UTF-8 ({error.reason}); convert the file to UTF-8"
        except UnicodeEncodeError as error:
            fault = f"{block.path}:{number}: not valid Unicode ({error.reason}); repair the line"
        except (ValueError, RecursionError) as error:
            fault = f"{block.path}:{number}: {error}"
        if fault is not None:
            if broken is None:
                raise DataError(fault)
            broken.append(fault)
        elif text:
            yield text
        number += 1


def _json_text(line: bytes, text_key: str) -> str:
    """Parse a line of JSON and return its text; "" for an empty line. Raises ValueError saying what is wrong."""
    if not line.strip():
        return ""
    if len(line) > LINE_LIMIT_BYTES:
        raise ValueError(f"a line longer than {LINE_LIMIT_BYTES >> 20} MiB; cut the document")
    try:
        record = json.loads(line.decode())
    except json.JSONDecodeError as error:
        raise ValueError(
            f"not JSON: {error.msg} at column {error.colno}; each line must be one JSON object"
        ) from None
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__}, not a JSON object with the key {text_key!r}")
    if text_key not in record:
        raise ValueError(f"no key {text_key!r}; keys present: {', '.join(list(record)[:8])}; name it by --text-key")
    if not isinstance(record[text_key], str):
        raise ValueError(f"the key {text_key!r} holds no string but a {type(record[text_key]).__name__}")
    return str(record[text_key])


# ------------------------------------------------------------------------------------------ text and JSON lines


def _jsonl_blocks(path: Path) -> Iterator[TextBlock]:
    lines: list[bytes] = []
    first, size_bytes, rest, position_bytes = 1, 0, b"", 0
    damage: DataError | None = None
    try:
        for chunk, position_bytes in _decompressed(path):
            *whole, rest = (rest + chunk).split(b"\n")  # rest: a line whose end has not been read yet
            rest = rest[: LINE_LIMIT_BYTES + 1]  # enough to see that it is too long
            for line_bytes in whole:
                lines.append(line_bytes)
                size_bytes += len(line_bytes)
                if size_bytes >= BLOCK_BYTES:
                    yield TextBlock(str(path), "jsonl", first, tuple(lines), position_bytes)
                    first += len(lines)
                    lines, size_bytes = [], 0
    except DataError as error:
        damage, rest = error, b""
    if rest:
        lines.append(rest)
    if lines:
        yield TextBlock(str(path), "jsonl", first, tuple(lines), position_bytes)
    if damage:
        raise damage


def _text_blocks(path: Path) -> Iterator[TextBlock]:
    first, text, position_bytes = 1, b"", 0
    for chunk, position_bytes in _decompressed(path):
        text += chunk
        while len(text) > BLOCK_BYTES:
            # Cut after the last line end within a block, else the last space, else between two characters.
            end = text.rfind(b"\n", 0, BLOCK_BYTES) + 1 or text.rfind(b" ", 0, BLOCK_BYTES) + 1 or BLOCK_BYTES
            while BLOCK_BYTES - 4 < end <= BLOCK_BYTES and text[end] & 0xC0 == 0x80:  # a continuation byte of UTF-8
                end -= 1
            yield TextBlock(str(path), "text", first, (text[:end],), position_bytes)
            first += text.count(b"\n", 0, end)
            text = text[end:]
    if text:
        yield TextBlock(str(path), "text", first, (text,), position_bytes)


def _decompressed(path: Path) -> Iterator[tuple[bytes, int]]:
    """Read a file's content in chunks, each with the position in the file on disk up to which was read.

    Failures of reading and decompressing become DataError here.
    """
    lines = 0  # so far, for errors
    try:
        with path.open("rb") as file:
            for number, chunk in enumerate(_chunks(path, file)):
                yield chunk if number else chunk.removeprefix(_BYTE_ORDER_MARK), file.tell()
                lines += chunk.count(b"\n")
    except (EOFError, OSError, lzma.LZMAError, zlib.error, zstandard.ZstdError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # bz2 has none for what a file holds
            raise UnreadableError(f"{path}: cannot be read after line {lines}: {error.strerror}") from None
        raise DataError(f"{path}: damaged after line {lines}: {error}; fetch or compress the file again") from None


def _chunks(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    """Read a file's content, decompressed by what its first bytes say, or else by what its name says."""
    head = file.read(_PACKED_READ_BYTES)
    begins = [packed for packed, (magic, _) in _PACKED.items() if re.match(magic, head)]
    if (packed := (*begins, ending(path)[1])[0]) == "":
        while head:
            yield head
            head = file.read(_READ_BYTES)
        return
    new_part = _PACKED[packed][1]
    part, inside = new_part(), True
    while head or (head := file.read(_PACKED_READ_BYTES)):
        if not inside:
            if packed in (".gz", ".xz") and not (head := head.lstrip(b"\0")):  # padding, which these may have
                continue
            part = new_part()
        if chunk := part.decompress(head):
            yield chunk
        inside, head = not part.eof, part.unused_data
    if inside:
        raise EOFError("the compressed data end too early")


# ----------------------------------------------------------------------------------- rows of parquet and Arrow


def _row_blocks(path: Path, text_key: str) -> Iterator[TextBlock]:
    row = 0
    try:
        for column, position_bytes in (_arrow if path.name.endswith(".arrow") else _parquet)(path, text_key):
            items = tuple(column.cast(pyarrow.large_binary()).to_pylist())
            yield TextBlock(str(path), "rows", row + 1, items, position_bytes)
            row += len(items)
    except (OSError, pyarrow.ArrowException) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        if isinstance(error, OSError) and error.errno is not None:  # Arrow has none for what a file holds
            raise UnreadableError(f"{path}: cannot be read after row {row}: {why}") from None
        kind = path.suffix.removeprefix(".")
        raise DataError(f"{path}: damaged or no {kind} file, after row {row}: {why}") from None


def _parquet(path: Path, text_key: str) -> Iterator[tuple[Any, int]]:
    """Read a column of parquet, BLOCK_ROWS at a time, each with the position in the file up to which it goes."""
    size_bytes, row = path.stat().st_size, 0
    with pyarrow.parquet.ParquetFile(path) as file:
        _check_column(path, file.schema_arrow, text_key)
        rows = max(file.metadata.num_rows, 1)
        for batch in file.iter_batches(batch_size=BLOCK_ROWS, columns=[text_key]):
            row += batch.num_rows
            yield batch.column(0), size_bytes * row // rows


def _arrow(path: Path, text_key: str) -> Iterator[tuple[Any, int]]:
    """Read a column of an Arrow stream likewise. It is mapped into memory, so only its text is read."""
    with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
        _check_column(path, stream.schema, text_key)
        for batch in stream:
            for first in range(0, batch.num_rows, BLOCK_ROWS):
                yield batch.column(text_key).slice(first, BLOCK_ROWS), file.tell()


def _check_column(path: Path, schema: Any, text_key: str) -> None:
    if text_key not in schema.names:
        columns = ", ".join(schema.names[:8])
        raise DataError(f"{path}: no column {text_key!r}; columns: {columns}; name it by --text-key")
    if schema.names.count(text_key) > 1:
        raise DataError(f"{path}: has several columns {text_key!r}; rename all but the one that is meant")
    kind = schema.field(text_key).type
    try:
        pyarrow.nulls(0, kind).cast(pyarrow.large_binary())  # strings and bytes, long or short, views and categories
    except pyarrow.ArrowException:
        fits = False
    else:
        fits = not pyarrow.types.is_null(kind)
    if not fits:
        raise DataError(f"{path}: the column {text_key!r} holds {kind}, not strings")
