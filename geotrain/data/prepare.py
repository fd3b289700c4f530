"""Text files → tokens: what `geotrain prepare` does.

One process reads the files as raw blocks, several parse and tokenize them, and the first writes the results in
the order of the input: the output has the same bits whatever the number of processes. The output folder

    train.bin  train.idx  train.json  [validation.bin  validation.idx  validation.json]  tokenizer/

appears whole, at the end, or not at all.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from geotrain.data.readers import Block, parse_block, read_blocks
from geotrain.data.tokenizer import Tokenizer
from geotrain.data.tokens import DataError, Manifest, TokenWriter, WriterFactory, manifest_path, token_dtype
from geotrain.files import whole_folder

BLOCKS_PER_PROCESS = 2  # in flight: bounds the memory and keeps every process busy
BLOCK_DEADLINE_S = 600.0  # a block takes about a second
BPE_TEXT_BYTES = 1 << 30  # text a BPE is trained on; more changes little and costs memory


@dataclass(frozen=True)
class Progress:
    """How far `prepare` is: bytes of the input files on disk, and what came out."""

    done_bytes: int
    total_bytes: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class Encoded:
    """The documents of a block, tokenized.

    ids: all documents' ids joined, each document ended by the end-of-document id. For each document: where it
    ends in `ids`, the size of its text, and whether it is held out for validation.
    """

    ids: npt.NDArray[Any]
    ends: tuple[int, ...]
    text_bytes: tuple[int, ...]
    validation: tuple[bool, ...]


@dataclass(frozen=True)
class Encoder:
    """Turns blocks into tokens. It is plain data, so that it can be sent to a process once."""

    tokenizer: Tokenizer
    text_key: str
    validation_fraction: float

    def load(self) -> tokenizers.Tokenizer:
        tokenizer = tokenizers.Tokenizer.from_str(self.tokenizer.json)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a document is text, not the end of a document
        return tokenizer

    def encode(self, tokenizer: tokenizers.Tokenizer, block: Block) -> Encoded:
        """Raises DataError naming file and line of what cannot be read."""
        dtype = token_dtype(self.tokenizer.vocab_size)
        parts: list[npt.NDArray[Any]] = [np.empty(0, dtype)]
        ends: list[int] = []
        sizes: list[int] = []
        validation: list[bool] = []
        for text in parse_block(block, self.text_key):
            [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=False)
            parts.append(np.array([*encoding.ids, self.tokenizer.end_of_document], dtype))
            ends.append(len(parts[-1]) + (ends[-1] if ends else 0))
            sizes.append(len(text.encode()))
            validation.append(is_validation(text, self.validation_fraction))
        return Encoded(np.concatenate(parts), tuple(ends), tuple(sizes), tuple(validation))


def is_validation(text: str, fraction: float) -> bool:
    """Whether a document is held out: by a hash of its text, so equal documents never stand on both sides."""
    value = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    return value < fraction * 2.0**64


def prepare(
    files: Sequence[Path],
    output: Path,
    tokenizer: Tokenizer,
    new_writer: WriterFactory,
    *,
    text_key: str = "text",
    validation_fraction: float = 0.0,
    processes: int = 1,
    progress: Callable[[Progress], None] = lambda _: None,
) -> dict[str, Manifest]:
    """Tokenize files (see `find_inputs`) into the folder `output`; gives each split's manifest.

    Raises DataError (input), OutputError (output folder) and what the writer raises; then nothing is left behind.
    """
    if not 0 <= validation_fraction < 1:
        raise DataError(f"the validation fraction must be at least 0 and less than 1, not {validation_fraction}")
    splits = ["train", "validation"] if validation_fraction > 0 else ["train"]
    encoder = Encoder(tokenizer, text_key, validation_fraction)
    with whole_folder(output, "dataset") as folder:
        writers = {split: _SplitWriter(folder / split, tokenizer, new_writer) for split in splits}
        try:
            _write_all(files, encoder, processes, writers, progress)
            for split, writer in writers.items():
                if not writer.documents:
                    raise DataError(f"no document came into the {split} split; give more text or another fraction")
            tokenizer.save(folder / "tokenizer")
            return {split: writer.close() for split, writer in writers.items()}
        except BaseException:
            for writer in writers.values():
                writer.discard()
            raise


def training_texts(files: Sequence[Path], text_key: str, limit_bytes: int = BPE_TEXT_BYTES) -> Iterator[str]:
    """Texts to train a tokenizer on: about `limit_bytes` in all, an equal share from every file large enough."""
    by_size = sorted(files, key=lambda path: (path.stat().st_size, path))
    for index, path in enumerate(by_size):
        share_bytes = limit_bytes // (len(by_size) - index)
        used_bytes = 0
        for block in read_blocks(path, text_key):
            if used_bytes >= share_bytes:
                break
            for text in parse_block(block, text_key):
                used_bytes += len(text.encode())
                yield text
        limit_bytes = max(limit_bytes - used_bytes, 0)


class _SplitWriter:
    """Writes one split and counts what it wrote."""

    def __init__(self, prefix: Path, tokenizer: Tokenizer, new_writer: WriterFactory) -> None:
        self._prefix, self._tokenizer = prefix, tokenizer
        self._writer: TokenWriter = new_writer(str(prefix), tokenizer.vocab_size)
        self._digest = hashlib.sha256()
        self.documents = self.tokens = self.text_bytes = 0

    def add(self, ids: npt.NDArray[Any], text_bytes: int) -> None:
        self._writer.add_document(ids)
        self._digest.update(ids.tobytes())
        self.documents += 1
        self.tokens += len(ids)
        self.text_bytes += text_bytes

    def close(self) -> Manifest:
        self._writer.close()
        manifest = Manifest(
            tokens=self.tokens,
            documents=self.documents,
            text_bytes=self.text_bytes,
            vocab_size=self._tokenizer.vocab_size,
            end_of_document=self._tokenizer.end_of_document,
            dtype=token_dtype(self._tokenizer.vocab_size).name,
            sha256=self._digest.hexdigest(),
            tokenizer="tokenizer",
        )
        manifest_path(self._prefix).write_text(manifest.model_dump_json(indent=1) + "\n")
        return manifest

    def discard(self) -> None:
        self._writer.discard()


def _write_all(
    files: Sequence[Path],
    encoder: Encoder,
    processes: int,
    writers: dict[str, _SplitWriter],
    progress: Callable[[Progress], None],
) -> None:
    sizes = {str(path): path.stat().st_size for path in files}
    finished_bytes, current = 0, ""
    blocks = (block for path in files for block in read_blocks(path, encoder.text_key))
    with closing(_encode_all(blocks, encoder, processes)) as results:
        for block, encoded in results:
            if block.path != current:
                finished_bytes += sizes.get(current, 0)
                current = block.path
            begin = 0
            for end, text_bytes, held_out in zip(encoded.ends, encoded.text_bytes, encoded.validation, strict=True):
                writers["validation" if held_out else "train"].add(encoded.ids[begin:end], text_bytes)
                begin = end
            progress(
                Progress(
                    finished_bytes + block.position_bytes,
                    sum(sizes.values()),
                    sum(writer.documents for writer in writers.values()),
                    sum(writer.tokens for writer in writers.values()),
                )
            )


# ------------------------------------------------------------------------------------------- several processes

_loaded: tuple[Encoder, tokenizers.Tokenizer] | None = (
    None  # in a process of the pool; too large to come with a block
)


def _start_process(encoder: Encoder) -> None:
    global _loaded
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _loaded = encoder, encoder.load()


def _end_with_parent() -> None:
    """A pool's process waits for work for ever when its parent is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _encode(block: Block) -> Encoded:
    assert _loaded is not None
    encoder, tokenizer = _loaded
    return encoder.encode(tokenizer, block)


