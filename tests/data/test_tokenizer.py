import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from geotrain.data import tokenizer
from geotrain.data.tokenizer import byte_tokenizer, copy_tokenizer, finish_export, load_tokenizer, train_bpe
from geotrain.data.tokens import DataError
from tests.support.hub import LFS_POINTER

TEXT = "Grüße, \U0001f600!\n\tdef f(x):\n  return x  \r\n" + "".join(map(chr, range(1, 256)))


def training_text() -> list[str]:
    return [f"the cat number {i} sat on the mat, and the dog looked at the cat" for i in range(50)]


def test_byte_ids_are_the_bytes(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (264, 256)
    tokenizer.save(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    ids = loaded(TEXT)["input_ids"]
    assert bytes(ids) == TEXT.encode()
    assert loaded.decode(ids) == TEXT
    assert (len(loaded), loaded.eos_token_id) == (264, 256)


def test_a_trained_bpe_is_lossless_reproducible_and_loads_again(tmp_path: Path) -> None:
    tokenizer = train_bpe(training_text(), 304)
    assert tokenizer.files == train_bpe(training_text(), 304).files
    tokenizer.save(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.decode(loaded(TEXT)["input_ids"]) == TEXT
    text = training_text()[0]
    assert len(loaded(text)["input_ids"]) < len(text) / 2
    assert (len(loaded), loaded.eos_token_id) == (304, tokenizer.end_of_document)
    again = load_tokenizer(tmp_path)
    assert (again.vocab_size, again.end_of_document) == (tokenizer.vocab_size, tokenizer.end_of_document)
    assert again.files == tokenizer.files


def test_a_small_text_gives_a_smaller_vocabulary_still_a_multiple_of_8() -> None:
    tokenizer = train_bpe(["abcab"], 5000)
    assert 257 < tokenizer.vocab_size < 300
    assert tokenizer.vocab_size % 8 == 0
    with pytest.raises(DataError, match="at least 264, not 100"):
        train_bpe(["abc"], 100)


def test_faults_of_a_tokenizer_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none: no such tokenizer folder"):
        load_tokenizer(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty: not a tokenizer"):
        load_tokenizer(tmp_path / "empty")
    with pytest.raises(DataError, match="empty: no tokenizer here"):
        copy_tokenizer(tmp_path / "empty", tmp_path)
    byte_tokenizer().save(tmp_path / "bytes")
    with pytest.raises(DataError, match="no token '</s>'"):
        load_tokenizer(tmp_path / "bytes", "</s>")
    with pytest.raises(DataError, match="no token '<s>' to begin documents with"):
        load_tokenizer(tmp_path / "bytes", begin_of_document="<s>")
    assert load_tokenizer(tmp_path / "bytes", "<|reserved_0|>").end_of_document == 257
    settings = tmp_path / "bytes/tokenizer_config.json"
    settings.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    with pytest.raises(DataError, match="has no eos token; name the token"):
        load_tokenizer(tmp_path / "bytes")
    (tmp_path / "bytes/tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="bytes: not a tokenizer"):
        load_tokenizer(tmp_path / "bytes")
    (tmp_path / "bytes/tokenizer.json").write_text(LFS_POINTER)
    with pytest.raises(DataError, match=r"bytes/tokenizer\.json: a Git LFS pointer"):
        load_tokenizer(tmp_path / "bytes")


def test_only_the_tokenizers_files_are_copied(tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path / "from")
    (tmp_path / "from/model.safetensors").write_text("weights")
    (tmp_path / "to").mkdir()
    copy_tokenizer(tmp_path / "from", tmp_path / "to")
    assert sorted(p.name for p in (tmp_path / "to").iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize(
    ("settings", "completed"),
    [
        ({}, {"pad_token": "<|endoftext|>", "padding_side": "left", "model_max_length": 32}),
        (
            {"pad_token": "<|reserved_0|>", "padding_side": "right", "model_max_length": 10**9},
            {"pad_token": "<|reserved_0|>", "padding_side": "right", "model_max_length": 32},
        ),
    ],
)
def test_what_an_exports_tokenizer_does_not_say_is_completed(
    tmp_path: Path, settings: dict[str, object], completed: dict[str, object]
) -> None:
    byte_tokenizer().save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    former = json.loads(path.read_text())
    path.write_text(json.dumps(former | settings))
    ids = finish_export(tmp_path, 32)
    assert json.loads(path.read_text()) == former | completed
    pad = 257 if settings else 256
    assert ids == {"bos_token_id": None, "eos_token_id": 256, "pad_token_id": pad}
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert (loaded.pad_token_id, loaded.model_max_length) == (pad, 32)


def test_a_fingerprint_is_of_all_that_makes_ids() -> None:
    made = json.loads(byte_tokenizer().json)
    others = {key: tokenizer.fingerprint(json.dumps({**made, key: "other"}).encode()) for key in made}
    own = tokenizer.fingerprint(json.dumps(made).encode())
    assert {key for key in made if others[key] != own} == {"normalizer", "pre_tokenizer", "model", "added_tokens"}
