import contextlib
import errno
import gzip
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
import zstandard
from typer.testing import CliRunner

from geotrain.commands import prepare as command
from geotrain.commands.cli import app
from geotrain.common.files import OutputError
from geotrain.config import ConfigError
from geotrain.data import corpus, readers
from geotrain.data import prepare as prepare_module
from geotrain.data.dataset import open_dataset, read_manifest
from geotrain.data.inputs import find_inputs
from geotrain.data.prepare import (
    BLOCKS_PER_PROCESS,
    Encoder,
    Progress,
    _encode_all,
    is_validation,
    prepare,
    training_texts,
)
from geotrain.data.readers import TextBlock
from geotrain.data.shards import merge
from geotrain.data.tokenizer import byte_tokenizer, load_tokenizer
from geotrain.data.tokens import DataError, TokenWriter, open_tokens

TEXTS = [f"document {i}: " + "ü" * (i % 13) + " <|endoftext|>" * (i % 3 == 0) for i in range(60)]


def write_inputs(folder: Path) -> list[Path]:
    """TEXTS over all kinds of files, in the order in which `find_inputs` gives them."""

    def lines(texts: list[str]) -> bytes:
        return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()

    folder.mkdir()
    (folder / "a.jsonl").write_bytes(lines(TEXTS[:20]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS[20:30])))
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(lines(TEXTS[30:40])))
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS[40:59]}), folder / "d.parquet")
    (folder / "e.txt").write_text(TEXTS[59])
    return find_inputs([str(folder)])


def read_documents(prefix: Path) -> list[list[int]]:
    file = open_tokens(str(prefix))
    return [part.tolist() for part in np.split(np.asarray(file.tokens), file.document_ends(0, file.documents - 1))]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_all_kinds_of_files_become_tokens(tmp_path: Path) -> None:
    shown: list[Progress] = []
    files = write_inputs(tmp_path / "in")
    manifests = prepare(files, tmp_path / "out", byte_tokenizer(), validation_fraction=0.2, progress=shown.append)
    expected: dict[str, list[list[int]]] = {"train": [], "validation": []}
    for text in TEXTS:
        split = "validation" if is_validation(text, 0.2) else "train"
        expected[split].append([*text.encode(), 256])  # "<|endoftext|>" inside a text is text
    assert min(len(documents) for documents in expected.values()) > 3
    for split, documents in expected.items():
        prefix = tmp_path / "out" / split
        assert read_documents(prefix) == documents
        manifest, _ = open_dataset(prefix, 264)
        assert manifest == manifests[split]
        assert manifest.documents == len(documents)
        assert manifest.tokens == sum(map(len, documents)) == manifest.text_bytes + len(documents)
        assert manifest.sha256 == hashlib.sha256(prefix.with_suffix(".bin").read_bytes()).hexdigest()
        assert (manifest.vocab_size, manifest.end_of_document, manifest.dtype) == (264, 256, "uint16")
        assert load_tokenizer(tmp_path / "out" / manifest.tokenizer).end_of_document == 256
    assert [p.documents for p in shown] == [20, 30, 40, 59, 60]
    assert shown[-1].done_bytes == shown[-1].total_bytes == sum(f.stat().st_size for f in files)


