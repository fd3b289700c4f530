import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from geotrain.common.files import OutputError, out_of_room, save_tensors, whole_file, whole_folder, write_whole
from tests.support.disks import small_disk


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))  # noqa: PTH208 (hidden files too)


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "new/out", "export") as folder:
        (folder / "sub").mkdir()
        (folder / "sub/a").write_text("1")
        assert not (tmp_path / "new/out").exists()
    assert names(tmp_path / "new") == ["out"]
    assert (tmp_path / "new/out/sub/a").read_text() == "1"


def test_a_failure_leaves_the_older_folder_as_it_was(tmp_path: Path) -> None:
    for text in ("1", "2"):
        with whole_folder(tmp_path / "out", "export") as folder:
            (folder / text).write_text(text)
    assert names(tmp_path / "out") == [".geotrain.json", "2"]
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "out", "export") as folder:
        (folder / "3").write_text("3")
        raise KeyboardInterrupt
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == [".geotrain.json", "2"]


DYING = """
import os, sys
from pathlib import Path
from geotrain.common.files import whole_folder
rename, renames = Path.rename, int(sys.argv[2])
def dying(self, target):
    global renames
    rename(self, target)
    renames -= 1
    if not renames:
        os._exit(9)
Path.rename = dying
with whole_folder(Path(sys.argv[1]), "export") as folder:
    (folder / "2").write_text("2")
"""


@pytest.mark.parametrize(("renames", "kept"), [(1, "1"), (2, "2")])
def test_a_kill_while_a_folder_is_replaced_leaves_one_of_the_two(tmp_path: Path, renames: int, kept: str) -> None:
    """The older stands aside at the first rename, the new one is in place after the second."""
    target = tmp_path / "out.new"
    with whole_folder(target, "export") as folder:
        (folder / "1").write_text("1")
    dead = subprocess.run([sys.executable, "-c", DYING, str(target), str(renames)], timeout=60, check=False)
    assert dead.returncode == 9
    with whole_folder(tmp_path / "out", "export"):  # what was left is not this folder's
        assert any(n.endswith(".old") for n in names(tmp_path)) and not (tmp_path / "out").exists()
    with pytest.raises(KeyboardInterrupt), whole_folder(target, "export"):
        assert names(target) == [".geotrain.json", kept]
        raise KeyboardInterrupt
    assert names(tmp_path) == ["out", "out.new"] and names(target) == [".geotrain.json", kept]


def test_what_is_not_ours_is_never_replaced(tmp_path: Path) -> None:
    def attempt(kind: str = "export") -> None:
        with whole_folder(tmp_path / "out", kind):
            raise AssertionError("must be refused before the work begins")

    (tmp_path / "out").write_text("a file")
    with pytest.raises(OutputError, match="exists and is not a folder"):
        attempt()
    (tmp_path / "out").unlink()
    (tmp_path / "out").mkdir()
    with whole_folder(tmp_path / "out", "export") as folder:  # an empty folder may be filled
        (folder / "a").write_text("1")
    with pytest.raises(OutputError, match="no older dataset of GeoTrain"):
        attempt("dataset")
    (tmp_path / "out/mine").symlink_to(tmp_path)
    with pytest.raises(OutputError, match=r"did not write \(mine\)"):
        attempt()
    (tmp_path / "out/mine").unlink()
    for marker in ("damaged {", "[]"):
        (tmp_path / "out/.geotrain.json").write_text(marker)
        with pytest.raises(OutputError, match="no older export of GeoTrain"):
            attempt()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be created"), whole_folder(tmp_path / "file/out", "export"):
        pass


def test_two_writers_of_one_folder_do_not_disturb_each_other(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "out", "export") as first:
        (first / "a").write_text("first")
        with whole_folder(tmp_path / "out", "export") as second:
            (second / "a").write_text("second")
    assert (tmp_path / "out/a").read_text() == "first"
    assert names(tmp_path) == ["out"]


def test_a_file_appears_whole(tmp_path: Path) -> None:
    with whole_file(tmp_path / "a") as file:
        file.write("1")
        assert not (tmp_path / "a").exists()
    with pytest.raises(ValueError, match="stop"), whole_file(tmp_path / "a") as file:
        file.write("2")
        raise ValueError("stop")
    assert (tmp_path / "a").read_text() == "1"
    assert names(tmp_path) == ["a"]
    with pytest.raises(OutputError, match="none/a: cannot be written"), whole_file(tmp_path / "none/a"):
        pass


def test_room_is_asked_of_errors_that_lead_back_to_themselves() -> None:
    one, other = OSError(errno.EIO, "bad"), ValueError("because of that")
    one.__context__, other.__context__ = other, one
    assert not out_of_room(one)
    other.__cause__ = OSError(errno.ENOSPC, "full")
    assert out_of_room(one)


def test_a_link_stays_one_to_what_it_names(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    file, folder = (tmp_path / name for name in ("file", "folder"))
    for link in (file, folder):
        link.symlink_to(tmp_path / "disk" / link.name)
    for text in ("first", "second"):
        write_whole(file, text)
        with whole_folder(folder, "export") as inside:
            (inside / "a").write_text(text)
        assert file.is_symlink() and folder.is_symlink()
        assert (tmp_path / "disk/file").read_text() == (tmp_path / "disk/folder/a").read_text() == text


@pytest.mark.root
def test_a_full_disk_is_told_by_whichever_library(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        full = pytest.raises(OutputError, match=r"a: cannot be written: .*No space left")
        with full, whole_folder(disk / "a", "x") as a:
            save_tensors(a / "x", {"x": torch.ones(1 << 16)}, {})
        assert not names(disk)


def test_a_file_of_tensors_may_be_read_as_any_other(tmp_path: Path) -> None:
    save_tensors(tmp_path / "tensors", {"x": torch.ones(2)}, {"a": "b"})
    write_whole(tmp_path / "text", "")
    assert (tmp_path / "tensors").stat().st_mode == (tmp_path / "text").stat().st_mode
