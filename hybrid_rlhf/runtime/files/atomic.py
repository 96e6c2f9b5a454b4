"""Atomic writes: a file or a folder is written under a temporary name, flushed to the disk, and renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.files.durable import flush
from hybrid_rlhf.runtime.files.reading import user_path

_PARTIAL = ".partial"
_REPLACED = ".replaced.partial"


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a small file; an existing file is unchanged until the new one is complete.

    Raises:
        OSError: when it cannot be written; nothing is left beside it.
    """
    with whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which is renamed at the end of the block; after an exception it is removed.

    Raises:
        OSError: when it cannot be written; nothing is left beside it.
    """
    beside = path.with_name(f"{path.name}.partial")
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """The place of a folder to make, which is renamed at the end of the block and replaces an existing one.

    After an exception it is removed, and an existing one is unchanged. A process that is killed in the meantime leaves
    `.NAME.partial`, or the existing one as `.NAME.replaced.partial`; see `restore_folders`.

    Raises:
        OSError: when it cannot be written; nothing is left beside it.
    """
    beside = folder.with_name(f".{folder.name}{_PARTIAL}")
    replaced = folder.with_name(f".{folder.name}{_REPLACED}")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        yield beside
        for file in beside.iterdir():
            flush(file)
        if folder.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            folder.rename(replaced)
        beside.rename(folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)  # free its space, which a full disk needs
        if replaced.exists() and not folder.exists():
            replaced.rename(folder)
        raise
    flush(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def restore_folders(parent: Path, pattern: str = "") -> None:
    """Put back the folders that a killed process was replacing, and remove those that it was making.

    Args:
        parent: above the folders.
        pattern: between `parent` and the folders, such as `*/`.
    """
    for replaced in parent.glob(f"{pattern}.*{_REPLACED}"):
        folder = replaced.with_name(replaced.name[1:].removesuffix(_REPLACED))
        if not folder.exists():  # killed before the new one had its name
            replaced.rename(folder)
    for beside in parent.glob(f"{pattern}.*{_PARTIAL}"):
        shutil.rmtree(beside)


def output_file(path: str | Path, key: str, *, overwrite: bool) -> Path:
    """The path of a new file; creates its folder.

    Raises:
        UserError: naming `key`, if the file exists and may not be replaced, or cannot be written.
    """
    file = user_path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        is_there = os.path.lexists(file)
        writable = os.access(file.parent, os.W_OK)
    except OSError:  # a component of the path is a file
        is_there = writable = False
    if not writable or (is_there and not file.is_file()):
        raise UserError(f"{key} must be a file that can be written, got {path}: choose another")
    if is_there and not overwrite:
        raise UserError(f"{key} must be a new file, {path} exists: choose another, or give --overwrite")
    return file