def test_documents_begin_with_a_token_where_one_is_named(tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path / "tokenizer")
    for name, texts in (("a.jsonl", TEXTS[:30]), ("b.jsonl", TEXTS[30:])):
        (tmp_path / name).write_text("\n".join(json.dumps({"text": text}) for text in texts))
    words = ["prepare", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), "--processes", "1", "--validation", "0"]
    mine = [*words, "--tokenizer", str(tmp_path / "tokenizer"), "--begin-of-document", "<|reserved_3|>"]
    done = CliRunner().invoke(app, [*mine, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert read_documents(tmp_path / "out/train") == [[260, *text.encode(), 256] for text in TEXTS]
    assert read_manifest(tmp_path / "out/train").begin_of_document == 260
    for number, begins in ((1, mine), (2, mine[:-2])):
        done = CliRunner().invoke(app, [*begins, "--out", str(tmp_path / "parts"), "--shard", f"{number}/2"])
        assert done.exit_code == 0, done.output
    with pytest.raises(DataError, match="was made of other files, with another tokenizer"):
        merge(tmp_path / "parts")
    with pytest.raises(ConfigError, match="name tokens of a --tokenizer"):
        command.prepare_files(
            [str(tmp_path / "a.jsonl")], tmp_path / "no", None, None, True, 0.0, begin_of_document="<s>"
        )


def test_the_number_of_processes_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "BLOCK_BYTES", 100)  # many blocks, so that processes overtake each other
    files = write_inputs(tmp_path / "in")
    for processes in (1, 3):
        out = tmp_path / f"out{processes}"
        prepare(files, out, byte_tokenizer(), validation_fraction=0.2, processes=processes)
    assert tree(tmp_path / "out1") == tree(tmp_path / "out3")
    assert len(read_documents(tmp_path / "out1/train")) > 40


def test_a_tokenizer_from_a_folder_gives_its_own_ids(tmp_path: Path) -> None:
    """A Unigram with a normalizer, truncation and a template that adds a beginning: none of it by default ours."""
    pieces = [("<s>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁the", -1.0), ("▁cat", -1.0), ("▁", -3.0)]
    pieces += [(letter, -5.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, 2))
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(3)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    (tmp_path / "tok").mkdir()
    tokenizer.save(str(tmp_path / "tok/tokenizer.json"))
    (tmp_path / "tok/tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"})
    )
    (tmp_path / "a.txt").write_text("The cat the CAT xyz")
    prepare([tmp_path / "a.txt"], tmp_path / "out", load_tokenizer(tmp_path / "tok"))
    ids = {piece: i for i, (piece, _) in enumerate(pieces)}
    expected = [ids[p] for p in ["▁the", "▁cat", "▁the", "▁cat", "▁", "x", "y", "z", "</s>"]]
    assert read_documents(tmp_path / "out/train") == [expected]
    assert (tmp_path / "out/tokenizer/tokenizer.json").read_bytes() == (tmp_path / "tok/tokenizer.json").read_bytes()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "a.txt").write_text("a text of some length" * 20)
    prepare([folder / "a.txt"], folder / "out", byte_tokenizer())
    return folder / "out"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "train.json").unlink(), r"json: cannot be read: No such file.*`geotrain prepare` writes it"),
        (lambda f: (f / "train.json").write_text('{"tokens": 3'), r"train\.json: damaged; prepare the data again"),
        (lambda f: state_tokens(f / "train.json", 7), r"train: the \.bin/\.idx pair has \d+ tokens .* states 7"),
        (lambda f: os.truncate(f / "train.bin", 100), r"train\.bin holds 50 tokens but"),  # more in test_token_files
    ],
)
def test_damaged_data_are_refused(prepared: Path, tmp_path: Path, damage: Any, message: str) -> None:
    shutil.copytree(prepared, tmp_path / "out")
    damage(tmp_path / "out")
    with pytest.raises(DataError, match=message):
        open_dataset(tmp_path / "out/train", 264)


def state_tokens(manifest: Path, tokens: int) -> None:
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "tokens": tokens}))


def test_a_changed_bit_and_a_small_model_are_refused(prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared, tmp_path / "out")
    with pytest.raises(DataError, match=r"a tokenizer of 264 ids, but the model's vocab_size is 256"):
        open_dataset(tmp_path / "out/train", 256)
    content = bytearray((tmp_path / "out/train.bin").read_bytes())
    content[40] ^= 1
    (tmp_path / "out/train.bin").write_bytes(content)
    with pytest.raises(DataError, match=r"train\.bin: .*damaged"):
        open_dataset(tmp_path / "out/train", 264)[1][:]


