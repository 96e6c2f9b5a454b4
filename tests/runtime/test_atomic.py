"""Folders that are written as a whole."""

from pathlib import Path

import pytest

from hybrid_rlhf.runtime.files.atomic import restore_folders, whole_folder


def write(folder: Path, text: str) -> None:
    with whole_folder(folder) as beside:
        beside.mkdir()
        (beside / "file").write_text(text)
        if text == "fails":
            raise OSError(text)


def test_a_folder_is_replaced_as_a_whole_or_left_unchanged(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    for text in ("first", "second"):
        write(folder, text)
        assert (folder / "file").read_text() == text
    with pytest.raises(OSError, match="fails"):
        write(folder, "fails")
    assert (folder / "file").read_text() == "second" and [*tmp_path.iterdir()] == [folder]
    with pytest.raises(OSError, match="fails"):
        write(tmp_path / "b", "fails")
    assert [*tmp_path.iterdir()] == [folder]


def test_a_folder_of_a_killed_process_is_put_back(tmp_path: Path) -> None:
    folder = tmp_path / "inner" / "a"
    folder.parent.mkdir()
    write(folder, "first")
    replaced = folder.rename(folder.with_name(".a.replaced.partial"))
    folder.with_name(".a.partial").mkdir()
    restore_folders(tmp_path, "*/")
    assert (folder / "file").read_text() == "first" and [*folder.parent.iterdir()] == [folder]
    folder.rename(replaced)
    write(folder, "second")
    assert (folder / "file").read_text() == "second" and [*folder.parent.iterdir()] == [folder]
