"""Turns text files into token files, for `geotrain prepare`.

One process reads the files as raw blocks, several parse and tokenize these, and the first writes the results in the
order of the input, so that the output has the same bits whatever the number of processes. The output folder

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
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from geotrain.common.files import whole_folder
from geotrain.data.dataset import SPLITS, Manifest, manifest_path
from geotrain.data.readers import TextBlock, check_inputs, parse_block, read_blocks
from geotrain.data.shards import INPUTS, describe_inputs, files_of_shard, shard_folder
from geotrain.data.tokenizer import Tokenizer, fingerprint
from geotrain.data.tokens import DataError, TokenWriter, token_dtype

BLOCKS_PER_PROCESS = 2  # in flight: bounds the memory and keeps every process busy
BLOCK_DEADLINE_S = 600.0  # a block takes about a second
VALIDATION_SHARE = 0.01  # of documents, held out where nothing is said
FEW_DOCUMENTS = 8  # held out: fewer say little
BPE_TEXT_BYTES = 1 << 30  # text a BPE is trained on; more changes little and costs memory


@dataclass(frozen=True)
class Progress:
    """Progress of `prepare`.

    done_bytes, total_bytes: of the input files on disk, compressed as they are. documents, tokens: written so far.
    broken: lines, rows and rests of cut files passed over so far; first_broken: what is wrong with the first.
    """

    done_bytes: int
    total_bytes: int
    documents: int
    tokens: int
    broken: int = 0
    first_broken: str = ""


@dataclass(frozen=True)
class TokenizedDocument:
    """A document of a block, tokenized.

    ids: its tokens between the ids that begin and end documents, in the type of the .bin file. text_bytes: size of
    its text in UTF-8. held_out: whether it belongs to the validation split.
    """

    ids: npt.NDArray[Any]
    text_bytes: int
    held_out: bool


@dataclass(frozen=True)
class EncodedBlock:
    """A block's documents, and what is wrong with each of its items that were passed over."""

    documents: list[TokenizedDocument]
    broken: list[str]


@dataclass(frozen=True)
class Encoder:
    """Turns blocks into tokens. Plain data, so that it can be sent to a process, once, when that starts.

    skip_broken: pass over items that are no text (`parse_block`), instead of raising.
    """

    tokenizer: Tokenizer
    text_key: str
    validation_fraction: float
    skip_broken: bool = False

    def load(self) -> tokenizers.Tokenizer:
        """Load the tokenizer in this process, set so that a document's tokens depend on its text alone."""
        tokenizer = tokenizers.Tokenizer.from_str(self.tokenizer.json)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a document is text, not the end of a document
        return tokenizer

    def encode(self, tokenizer: tokenizers.Tokenizer, block: TextBlock) -> EncodedBlock:
        """Parse and tokenize a block. tokenizer: from `load`. Raises DataError naming file and line of a fault."""
        dtype = token_dtype(self.tokenizer.vocab_size)
        begin = [] if self.tokenizer.begin_of_document is None else [self.tokenizer.begin_of_document]
        found, broken = [], list[str]()
        for text in parse_block(block, self.text_key, broken if self.skip_broken else None):
            [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=False)
            ids = np.array([*begin, *encoding.ids, self.tokenizer.end_of_document], dtype)
            found.append(TokenizedDocument(ids, len(text.encode()), is_validation(text, self.validation_fraction)))
        return EncodedBlock(found, broken)


def is_validation(text: str, fraction: float) -> bool:
    """Whether a document is held out for validation.

    A hash of its text decides, so that equal documents always fall on the same side, and the decision depends neither
    on order nor on the other documents.
    """
    return _draw(text) < fraction * 2.0**64