def _encode_all(
    blocks: Iterator[Block], encoder: Encoder, processes: int
) -> Generator[tuple[Block, Encoded], None, None]:
    """Encode blocks in a pool, in order, with a bounded number in flight."""
    context = multiprocessing.get_context("spawn")  # a fork would copy the tokenizers' threads half alive
    pool = ProcessPoolExecutor(processes, context, _start_process, (encoder,))
    waiting: deque[tuple[Block, Future[Encoded]]] = deque()

    def next_result() -> tuple[Block, Encoded]:
        block, future = waiting.popleft()
        try:
            return block, future.result(timeout=BLOCK_DEADLINE_S)
        except BrokenProcessPool:
            raise DataError(
                f"{block.path}:{block.first}: a tokenizing process died here, perhaps for lack of memory; "
                "use fewer processes"
            ) from None
        except TimeoutError:
            for process in list(pool._processes.values()):  # there is no public way before Python 3.14
                process.kill()
            raise DataError(
                f"{block.path}:{block.first}: tokenizing from here took over {BLOCK_DEADLINE_S:.0f} s; "
                "look at the text, or use a simpler tokenizer"
            ) from None

    try:
        for block in blocks:
            waiting.append((block, pool.submit(_encode, block)))
            if len(waiting) >= BLOCKS_PER_PROCESS * processes:
                yield next_result()
        while waiting:
            yield next_result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
