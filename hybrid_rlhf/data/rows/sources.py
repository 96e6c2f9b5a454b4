"""Sources of rows: data files, globs and folders of them, folders written by `datasets`, and data sets on the Hugging
Face hub.

`files.py` reads the rows of one file. This module finds sources and renames their columns.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import pyarrow

from hybrid_rlhf.configs.credentials import redacted
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.data import DataSource
from hybrid_rlhf.configs.sections.rules import nearest
from hybrid_rlhf.data.rows.arrow import arrow_rows, rows_at_a_time
from hybrid_rlhf.data.rows.files import (
    TYPES_TEXT,
    LocatedRows,
    OnBadLine,
    Row,
    content_hash,
    count_rows,
    decode_cells,
    file_type,
    read_rows,
    readable,
    without_nulls,
)
from hybrid_rlhf.data.rows.published import with_messages
from hybrid_rlhf.runtime.files.reading import regular_file, user_path
from hybrid_rlhf.runtime.observability.progress import ProgressLog

_SOURCE_RULE = "a data source must be a file, a folder or a hub name"
_SAVED_BY_DATASETS = ("state.json", "dataset_dict.json")
_SPLIT_WORD = re.compile(r"(?:^|[-_.])(train|test|valid|validation|dev|eval|heldout)(?=[-_.])")


@dataclass(frozen=True)
class RowReader:
    """The rows of one source, each with its location for error messages."""

    source: DataSource
    _fingerprint: Callable[[], str]
    _read: Callable[[OnBadLine], LocatedRows]
    count: Callable[[], int | None] = lambda: None
    """The number of rows, if it can be found without reading them; None if unknown."""

    @property
    def fingerprint(self) -> str:
        """A hash of the content, which is read completely, and of the names of its columns."""
        with readable(self.source.path):
            content = self._fingerprint()
        return _combined_hash([content, json.dumps(self.source.columns)]) if self.source.columns else content

    def __iter__(self) -> LocatedRows:
        """Yield (location, row); the location is FILE:LINE, or FILE and the number of the row in a table.

        Raises:
            UserError: for an invalid row, or if there is none, as in a file of blank lines.
        """
        is_empty = True
        for located_row in self.readable_rows(_raise):
            is_empty = False
            yield located_row
        if is_empty:
            raise UserError(_empty(self.source))

    def total(self) -> int:
        """The number of rows, which are read if they cannot be counted otherwise."""
        count = self.count()
        return sum(1 for _ in self) if count is None else count

    def readable_rows(self, on_bad_line: OnBadLine) -> LocatedRows:
        """Like iteration, without lines of a file that are not rows; there may be no rows."""
        return ((location, with_messages(row)) for location, row in self._read(on_bad_line))


def open_source(source: str | DataSource) -> RowReader:
    """Find a source; rows are read on iteration.

    Raises:
        UserError: if the source does not exist, is empty or has an unknown type.
    """
    source = DataSource(path=source) if isinstance(source, str) else source
    if "://" in source.path:
        raise UserError(f"{_SOURCE_RULE}, got {redacted(source.path)}: download it first")
    path = user_path(source.path)
    if any(os.path.isfile(path / name) for name in _SAVED_BY_DATASETS):
        return _open_table(source, _load_folder(source, path))
    if _is_local(source, path):
        return _open_files(source, _files(source, path))
    return _open_table(source, _load_hub(source))


def peek(source: str | DataSource) -> int | None:
    """Read the first row of a local source, and count its rows; None for a hub name, which is not contacted.

    Raises:
        UserError: if the source does not exist, is empty, or its first row is not of its type.
    """
    source = DataSource(path=source) if isinstance(source, str) else source
    if "://" not in source.path and not _is_local(source, user_path(source.path)):
        return None
    reader = open_source(source)
    next(iter(reader))
    return reader.total()


def _is_local(source: DataSource, path: Path) -> bool:
    """Return True if a source is on this machine, by its name or because it exists."""
    named = file_type(path) is not None or source.path.count("/") > 1 or source.path.startswith((".", "/", "~"))
    return named or glob.has_magic(source.path) or os.path.exists(path)


def _files(source: DataSource, path: Path) -> list[Path]:
    """The files of a local source, sorted by name."""
    if "," in source.path and not os.path.exists(path):
        raise UserError(f"{_SOURCE_RULE}, {source.path} does not exist: write several as a list, '[A, B]'")
    if os.path.isdir(path):
        return _folder_files(source, path)
    if glob.has_magic(source.path) and not os.path.exists(path):
        files = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if not os.path.isdir(name)]
        if not files:
            raise UserError(f"{_SOURCE_RULE}, {source.path} matches no file: check the pattern")
    else:
        files = [regular_file(path, _SOURCE_RULE)]
    for file in files:
        if file_type(file) is None:
            raise UserError(f"a data file must be {TYPES_TEXT}, got {file}: convert it")
    return files


def _folder_files(source: DataSource, path: Path) -> list[Path]:
    files = sorted(file for file in path.iterdir() if file.is_file() and file_type(file) is not None)
    if not files:
        raise UserError(
            f"a data folder must have {TYPES_TEXT} files or be written by save_to_disk, {source.path} has none: give a "
            "file in it, or a pattern such as **/*.jsonl"
        )
    splits = {word[1] for file in files if (word := _SPLIT_WORD.search(file.name.lower())) is not None}
    if len(splits) > 1:
        raise UserError(
            f"all files of a data folder are read, {source.path} has files of the splits {', '.join(sorted(splits))}: "
            "give the files of one, by a pattern such as *train*"
        )
    return files


def _open_files(source: DataSource, files: Sequence[Path]) -> RowReader:
    for file in files:
        if not file.stat().st_size:
            raise UserError(f"a data source must have rows, {file} is empty: check the path")

    def read(on_bad_line: OnBadLine) -> LocatedRows:
        return chain.from_iterable(_file_rows(source, file, on_bad_line) for file in files)

    def fingerprint() -> str:
        hashes = [content_hash(file) for file in files]
        return hashes[0] if len(files) == 1 else _combined_hash(hashes)

    def count() -> int | None:
        counts = [count_rows(file) for file in files]
        return None if None in counts else sum(filter(None, counts))

    return RowReader(source, fingerprint, read, count)


def _file_rows(source: DataSource, file: Path, on_bad_line: OnBadLine) -> LocatedRows:
    rows = read_rows(file, on_bad_line)
    if source.columns:
        rows = _renamed(rows, source.columns, str(file))
    return decode_cells(rows, on_bad_line) if file_type(file) == ".csv" else rows


def _value(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or of a key within one; None if there is none."""
    if name in row:
        return row[name]
    column, _, rest = name.partition(".")
    inner = row.get(column)
    return _value(inner, rest) if rest and isinstance(inner, Mapping) else None