def _draw(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def validation_share(files: Sequence[Path], text_key: str) -> float:
    """Choose the share of documents to hold out: VALIDATION_SHARE, but of few documents what holds out FEW_DOCUMENTS
    or a tenth of them, and one at least. Reads no further than to see that they are not few."""
    draws = set[int]()
    for path in files:
        for block in read_blocks(path, text_key):
            draws.update(map(_draw, parse_block(block, text_key, [])))
            if sum(draw < VALIDATION_SHARE * 2.0**64 for draw in draws) >= FEW_DOCUMENTS:
                return VALIDATION_SHARE
    if len(draws) < 2:
        return 0.0 if draws else VALIDATION_SHARE  # one document cannot stand on both sides
    ordered, held_out = sorted(draws), max(min(len(draws) // 10, FEW_DOCUMENTS), 1)
    return (ordered[held_out - 1] + ordered[held_out]) / 2.0**65


def prepare(
    files: Sequence[Path],
    output: Path,
    tokenizer: Tokenizer,
    *,
    text_key: str = "text",
    validation_fraction: float = 0.0,
    processes: int = 1,
    skip_broken: bool = False,
    shard: tuple[int, int] = (1, 1),
    progress: Callable[[Progress], None] = lambda _: None,
) -> dict[str, Manifest]:
    """Tokenize files (`find_inputs`) into the folder `output`. Returns the manifest of each split.

    text_key: of the text in JSON and parquet. validation_fraction: share of the documents that is held out.
    processes: that tokenize. skip_broken: pass over what is no text, in lines, rows or the rest of a cut file, and
    count it, unless that is most; a file of which nothing can be read is an error at the start.
    shard: which part of the files, of how many (`geotrain.data.shards`); one of several goes into a folder of its own
    in `output`, and may lack a split. progress: called after each block.
    Raises DataError (input, writing) and OutputError (output folder); then nothing is left behind.
    """
    if not 0 <= validation_fraction < 1:
        raise DataError(f"the validation fraction must be at least 0 and less than 1, not {validation_fraction}")
    splits = SPLITS if validation_fraction > 0 else SPLITS[:1]
    around = tokenizer.begin_of_document, tokenizer.end_of_document
    common = describe_inputs(files, tokenizer.json, around, validation_fraction)
    if shard[1] > 1:
        files, output = files_of_shard(files, *shard), shard_folder(output, *shard)
    check_inputs(files, text_key)
    encoder = Encoder(tokenizer, text_key, validation_fraction, skip_broken)
    sizes, finished_bytes, current = {str(path): path.stat().st_size for path in files}, 0, ""
    document_count = token_count = broken_count = 0
    first_broken = ""
    blocks = (block for path in files for block in read_blocks(path, text_key))
    with whole_folder(output, "dataset") as folder, ExitStack() as stack:
        writers = {split: stack.enter_context(TokenWriter(folder / split, tokenizer.vocab_size)) for split in splits}
        text_bytes = dict.fromkeys(splits, 0)
        results = stack.enter_context(closing(_encode_all(blocks, encoder, processes)))
        for block, encoded in results:
            if block.path != current:
                finished_bytes += sizes.get(current, 0)
                current = block.path
            for document in encoded.documents:
                split = "validation" if document.held_out else "train"
                writers[split].add_document(document.ids)
                text_bytes[split] += document.text_bytes
                document_count, token_count = document_count + 1, token_count + len(document.ids)
            done_bytes = finished_bytes + block.position_bytes
            broken_count += len(encoded.broken)
            first_broken = first_broken or next(iter(encoded.broken), "")
            counts = document_count, token_count, broken_count, first_broken
            progress(Progress(done_bytes, sum(sizes.values()), *counts))
        if broken_count > document_count:
            raise DataError(
                f"most lines or rows are broken, {broken_count} beside {document_count} good ones: {first_broken}"
            )
        for split, writer in writers.items():
            if not writer.documents and shard[1] == 1:
                raise DataError(
                    f"no document came into the {split} split; give more text, or another --validation than "
                    f"{validation_fraction:g}"
                )
        tokenizer.save(folder / "tokenizer")
        if shard[1] > 1:
            (folder / INPUTS).write_text(common)
        manifests = {}
        for split, writer in writers.items():
            if not writer.documents:  # of a small shard
                writer.discard()
                continue
            writer.close()
            manifests[split] = Manifest(
                tokens=writer.tokens,
                documents=writer.documents,
                text_bytes=text_bytes[split],
                vocab_size=tokenizer.vocab_size,
                end_of_document=tokenizer.end_of_document,
                begin_of_document=tokenizer.begin_of_document,
                dtype=writer.dtype.name,
                sha256=writer.digest.hexdigest(),
                tokenizer="tokenizer",
                tokenizer_sha256=fingerprint(tokenizer.files["tokenizer.json"]),
                checksums=True,
            )
            (folder / f"{split}.crc").write_bytes(writer.checksums.content())
            manifest_path(folder / split).write_text(manifests[split].model_dump_json(indent=1) + "\n")
        return manifests


def training_texts(
    files: Sequence[Path], text_key: str, limit_bytes: int = BPE_TEXT_BYTES, skip_broken: bool = False
) -> Iterator[str]:
    """Yield texts to train a tokenizer on: about `limit_bytes` in all, an equal share from every file large enough.

    skip_broken: pass over what is no text, which `prepare` counts.
    """
    # Smallest first: what a small file lacks of its share is shared among the larger ones that follow.
    by_size = sorted(files, key=lambda path: (path.stat().st_size, path))
    for index, path in enumerate(by_size):
        share_bytes = limit_bytes // (len(by_size) - index)
        used_bytes = 0
        for block in read_blocks(path, text_key):
            if used_bytes >= share_bytes:
                break
            for text in parse_block(block, text_key, [] if skip_broken else None):
                used_bytes += len(text.encode())
                yield text
        limit_bytes = max(limit_bytes - used_bytes, 0)


# ------------------------------------------------------------------------------------------- several processes

# Set in each process of the pool when it starts: the tokenizer is too large to travel with every block.
_loaded: tuple[Encoder, tokenizers.Tokenizer] | None = None


def _start_process(encoder: Encoder) -> None:
    global _loaded
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        """End this process when its parent is killed: a process of a pool would wait for work for ever."""
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    _loaded = encoder, encoder.load()


def _encode(block: TextBlock) -> EncodedBlock:
    assert _loaded is not None
    encoder, tokenizer = _loaded
    return encoder.encode(tokenizer, block)


def _encode_all(
    blocks: Iterator[TextBlock], encoder: Encoder, processes: int
) -> Generator[tuple[TextBlock, EncodedBlock], None, None]:
    """Encode blocks in a pool of processes; yield the results in the order of the blocks.

    The number of blocks in flight is bounded, and with it the memory.
    """
    context = multiprocessing.get_context("spawn")  # a fork would copy the tokenizers' threads half alive
    pool = ProcessPoolExecutor(processes, context, _start_process, (encoder,))
    waiting: deque[tuple[TextBlock, Future[EncodedBlock]]] = deque()

    def next_result() -> tuple[TextBlock, EncodedBlock]:
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