def test_nothing_is_trained_where_an_input_or_the_output_is_of_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer of a gigabyte takes minutes."""
    monkeypatch.setattr(command, "train_bpe", lambda *_: pytest.fail("it was trained"))
    write_inputs(tmp_path / "in")
    (tmp_path / "in/z.parquet").write_bytes(b"cut")
    with pytest.raises(DataError, match=r"z\.parquet: damaged or no parquet file"):
        command.prepare_files([str(tmp_path / "in")], tmp_path / "out", None, 300, False, 0.2, processes=1)
    (tmp_path / "in/z.parquet").unlink()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("precious")
    with pytest.raises(OutputError, match="no older dataset of GeoTrain"):
        command.prepare_files([str(tmp_path / "in")], tmp_path / "out", None, 300, False, 0.2, processes=1)


def test_a_cut_file_gives_what_is_before_the_cut(tmp_path: Path) -> None:
    """With a tokenizer trained on it, as with one that is there."""
    write_inputs(tmp_path / "in")
    whole = (tmp_path / "in/b.jsonl.gz").read_bytes()
    (tmp_path / "in/b.jsonl.gz").write_bytes(whole[:-9])
    shown: list[Progress] = []
    files = find_inputs([str(tmp_path / "in")])
    assert len(list(training_texts(files, "text", skip_broken=True))) >= 50
    [manifest] = prepare(files, tmp_path / "out", byte_tokenizer(), skip_broken=True, progress=shown.append).values()
    assert 50 <= manifest.documents <= 60 and shown[-1].broken == 1
    assert "b.jsonl.gz: damaged after line" in shown[-1].first_broken
    with pytest.raises(DataError, match=r"b\.jsonl\.gz: damaged after line"):
        prepare(files, tmp_path / "strict", byte_tokenizer())
    assert not (tmp_path / "strict").exists()


@pytest.mark.parametrize("name", ["b.jsonl.gz", "z.parquet"])
def test_a_disk_or_network_that_fails_is_no_broken_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its rest would be missing for good, and nobody would look for it."""
    write_inputs(tmp_path / "in")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"]}), tmp_path / "in/z.parquet")
    opened = 0

    def failing(*_: Any, **__: Any) -> Any:
        nonlocal opened
        opened += 1
        if opened > 1:  # when all inputs have been looked at
            raise OSError(errno.EIO, "Input/output error")
        return real(*_, **__)

    where = (readers.pyarrow.parquet, "ParquetFile") if name == "z.parquet" else (readers.zlib, "decompressobj")
    real = getattr(*where)
    monkeypatch.setattr(*where, failing)
    with pytest.raises(DataError, match=rf"{re.escape(name)}: cannot be read after (line|row) 0: .*put error"):
        prepare(find_inputs([str(tmp_path / "in")]), tmp_path / "out", byte_tokenizer(), skip_broken=True)
    assert not (tmp_path / "out").exists()


def test_a_bad_line_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "BLOCK_BYTES", 100)
    write_inputs(tmp_path / "in")
    (tmp_path / "in/c2.jsonl").write_text('{"text": "good"}\n{"text": 3}\n')
    with pytest.raises(DataError, match=r"c2\.jsonl:2: the key 'text' holds no string but a int"):
        prepare(find_inputs([str(tmp_path / "in")]), tmp_path / "out", byte_tokenizer(), processes=2)
    assert os.listdir(tmp_path) == ["in"]  # noqa: PTH208 (hidden files too)


def test_a_full_disk_is_an_error_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(writer: TokenWriter, ids: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TokenWriter, "add_document", full)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(OutputError, match="out: cannot be written: No space left on device") as caught:
        prepare([tmp_path / "a.txt"], tmp_path / "out", byte_tokenizer())
    assert not multiprocessing.active_children(), caught  # even while the error is being handled
    assert os.listdir(tmp_path) == ["a.txt"]  # noqa: PTH208 (hidden files too)


def test_an_empty_split_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one document cannot stand on both sides")
    with pytest.raises(DataError, match=r"no document came into the (train|validation) split; .* --validation"):
        prepare([tmp_path / "a.txt"], tmp_path / "out", byte_tokenizer(), validation_fraction=0.5)
    with pytest.raises(DataError, match=r"at least 0 and less than 1, not 1\.5"):
        prepare([tmp_path / "a.txt"], tmp_path / "out", byte_tokenizer(), validation_fraction=1.5)