def _renamed(rows: LocatedRows, columns: Mapping[str, str], name: str) -> LocatedRows:
    """Rows with columns renamed as steps read them; `a.b` is the key b of the mappings in column a, which stays.

    Raises:
        UserError: after the last row, if no row has one of the columns.
    """
    last: Row | None = None
    missing = set(columns.values())
    replaced = {*columns, *missing}
    for location, row in rows:
        last = row
        found = {new: value for new, old in columns.items() if (value := _value(row, old)) is not None}
        missing -= {columns[new] for new in found}
        unchanged = {column: value for column, value in row.items() if column not in replaced}
        yield location, unchanged | found
    if last is not None and missing:
        raise UserError(
            f"{name}: a source's columns must be columns of its rows, no row has {', '.join(sorted(missing))}, the "
            f"last has {found_columns(last)}: correct the names"
        )


def _raise(error: UserError) -> None:
    raise error


def _open_table(source: DataSource, table: datasets.Dataset) -> RowReader:
    if not len(table):
        raise UserError(_empty(source))

    def read(_: OnBadLine) -> LocatedRows:
        rows = ((f"{source.path}: row {index}", row) for index, row in enumerate(table_rows(table, source.path), 1))
        return _renamed(rows, source.columns, source.path) if source.columns else rows

    return RowReader(source, partial(_table_fingerprint, table, source.path), read, lambda: len(table))


