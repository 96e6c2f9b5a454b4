"""Sources of rows: JSONL, JSON and Parquet files, folders written by `datasets`, and data sets on the Hugging Face hub.

JSON is parsed here instead of by `datasets`: errors name file and line, rows may have different columns, and no types
are inferred.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.files.credentials import redacted
from hybrid_rlhf.configs.files.reading import NotJSON, not_text, parse_json, read_text, regular_file, user_path
from hybrid_rlhf.configs.sections.data import DataSource
from hybrid_rlhf.runtime.observability.progress import ProgressLog

Row = dict[str, Any]
OnBadLine = Callable[[UserError], None]
"""Receives the error of a line that is not a row; what it raises ends the reading."""
_FILE_TYPES = (".jsonl", ".json", ".parquet")
_SOURCE_RULE = "a data source must be a file, a folder or a hub name"


@dataclass(frozen=True)
class RowReader:
    """The rows of one source, each with its location for error messages."""

    source: DataSource
    _fingerprint: Callable[[], str]
    _read: Callable[[OnBadLine], Iterator[tuple[str, Row]]]
    count: Callable[[], int | None] = lambda: None
    """The number of rows, if it can be found without reading them; None: unknown."""

    @property
    def fingerprint(self) -> str:
        """A hash of the content, which is read for it."""
        with _readable(self.source):
            return self._fingerprint()

    def __iter__(self) -> Iterator[tuple[str, Row]]:
        """Yield (location, row); the location is FILE:LINE, or FILE and the number of the row in a table."""
        return _not_empty(self.source, self._read(_raise))

    def readable_rows(self, on_bad_line: OnBadLine) -> Iterator[tuple[str, Row]]:
        """The same without lines of a JSONL file that are not rows; there may be no rows."""
        return self._read(on_bad_line)


def open_source(source: str | DataSource) -> RowReader:
    """Find a source and compute its fingerprint; rows are read on iteration.

    Raises:
        UserError: if the source does not exist, is empty or has an unknown type.
    """
    source = DataSource(path=source) if isinstance(source, str) else source
    if "://" in source.path:
        raise UserError(f"{_SOURCE_RULE}, got {redacted(source.path)}: download it first")
    path = user_path(source.path)
    if os.path.isdir(path):
        return _open_table(source, _load_folder(source, path))
    if _is_local(source, path):
        return _open_file(source, regular_file(path, _SOURCE_RULE))
    return _open_table(source, _load_hub(source))


def peek(source: str | DataSource) -> int | None:
    """Read the first row of a local source, and count its rows; none of a hub name, which is not contacted.

    Raises:
        UserError: if the source does not exist, is empty, or its first row is not of its type.
    """
    source = DataSource(path=source) if isinstance(source, str) else source
    path = user_path(source.path)
    if "://" not in source.path and not _is_local(source, path):
        return None
    if path.suffix == ".parquet" and path.is_file() and path.stat().st_size:
        with _readable(source), pyarrow.parquet.ParquetFile(path) as file:  # open_source reads all of it
            if next(file.iter_batches(batch_size=1), None) is None:
                raise UserError(_empty(source))
            return int(file.metadata.num_rows)
    reader = open_source(source)
    if path.suffix == ".json" and path.is_file():
        return sum(1 for _ in reader)
    next(iter(reader))
    return reader.count()


def _is_local(source: DataSource, path: Path) -> bool:
    """Whether a source is on this machine, by its name or because it exists."""
    named = path.suffix in _FILE_TYPES or source.path.count("/") > 1 or source.path.startswith((".", "/", "~"))
    return named or os.path.exists(path)


def _open_file(source: DataSource, path: Path) -> RowReader:
    if path.suffix not in _FILE_TYPES:
        raise UserError(f"a data file must be .jsonl, .json or .parquet, got {source.path}: convert it")
    if path.stat().st_size == 0:
        raise UserError(_empty(source))
    with _readable(source):
        if path.suffix == ".parquet":
            return _open_table(source, datasets.Dataset(pyarrow.parquet.read_table(path, memory_map=True)))
    fingerprint = partial(_file_fingerprint, path)
    if path.suffix == ".jsonl":
        return RowReader(source, fingerprint, partial(_read_lines, path), lambda: _count_lines(path))
    return RowReader(source, fingerprint, lambda _: _read_list(path))


@contextlib.contextmanager
def _readable(source: DataSource) -> Iterator[None]:
    """Raise a UserError for any error of pyarrow and datasets about invalid content; they have no common base class."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001
        kind = "valid Parquet" if source.path.endswith(".parquet") else "a readable data set"
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{source.path} is not {kind} ({reason}): check the file") from error