def test_a_killed_prepare_leaves_no_process_and_no_output(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text((json.dumps({"text": "word " * 2000}) + "\n") * 5000)
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent("""
        import pathlib, sys
        from geotrain.data.prepare import prepare
        from geotrain.data.tokenizer import byte_tokenizer

        def working(progress):
            print("working", flush=True)

        if __name__ == "__main__":
            here = pathlib.Path(sys.argv[1])
            prepare([here / "a.jsonl"], here / "out", byte_tokenizer(), processes=2, progress=working)
        """)
    )
    children: list[psutil.Process] = []
    job = subprocess.Popen([sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == b"working\n"
        children = psutil.Process(job.pid).children(recursive=True)
        assert len(children) >= 2
        job.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(children, timeout=120)
        assert not alive
        assert not (tmp_path / "out").exists()
        assert len(list(tmp_path.glob(".out.*.partial"))) == 1
        (tmp_path / "a.txt").write_text("text")
        prepare([tmp_path / "a.txt"], tmp_path / "out", byte_tokenizer())
        assert not list(tmp_path.glob(".out.*.partial"))
    finally:
        for process in (job, *children):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        job.communicate(timeout=120)


def test_the_blocks_in_flight_are_bounded() -> None:
    taken: list[int] = []

    def blocks() -> Iterator[TextBlock]:
        for i in range(50):
            taken.append(i)
            yield TextBlock("a.txt", "text", 1, (b"%d" % i,), i)

    with contextlib.closing(_encode_all(blocks(), Encoder(byte_tokenizer(), "text", 0.0), 2)) as results:
        for i, (block, encoded) in enumerate(results):
            [document] = encoded.documents
            assert bytes(document.ids[:-1].astype(np.uint8)) == b"%d" % i == block.items[0]
            assert len(taken) <= i + BLOCKS_PER_PROCESS * 2
    assert len(taken) == 50


def test_a_dying_process_is_an_error() -> None:
    """A tokenizing process is killed, as when the system runs out of memory."""
    blocks = iter([TextBlock("a.txt", "text", 1, (b"text",), 1)] * 1000)
    with (
        pytest.raises(DataError, match=r"a\.txt:1: a tokenizing process died here.*use fewer processes"),
        contextlib.closing(_encode_all(blocks, Encoder(byte_tokenizer(), "text", 0.0), 1)) as results,
    ):
        for _ in results:
            for process in multiprocessing.active_children():
                process.kill()


def test_an_endless_block_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "BLOCK_DEADLINE_S", 0.0)
    blocks = iter([TextBlock("a.txt", "text", 1, (b"text",), 1)])
    with pytest.raises(DataError, match=r"a\.txt:1: tokenizing from here took over 0 s"):
        next(_encode_all(blocks, Encoder(byte_tokenizer(), "text", 0.0), 1))
    assert not multiprocessing.active_children()


def test_a_tokenizer_is_trained_on_all_files(tmp_path: Path) -> None:
    """A large file takes what the small ones leave of the limit, and no more."""
    for name, count in (("large", 1000), ("middle", 40), ("small", 2)):
        (tmp_path / f"{name}.jsonl").write_text((json.dumps({"text": f"{name:8}"}) + "\n") * count)
    old, readers.BLOCK_BYTES = readers.BLOCK_BYTES, 8
    try:
        texts = list(training_texts(find_inputs([str(tmp_path)]), "text", limit_bytes=8 * 92))
    finally:
        readers.BLOCK_BYTES = old
    assert [texts.count(f"{name:8}") for name in ("large", "middle", "small")] == [50, 40, 2]


def test_equal_documents_never_stand_on_both_sides() -> None:
    texts = [f"text {i}" for i in range(5000)]
    held_out = sum(is_validation(text, 0.1) for text in texts)
    assert 400 < held_out < 600
    assert not any(is_validation(text, 0.0) for text in texts)
    assert all(is_validation(text, 0.3) for text in texts if is_validation(text, 0.1))


def test_the_corpus_is_real_text_in_a_fixed_order() -> None:
    texts = list(corpus.documents(2_000_000))
    sizes = [len(text.encode()) for text in texts]
    assert 1_500_000 < sum(sizes) <= 2_000_000
    assert any("def " in text for text in texts)
    assert any('The "assert" statement' in text for text in texts)
    assert not any("import unittest" in text and "test_support" in text for text in texts)
    assert list(corpus.documents(100_000)) == texts[: len(list(corpus.documents(100_000)))]