def table_rows(table: datasets.Dataset, name: str) -> Iterator[Row]:
    """The rows of a data set, without null columns and keys; images and audio stay as they are stored.

    Raises:
        UserError: if the data set, by its name, cannot be read.
    """
    # In Arrow format: datasets would decode images and audio, and download linked ones.
    with readable(name):
        yield from map(without_nulls, arrow_rows(table.with_format("arrow").iter(batch_size=1000)))


def _empty(source: DataSource) -> str:
    return f"a data source must have rows, {source.path} is empty: check the path"


def _combined_hash(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _table_fingerprint(table: datasets.Dataset, name: str) -> str:
    """A hash of the content; the fingerprint of `datasets` depends on the path of its cache."""
    digest = hashlib.sha256(repr(table.features).encode())
    progress = ProgressLog(f"reading {name}", total=len(table))
    for batch in table.with_format("arrow").iter(batch_size=rows_at_a_time(table.data.schema)):
        stream = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(stream, batch.schema) as writer:
            writer.write_table(batch)
        digest.update(stream.getvalue())
        progress.advance(len(batch))
    return digest.hexdigest()


def _load_folder(source: DataSource, path: Path) -> datasets.Dataset:
    try:
        loaded = datasets.load_from_disk(str(path))
    except IndexError as error:  # raised by datasets for a folder without rows
        raise UserError(_empty(source)) from error
    except Exception as error:  # noqa: BLE001 - a damaged folder, or one that save_to_disk has not written
        raise UserError(
            f"a data folder with {' or '.join(_SAVED_BY_DATASETS)} must be written by save_to_disk, {source.path} is "
            "not: give a file in it"
        ) from error
    return _pick_split(source, loaded)


def _load_hub(source: DataSource) -> datasets.Dataset:
    if source.path.isidentifier() and importlib.util.find_spec(f"datasets.packaged_modules.{source.path}"):
        # `datasets` takes this as the name of a format, and would load any files in the current folder.
        raise UserError(f"{_SOURCE_RULE}, {source.path} is the name of a format: give the file")
    try:
        # The current revision is intended, and datasets 4 runs no code of data sets.
        return datasets.load_dataset(source.path, split=source.split_name)
    except Exception as error:  # noqa: BLE001 - hub, network and builder errors have no common base
        raise UserError(
            f"{_SOURCE_RULE}, {source.path} is not a file or folder and cannot be loaded from the hub "
            f"({(str(error).splitlines() or [type(error).__name__])[0]}): check the name"
        ) from error


def _pick_split(source: DataSource, loaded: datasets.Dataset | datasets.DatasetDict) -> datasets.Dataset:
    if isinstance(loaded, datasets.Dataset):
        return loaded
    if source.split_name not in loaded:
        raise UserError(
            f"split_name must be a split of {source.path}, got {source.split_name!r}: set it to one of {sorted(loaded)}"
        )
    return loaded[source.split_name]


def found_columns(row: Row) -> str:
    """The columns of a row, for an error message."""
    return ", ".join(sorted(row)) or "none with a value"


def missing_columns_error(location: str, row: Row, wanted: Sequence[str]) -> UserError:
    """The error for a row without the columns of any accepted format; it names the one that a column resembles."""
    names = {name for form in wanted for name in form.partition(" (")[0].split(" + ")}
    near = ((column, nearest(column, names - row.keys())) for column in sorted(row.keys() - names))
    fix = next((f"rename {column} to {name}" for column, name in near if name), "rename or add columns")
    return UserError(f"{location}: a row must have {' or '.join(wanted)}, got columns {found_columns(row)}: {fix}")
