"""Which files `prepare` reads, and what it says of the others."""

import errno
import gzip
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from geotrain.commands.cli import app
from geotrain.data.dataset import read_manifest
from geotrain.data.inputs import describe, find_inputs
from geotrain.data.tokens import DataError


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")


def test_inputs_are_files_folders_and_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "b.txt", "a.jsonl", "sub/c.txt.gz", "sub/notes.md", ".sub/d.txt.gz", "sub/.e.txt.gz")
    a, b, c = tmp_path / "a.jsonl", tmp_path / "b.txt", tmp_path / "sub/c.txt.gz"
    assert find_inputs([str(tmp_path)]) == [a, b, c]
    assert find_inputs([str(c), str(tmp_path / "*.txt"), str(tmp_path)]) == [c, b, a]
    assert find_inputs([str(tmp_path / "*b*")]) == [b, c]  # a folder, too
    monkeypatch.chdir(tmp_path)
    assert find_inputs(["**/*.gz"]) == [Path("sub/c.txt.gz")]
    with pytest.raises(DataError, match=r"notes\.md: unsupported kind of file \(\.md\); supported: \.txt"):
        find_inputs([str(tmp_path / "sub/notes.md")])
    with pytest.raises(DataError, match=r"none\.txt: no such file"):
        find_inputs(["none.txt"])
    write(tmp_path, "only/a.json")
    with pytest.raises(
        DataError, match=r"only: .*a\.json: unsupported .*; where each line is an object, name it \.jsonl"
    ):
        find_inputs(["only"])


def test_what_is_not_read_is_listed_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links are followed, also round in a circle; one file has many names, and is read once."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "in/a.jsonl", "in/._a.jsonl", "in/.ipynb_checkpoints/a.jsonl", "in/a.jsonl.part")
    write(tmp_path, "in/c.json", "in/d.txt", "in/d.txt.xz", "in/LICENSE", *(f"in/e{i}.part" for i in range(3)))
    write(tmp_path, "elsewhere/b.txt")
    for link, target in (("in/link", "../elsewhere"), ("elsewhere/circle", ".."), ("in/lost.txt", "nothing")):
        Path(link).symlink_to(target)
    Path("in/z.jsonl").hardlink_to("in/a.jsonl")
    passed_over: list[tuple[Path, str]] = []
    files = find_inputs(["in", str(tmp_path / "in/d.txt")], passed_over)
    assert [str(path) for path in files] == ["in/a.jsonl", "in/d.txt", "in/d.txt.xz", "in/link/b.txt"]
    assert describe(files, passed_over) == [
        "reading 4 bytes in 2 .txt, 1 .jsonl, 1 .txt.xz",
        "not read, hidden: in/._a.jsonl, in/.ipynb_checkpoints",
        "not read, unsupported kind of file: in/LICENSE",
        "not read, unsupported kind of file (.part): in/a.jsonl.part, in/e0.part, in/e1.part and 1 more",
        "not read, unsupported kind of file (.json); where each line is an object, name it .jsonl: in/c.json",
        "not read, another name of a folder that is searched: in/link/circle/elsewhere, in/link/circle/in",
        "not read, a link to nothing: in/lost.txt",
        f"not read, another name of a file that is read: in/z.jsonl, {tmp_path}/in/d.txt",
        "all read, though by their names they hold the same: in/d.txt, in/d.txt.xz",
    ]
    kinds = [(Path(f"a.{i}"), f"unsupported kind of file (.{i})") for i in range(30_000)]
    assert describe(files, kinds)[-2] == "not read, of other kinds: a.12, a.13, a.14 and 29,985 more"


def test_a_folder_that_cannot_be_searched_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the text would be missing, and nobody would look for it."""
    write(tmp_path, "a.txt", "sub/b.txt")
    real = os.scandir

    def failing(path: str) -> object:
        if str(path).endswith("sub"):
            raise OSError(errno.EACCES, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", failing)
    with pytest.raises(DataError, match="sub: cannot be searched: Permission denied"):
        find_inputs([str(tmp_path)])


@pytest.mark.parametrize(("documents", "held_out"), [(1, None), (2, 1), (79, 7), (300, 8)])
def test_few_documents_have_a_validation_split_without_a_word(
    tmp_path: Path, documents: int, held_out: int | None
) -> None:
    lines = "".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(documents))
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(lines.encode()))
    command = ["prepare", str(tmp_path / "a.json.gz"), "--bytes", "--processes", "1"]
    done = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0 and "reading" in done.output and "1 .json.gz" in done.output
    splits = {
        path.stem: read_manifest(path.with_suffix("")).documents for path in (tmp_path / "out").glob("[tv]*.json")
    }
    assert splits == {"train": documents - (held_out or 0)} | ({"validation": held_out} if held_out else {})
    if held_out == 7:
        done = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "none"), "--validation", "0.001"])
        assert done.exit_code and "another --validation than 0.001" in str(done.exception or done.output)
