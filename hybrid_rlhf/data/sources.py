"""A source of rows: a JSONL, JSON or Parquet file, a folder of `datasets`, or a hub name.

JSON is read by our own reader, so that a broken line is named by file and line, and kept as text: rows may differ in
their columns, and nothing is guessed about types.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet

from hybrid_rlhf.configs.credentials import redacted
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.files import NotJSON, not_text, parse_json, read_text, regular_file
from hybrid_rlhf.configs.sections import DataSource
from hybrid_rlhf.runtime.progress import ProgressLog

Row = dict[str, Any]
_FILE_TYPES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class Rows:
    """The rows of one source, read one by one, each with the place to name in an error."""

    source: DataSource
    fingerprint: str
    """Changes whenever the content does."""
    _read: Any
    count: Callable[[], int | None] = lambda: None
    """How many there are, if that is quicker to find than the rows; none: unknown."""

    def __iter__(self) -> Iterator[tuple[str, Row]]:
        """(place, row); the place is FILE:LINE, or the number of the row in a table."""
        return iter(self._read())


def open_source(source: str | DataSource) -> Rows:
    """Find a source and take its fingerprint; rows are read when iterated.

    Raises:
        UserError: when there is none, or it is empty or of no known type.
    """
    source = DataSource(path=source) if isinstance(source, str) else source
    if "://" in source.path:
        raise UserError(
            f"a data source is a file, a folder or a hub name, got {redacted(source.path)}: download it first"
        )
    path = Path(os.path.expanduser(source.path))
    if os.path.isdir(path):
        return _open_table(source, _load_folder(source, path))
    local = path.suffix in _FILE_TYPES or source.path.count("/") > 1 or source.path.startswith((".", "/", "~"))
    if local or os.path.exists(path):
        return _open_file(source, regular_file(path, "a data source is a file, a folder or a hub name"))
    return _open_table(source, _load_hub(source))


def _open_file(source: DataSource, path: Path) -> Rows:
    if path.suffix not in _FILE_TYPES:
        raise UserError(f"a data file is .jsonl, .json or .parquet, got {source.path}: convert it")
    if path.stat().st_size == 0:
        raise UserError(f"a data file has rows, {source.path} is empty: check the path")
    with _readable(source):
        if path.suffix == ".parquet":
            return _open_table(source, datasets.Dataset(pyarrow.parquet.read_table(path, memory_map=True)))
        with path.open("rb") as file:
            fingerprint = hashlib.file_digest(file, "sha256").hexdigest()
    if path.suffix == ".jsonl":
        return Rows(source, fingerprint, lambda: _some(source, _read_lines(path)), lambda: _count_lines(path))
    return Rows(source, fingerprint, lambda: _some(source, _read_list(path)))


@contextlib.contextmanager
def _readable(source: DataSource) -> Iterator[None]:
    """What pyarrow and datasets raise for content that is not what its name says; they know no common error."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001
        kind = "Parquet" if source.path.endswith(".parquet") else "a data set that can be read"
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{source.path} is not {kind} ({reason}): check the file") from error


def _some(source: DataSource, rows: Iterator[tuple[str, Row]]) -> Iterator[tuple[str, Row]]:
    """Rows, of which there must be one: a file may hold blank lines or []."""
    first = next(rows, None)
    if first is None:
        raise UserError(_empty(source))
    yield first
    yield from rows


def _read_lines(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _parsed(line, f"{path}:{number}")
    except UnicodeDecodeError as error:
        raise not_text(path) from error


def _count_lines(path: Path) -> int:
    """Lines of a file that are not blank."""
    with path.open("rb") as file:
        return sum(not line.isspace() for line in file)


def _parsed(line: str, place: str) -> tuple[str, Row]:
    try:
        row = parse_json(line)
    except NotJSON as error:
        column = "" if error.column is None else f" at column {error.column}"
        raise UserError(f"{place}: not JSON ({error.reason}{column}): mend the line") from error
    if not isinstance(row, dict):
        raise UserError(f"{place}: a row is a JSON object, got a {type(row).__name__}: mend the line")
    return place, row


def _read_list(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        content = parse_json(read_text(path, "a data source is a file"))
    except NotJSON as error:
        raise UserError(f"{path}:{error.line}: not JSON ({error.reason}): mend it, or name it .jsonl") from error
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise UserError(f"{path}: a .json source is a list of objects: mend it, or name it .jsonl if it has one a line")
    for number, row in enumerate(content, start=1):
        yield f"{path}: row {number}", row


def _open_table(source: DataSource, table: datasets.Dataset) -> Rows:
    if not len(table):
        raise UserError(_empty(source))

    def read() -> Iterator[tuple[str, Row]]:
        # By Arrow: datasets would decode images and sounds, and fetch those that are links.
        with _readable(source):
            batches = table.with_format("arrow").iter(batch_size=1000)
            for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), start=1):
                yield f"{source.path}: row {number}", _without_nulls(row)

    with _readable(source):  # reads every value
        fingerprint = _table_fingerprint(table, source.path)
    return Rows(source, fingerprint, read, lambda: len(table))


def _without_nulls(value: Any) -> Any:
    """A value without the keys that Arrow fills with null: those of columns, and of mappings within them."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _empty(source: DataSource) -> str:
    return f"a data source has rows, {source.path} is empty: check the path"


def _table_fingerprint(table: datasets.Dataset, name: str) -> str:
    """Of the content, not of the path that datasets cached it under."""
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
    except IndexError as error:  # what datasets makes of a folder without rows
        raise UserError(_empty(source)) from error
    except Exception as error:  # noqa: BLE001 - whatever comes up in a folder that is something else, or damaged
        raise UserError(
            f"a data folder is one that save_to_disk wrote, {source.path} is not: name a file in it"
        ) from error
    return _pick_split(source, loaded)


def _load_hub(source: DataSource) -> datasets.Dataset:
    if source.path.isidentifier() and importlib.util.find_spec(f"datasets.packaged_modules.{source.path}"):
        # To datasets that is no name but a format, of whatever lies in the current folder.
        raise UserError(f"a data source is a file, a folder or a hub name, {source.path} is none: name the file")
    try:
        # A user means a data set as it is now, and datasets 4 runs no code of one.
        return datasets.load_dataset(source.path, split=source.split_name)
    except Exception as error:  # noqa: BLE001 - hub, network and builder errors have no common base
        raise UserError(
            f"{source.path} is neither a file nor a folder, and the hub does not give it "
            f"({(str(error).splitlines() or [type(error).__name__])[0]}): check the name"
        ) from error


def _pick_split(source: DataSource, loaded: datasets.Dataset | datasets.DatasetDict) -> datasets.Dataset:
    if isinstance(loaded, datasets.Dataset):
        return loaded
    if source.split_name not in loaded:
        raise UserError(f"{source.path} has no split {source.split_name!r}: set split_name to one of {sorted(loaded)}")
    return loaded[source.split_name]


def found_columns(row: Row) -> str:
    """The columns of a row, for an error."""
    return ", ".join(sorted(row)) or "none"


def missing(place: str, row: Row, wanted: Sequence[str]) -> UserError:
    """The error for a row without its columns."""
    return UserError(
        f"{place}: a row needs {' or '.join(wanted)}, found columns {found_columns(row)}: rename or add them"
    )
