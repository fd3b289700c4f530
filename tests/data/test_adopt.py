"""Data sets that Megatron-LM's tools made: adopted once, then read as any other."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from typer.testing import CliRunner

from geotrain.commands.cli import app
from geotrain.config import DataConfig, DataSet
from geotrain.data import tokens as tokens_module
from geotrain.data.dataset import adopt, end_of_document, manifest_path, open_dataset, read_manifest, training_digest
from geotrain.data.loader import open_training
from geotrain.data.tokenizer import byte_tokenizer
from geotrain.data.tokens import DataError, open_tokens
from geotrain.inner.runtime.platform import quiet_imports

END = 256
DOCUMENTS = [[[1, 2, 3], [4, END]], [[5, END]], [[6, 7, 8, 9, 10, 11, 12, 13, END]]]  # of sentences


def megatron(prefix: Path, documents: list[list[list[int]]] = DOCUMENTS, dtype: type = np.uint16) -> Path:
    with quiet_imports():
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for sentences in documents:
        builder.add_document(np.array([i for s in sentences for i in s]), [len(s) for s in sentences])
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_a_pair_made_by_megatron_trains_after_it_is_adopted(tmp_path: Path, dtype: type) -> None:
    prefix = megatron(tmp_path / "wiki_text_document", dtype=dtype)
    data = DataConfig(train=str(prefix), sequence_length=4, train_samples=3)
    with pytest.raises(DataError, match="`geotrain adopt` for a pair that Megatron's tools made"):
        open_training(data, 300, 1)
    byte_tokenizer().save(tmp_path / "tokenizer")
    said = CliRunner().invoke(app, ["adopt", str(prefix), "--tokenizer", str(tmp_path / "tokenizer")])
    assert said.exit_code == 0, said.output
    manifest, _ = open_dataset(prefix, 264)
    assert manifest == read_manifest(prefix)
    assert (manifest.tokens, manifest.documents, manifest.vocab_size, manifest.end_of_document) == (16, 3, 264, END)
    assert (manifest.dtype, manifest.tokenizer, manifest.text_bytes) == (np.dtype(dtype).name, "tokenizer", None)
    assert open_tokens(prefix).document_ends(0, 3).tolist() == [5, 7, 16]
    rows = open_training(data, 264, 1).batch(np.arange(3))
    stream = [i for document in DOCUMENTS for sentence in document for i in sentence]
    assert sorted(rows.tolist()) == sorted(stream[at : at + 5] for at in (0, 4, 8))
    assert training_digest(data) == manifest.sha256 == sha256(prefix.with_suffix(".bin").read_bytes()).hexdigest()
    with pytest.raises(DataError, match="is there already"):
        adopt(prefix)


def test_a_damaged_block_is_found_when_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before, since a pass over terabytes would hold up step 1, and once."""
    stream = np.arange(300_000) % 1000  # two blocks of 131,072 tokens and a part of one
    prefix = megatron(tmp_path / "a", [[stream.tolist()]])
    adopt(prefix)
    content = bytearray(Path(f"{prefix}.bin").read_bytes())
    content[1 << 18 : 1 << 19] = bytes(1 << 18)
    Path(f"{prefix}.bin").write_bytes(content)
    looked, real = [], tokens_module.crc32
    monkeypatch.setattr(tokens_module, "crc32", lambda block: looked.append(len(block)) or real(block))
    _, tokens = open_dataset(prefix, 1000)
    assert not looked and len(tokens) == 300_000
    for _ in range(2):
        assert tokens[131_000:131_072].tolist() == stream[131_000:131_072].tolist()
        assert tokens[-10:].tolist() == stream[-10:].tolist()
    assert looked == [1 << 18, 600_000 - (1 << 19)]
    for part in (slice(131_071, 131_073), slice(200_000, 200_001), slice(262_143, 262_144)):
        with pytest.raises(DataError, match=rf"{prefix}\.bin: block 1, the 262144 bytes from 262144 on, .*copy both"):
            tokens[part]
    crc = Path(f"{prefix}.crc")
    for damage, words in (
        (crc.read_bytes()[:-1], "has 11 bytes instead of 12"),
        (None, "cannot be read: No such file"),
    ):
        crc.unlink()
        if damage is not None:
            crc.write_bytes(damage)
        with pytest.raises(DataError, match=rf"{crc}: {words}"):
            open_dataset(prefix, 1000)


def test_what_is_not_known_is_left_open(tmp_path: Path) -> None:
    manifest = adopt(megatron(tmp_path / "a", [[[1, 2, 3]], [[4, 9]]]))
    assert (manifest.vocab_size, manifest.end_of_document, manifest.tokenizer) == (10, None, None)


def test_attention_inside_documents_needs_one_id_that_ends_them(tmp_path: Path) -> None:
    good, other = megatron(tmp_path / "a"), megatron(tmp_path / "b", [[[1, 2, 9]], [[9]]])
    vague = megatron(tmp_path / "c", [[[1, 2]], [[4, 9]]])
    for prefix in (good, other, vague):
        adopt(prefix)

    def end(*prefixes: Path, attention: Literal["sample", "document"] = "document") -> int | None:
        sets = tuple(DataSet(prefix=str(prefix)) for prefix in prefixes)
        return end_of_document(DataConfig(train=sets, sequence_length=4, train_samples=3, attention=attention))

    assert end(good) == END
    assert end(good, vague, attention="sample") is None
    with pytest.raises(DataError, match=r"c: its documents do not all end with the same id"):
        end(vague)
    with pytest.raises(DataError, match=r"b: its documents end with the id 9, those of .*a with 256"):
        end(good, other)


def test_what_is_no_text_is_refused_and_leaves_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"n\.bin: token 1 is -1, no id"):
        adopt(megatron(tmp_path / "n", [[[3, -1]]], np.int32))
    byte_tokenizer().save(tmp_path / "tokenizer")
    with pytest.raises(DataError, match=r"holds the id 300, but the tokenizer .* has ids below 264"):
        adopt(megatron(tmp_path / "l", [[[3, 300]]]), tmp_path / "tokenizer")
    assert not manifest_path(tmp_path / "n").exists()
    assert not manifest_path(tmp_path / "l").exists()
