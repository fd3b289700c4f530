"""A data set that several hosts prepare: their shards, merged, are what one host would have written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from geotrain.commands.cli import app
from geotrain.config import DataConfig, DataSet
from geotrain.data.dataset import local_files, open_dataset, read_manifest
from geotrain.data.loader import LeasedLoader, open_training
from geotrain.data.prepare import prepare
from geotrain.data.shards import files_of_shard, merge, parse_shard
from geotrain.data.tokenizer import byte_tokenizer
from geotrain.data.tokens import DataError
from geotrain.launch.check import check_split
from tests.support.inner_worlds import LLAMA, deepspeed_block, run_config

SHARDS = 3


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("texts")
    for number, documents in enumerate([9, 3, 14, 5, 5, 8]):
        lines = [json.dumps({"text": f"text {number} {i} " + "word " * (i % 4)}) for i in range(documents)]
        (folder / f"{number}.jsonl").write_text("\n".join(lines))
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def whole(texts: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    prepare(texts, out, byte_tokenizer(), validation_fraction=0.1)
    return out


@pytest.fixture(scope="module")
def sharded(texts: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards written by the real command line, last shard first."""
    out = tmp_path_factory.mktemp("sharded")
    for number in reversed(range(1, SHARDS + 1)):
        words = ["prepare", str(texts[0].parent), "--out", str(out), "--bytes", "--validation", "0.1"]
        said = CliRunner().invoke(app, [*words, "--processes", "1", "--shard", f"{number}/{SHARDS}"])
        assert said.exit_code == 0, said.output
        if number > 1:
            with pytest.raises(DataError, match=rf"not there yet: shard-0001.* \({number - 1} of 3 shards\)"):
                merge(out)
    assert CliRunner().invoke(app, ["merge", str(out)]).exit_code == 0
    return out


def tokens(prefix: Path) -> list[int]:
    return open_dataset(prefix, 264)[1][:].tolist()


def test_merged_shards_are_what_one_host_would_have_written(whole: Path, sharded: Path) -> None:
    for split in ("train", "validation"):
        assert tokens(sharded / split) == tokens(whole / split)
        one, other = read_manifest(sharded / split), read_manifest(whole / split)
        for what in ("tokens", "documents", "text_bytes", "vocab_size", "end_of_document", "dtype", "tokenizer"):
            assert getattr(one, what) == getattr(other, what)
    assert len(read_manifest(sharded / "train").shards) == SHARDS
    assert (sharded / "tokenizer/tokenizer.json").read_bytes() == (whole / "tokenizer/tokenizer.json").read_bytes()


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_run_trains_on_them_as_on_one_file(whole: Path, sharded: Path, tmp_path: Path, scheme: str) -> None:
    def steps(prefix: str) -> list[list[list[int]]]:
        cache = {"cache_folder": str(tmp_path), "cache_gb": 0.01}
        data = DataConfig(train=(DataSet(prefix=prefix),), sequence_length=8, train_samples=96, **cache)
        loader = LeasedLoader(open_training(data, 264, 5), 8, 4, 1, 2)
        return [batch.tolist() for step in loader.steps(0, 96) for batch in step.own]

    assert steps(f"{scheme}{sharded}/train") == steps(f"{whole}/train")


def test_a_shard_that_was_exchanged_is_noticed(sharded: Path, whole: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(sharded, copy)
    before = read_manifest(copy / "train").sha256
    victim = copy / "shard-0002-of-0003"
    for path in whole.glob("train.*"):
        shutil.copy(path, victim)
    with pytest.raises(DataError, match=r"shard-0002-of-0003/train: is other data than .*run `geotrain merge` again"):
        check_split(run_config({**LLAMA, "vocab_size": 264}, deepspeed_block(0)), str(copy / "train"))
    merge(copy)
    check_split(run_config({**LLAMA, "vocab_size": 264}, deepspeed_block(0)), str(copy / "train"))
    assert read_manifest(copy / "train").sha256 != before
    (victim / "train.bin").write_bytes(b"")
    with pytest.raises(DataError, match="shard-0002-of-0003/train"):
        merge(copy)
    (victim / "inputs.txt").write_text("others")
    with pytest.raises(DataError, match="shard-0002-of-0003: was made of other files"):
        merge(copy)


def test_what_a_machine_must_have_of_them(sharded: Path, tmp_path: Path) -> None:
    names = local_files(str(sharded / "train"))
    assert len(names) == 1 + 3 * SHARDS
    assert all(Path(name).is_file() for name in names)
    shutil.copytree(sharded, some := tmp_path / "some")
    (manifest := next(some.glob("shard-0002*/train.json"))).write_text(
        json.dumps({**json.loads(manifest.read_text()), "checksums": False})
    )
    assert not any(name.endswith(".crc") for name in local_files(str(some / "train"))), "some shards have none"
    assert local_files("s3://bucket/train") == []
    assert [Path(name).suffix for name in local_files(str(tmp_path / "none"))] == [".json", ".bin", ".idx"]


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_every_file_falls_to_one_shard_in_order(texts: list[Path], shards: int) -> None:
    parts = [files_of_shard(texts, number, shards) for number in range(1, shards + 1)]
    assert [path for part in parts for path in part] == texts
    sizes = np.array([sum(path.stat().st_size for path in part) for part in parts])
    assert sizes.max() <= sizes.sum() / shards + max(path.stat().st_size for path in texts)


def test_wrong_parts_are_named(texts: list[Path], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file falls to it"):
        [files_of_shard(texts[:2], number, 9) for number in range(1, 10)]
    for text in ("0/3", "4/3", "3", "a/b", "1/0"):
        with pytest.raises(DataError, match="write which of how many, as 3/8"):
            parse_shard(text)
    with pytest.raises(DataError, match="holds no shards"):
        merge(tmp_path)
