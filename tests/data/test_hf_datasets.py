"""Data sets that the `datasets` package itself wrote to disk."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import datasets
import pytest

from geotrain.commands.prepare import prepare_files
from geotrain.data import readers
from geotrain.data.dataset import read_manifest
from geotrain.data.inputs import find_inputs
from geotrain.data.readers import check_inputs, parse_block, read_blocks
from geotrain.data.tokens import DataError

TEXTS = [f"document {i}: " + "ü" * (i % 13) for i in range(40)]


def data_set(texts: list[str] = TEXTS) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"number": list(range(len(texts))), "body": texts})


def test_a_saved_folder_is_tokenized_like_the_same_lines_of_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "BLOCK_ROWS", 7)
    # Of what is chosen from a data set, the rest must not come along; nor what `map` leaves beside it.
    chosen = data_set([*TEXTS, "left out"]).select(range(len(TEXTS)))
    datasets.DatasetDict({"train": chosen, "test": data_set(["of the test"])}).save_to_disk(
        tmp_path / "saved", num_shards={"train": 3, "test": 1}
    )
    datasets.load_from_disk(tmp_path / "saved/train").map(lambda row: {"body": row["body"] + "!"})
    assert len(list((tmp_path / "saved/train").glob("cache-*.arrow"))) > 0
    (tmp_path / "same.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    for name, source in (("a", "saved"), ("b", "saved/train"), ("c", "same.jsonl")):
        prepare_files([str(tmp_path / source)], tmp_path / name, None, None, True, 0.0, "body", processes=1)
    digests = {read_manifest(tmp_path / name / "train").sha256 for name in "abc"}
    assert len(digests) == 1
    files = find_inputs([str(tmp_path / "saved/test"), str(tmp_path / "same.jsonl")])
    assert [path.suffix for path in files] == [".arrow", ".jsonl"]
    blocks = [block for path in files for block in read_blocks(path, "body")]
    assert [text for block in blocks for text in parse_block(block, "body")] == ["of the test", *TEXTS]


def cached(folder: Path) -> None:
    """Leave a data set as `load_dataset("someone/tiny")` does in its cache."""
    (folder / "tiny.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    files = {"train": str(folder / "tiny.jsonl"), "validation": str(folder / "tiny.jsonl")}
    loaded = datasets.load_dataset("json", data_files=files, cache_dir=str(folder / "hf/datasets"))
    made = Path(loaded["train"].cache_files[0]["filename"]).parent
    place = folder / "hf/datasets/someone___tiny/default/0.0.0" / made.name
    place.parent.mkdir(parents=True)
    made.rename(place)
    for file in place.glob("json-*.arrow"):
        file.rename(place / file.name.replace("json-", "tiny-"))
    info = json.loads((place / "dataset_info.json").read_text())
    info |= {"config_name": "default", "dataset_name": "tiny"}
    (place / "dataset_info.json").write_text(json.dumps(info))


def test_a_name_is_found_in_the_cache_without_a_network(tmp_path: Path) -> None:
    cached(tmp_path)
    env = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}

    def prepare(name: str) -> subprocess.CompletedProcess[str]:
        how = ["--out", str(tmp_path / "out"), "--bytes", "--text-key", "body", "--validation", "0"]
        command = [sys.executable, "-m", "geotrain", "prepare", name, *how, "--processes", "1"]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)

    done = prepare("hf://datasets/someone/tiny:validation")
    assert done.returncode == 0, done.stderr
    assert read_manifest(tmp_path / "out/train").documents == len(TEXTS)


def test_what_is_wrong_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = tmp_path / "saved"
    datasets.DatasetDict({"test": data_set()}).save_to_disk(saved)
    with pytest.raises(DataError, match="saved: has no split 'train'; name the folder of one: test"):
        find_inputs([str(saved)])
    (file,) = find_inputs([str(saved / "test")])
    with pytest.raises(DataError, match="no column 'text'; columns: number, body; name it by --text-key"):
        check_inputs([file], "text")
    with pytest.raises(DataError, match="the column 'number' holds int64, not strings"):
        check_inputs([file], "number")
    with pytest.raises(DataError, match=r"hf:a:train\[:10%\]: a part of a split; name the whole split"):
        find_inputs(["hf:a:train[:10%]"])
    for url in ("hf://someone/tiny", "hf://datasets/someone/tiny/data/a.parquet", "hf:///x"):
        with pytest.raises(DataError, match=re.escape(f"{url}: names no data set; write hf://datasets/OWNER/NAME")):
            find_inputs([url])
    os.truncate(file, 500)
    with pytest.raises(DataError, match=r"damaged or no arrow file, after row 0"):
        check_inputs([file], "body")
    with pytest.raises(DataError, match="test: cannot be loaded: "):
        find_inputs([str(saved / "test")])
    monkeypatch.setitem(sys.modules, "datasets", None)  # as where the package is not installed
    with pytest.raises(DataError, match="needs a package: pip install datasets"):
        find_inputs(["hf:someone/tiny"])