def _not_empty(source: DataSource, rows: Iterator[tuple[str, Row]]) -> Iterator[tuple[str, Row]]:
    """The rows, of which there must be at least one: a file may contain only blank lines or []."""
    first = next(rows, None)
    if first is None:
        raise UserError(_empty(source))
    yield first
    yield from rows


def _raise(error: UserError) -> None:
    raise error


def _read_lines(path: Path, on_bad_line: OnBadLine) -> Iterator[tuple[str, Row]]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    found = _parsed(line, f"{path}:{number}")
                except UserError as error:
                    on_bad_line(error)
                    continue
                yield found
    except UnicodeDecodeError as error:
        raise not_text(path) from error


def _count_lines(path: Path) -> int:
    """The number of lines that are not blank."""
    with path.open("rb") as file:
        return sum(not line.isspace() for line in file)


def _parsed(line: str, location: str) -> tuple[str, Row]:
    try:
        row = parse_json(line)
    except NotJSON as error:
        column = "" if error.column is None else f" at column {error.column}"
        raise UserError(f"{location}: a line must be JSON ({error.reason}{column}): fix the line") from error
    if not isinstance(row, dict):
        raise UserError(f"{location}: a row must be a JSON object, got {type(row).__name__}: fix the line")
    return location, row


def _read_list(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        content = parse_json(read_text(path, _SOURCE_RULE))
    except NotJSON as error:
        raise UserError(
            f"{path}:{error.line}: a .json source must be JSON ({error.reason}): fix it, or rename it to .jsonl"
        ) from error
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise UserError(
            f"{path}: a .json source must be a list of objects, got {_json_kind(content)}: fix it, or rename it to "
            ".jsonl if each line is an object"
        )
    for number, row in enumerate(content, start=1):
        yield f"{path}: row {number}", row


def _json_kind(content: Any) -> str:
    """The type of JSON content that is not a list of objects, for an error message."""
    if not isinstance(content, list):
        return type(content).__name__
    return f"a list with {next(type(row).__name__ for row in content if not isinstance(row, dict))}"


def _open_table(source: DataSource, table: datasets.Dataset) -> RowReader:
    if not len(table):
        raise UserError(_empty(source))

    def read(_: OnBadLine) -> Iterator[tuple[str, Row]]:
        # In Arrow format: datasets would decode images and audio, and download linked ones.
        with _readable(source):
            batches = table.with_format("arrow").iter(batch_size=1000)
            for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), start=1):
                yield f"{source.path}: row {number}", _without_nulls(row)

    return RowReader(source, partial(_table_fingerprint, table, source.path), read, lambda: len(table))


def _without_nulls(value: Any) -> Any:
    """A value without null entries of mappings, with which Arrow fills missing columns and keys."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _empty(source: DataSource) -> str:
    return f"a data source must have rows, {source.path} is empty: check the path"


def _file_fingerprint(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _table_fingerprint(table: datasets.Dataset, name: str) -> str:
    """A hash of the content; that of `datasets` depends on the path of its cache."""
    digest = hashlib.sha256(repr(table.features).encode())
    progress = ProgressLog(f"reading {name}", total=len(table))
    for batch in table.with_format("arrow").iter(batch_size=1000):
        for column in batch.columns:
            digest.update(repr(column.to_pylist()).encode())
        progress.advance(len(batch))
    return digest.hexdigest()


def _load_folder(source: DataSource, path: Path) -> datasets.Dataset:
    try:
        loaded = datasets.load_from_disk(str(path))
    except IndexError as error:  # raised by datasets for a folder without rows
        raise UserError(_empty(source)) from error
    except Exception as error:  # noqa: BLE001 - a damaged folder, or one that save_to_disk has not written
        raise UserError(
            f"a data folder must be written by save_to_disk, {source.path} is not: give a file in it"
        ) from error
    return _pick_split(source, loaded)


def _load_hub(source: DataSource) -> datasets.Dataset:
    if source.path.isidentifier() and importlib.util.find_spec(f"datasets.packaged_modules.{source.path}"):
        # For datasets this is the name of a format, which would load any files in the current folder.
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
    return ", ".join(sorted(row)) or "none"


def missing_columns_error(location: str, row: Row, wanted: Sequence[str]) -> UserError:
    """The error for a row without the columns of any accepted format."""
    return UserError(
        f"{location}: a row must have {' or '.join(wanted)}, got columns {found_columns(row)}: rename or add columns"
    )
