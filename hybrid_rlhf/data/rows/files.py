"""Rows of one file: JSONL, JSON and CSV, plain or compressed with gzip or Zstandard, Parquet and Arrow.

JSON and CSV are parsed here instead of by `datasets`: errors name file and line, rows may have different columns, and
no types are inferred. Null columns and keys are omitted in every format, because Arrow has null for missing ones: the
same rows are the same in all formats.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.images.reading import png
from hybrid_rlhf.data.rows.arrow import arrow_rows, decimal_number, rows_at_a_time
from hybrid_rlhf.runtime.files.atomic import output_file
from hybrid_rlhf.runtime.files.reading import NotJSON, not_text, parse_json

Row = dict[str, Any]
LocatedRows = Iterator[tuple[str, Row]]
OnBadLine = Callable[[UserError], None]
"""Receives the error of a line that is not a row; an exception that it raises ends the reading."""
FILE_TYPES = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
TYPES_TEXT = ".jsonl, .json, .csv, .parquet or .arrow"
_TABLES = {".parquet": "Parquet", ".arrow": "Arrow"}
"""Types that have their own compression."""
_COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
_JSON_CELLS = (
    "messages",
    "tools",
    "completions",
    "labels",
    "responses",
    "ranks",
    "label",
    "margin",
    "score",
    "segments",
    "images",
)
"""Columns that are not text, which a CSV file writes as JSON."""


def file_type(path: Path) -> str | None:
    """The type of a data file by its name, such as .jsonl for rows.jsonl.gz; None if it is not a data file."""
    suffix = Path(path.stem).suffix if path.suffix in _COMPRESSED else path.suffix
    is_known = suffix in FILE_TYPES and (suffix not in _TABLES or path.suffix == suffix)
    return suffix if is_known else None


def plain_name(path: Path) -> str:
    """The name of a source without the suffixes of its type and compression, and without the characters of a
    pattern."""
    name = Path(path.stem).stem if path.suffix in _COMPRESSED else path.stem
    return re.sub(r"[*?\[\]]+", "", name).strip("-_.") or "rows"


def rows_file(path: str, *, overwrite: bool) -> Path:
    """The path of a new JSONL file, the argument `--output`; creates its folder.

    Raises:
        UserError: as `output_file`, and for a name by which it is read as another format.
    """
    if path.endswith(tuple({*FILE_TYPES, *_COMPRESSED} - {".jsonl"})):
        raise UserError(f"--output is written as JSONL, got {path}: give a name that ends in .jsonl")
    return output_file(path, "--output", overwrite=overwrite)


def read_rows(path: Path, on_bad_line: OnBadLine) -> LocatedRows:
    """The rows of a file with their locations, without null columns and keys; cells of CSV are text.

    Raises:
        UserError: if the file is not of its type.
    """
    readers = {
        ".jsonl": _jsonl_rows,
        ".json": _json_rows,
        ".csv": _csv_rows,
        ".parquet": _table_rows,
        ".arrow": _table_rows,
    }
    rows = readers[str(file_type(path))](path, on_bad_line)
    return ((location, without_nulls(row)) for location, row in rows)


def count_rows(path: Path) -> int | None:
    """The number of rows of a file, if they can be counted without parsing them; None if unknown."""
    kind = file_type(path)
    if kind == ".parquet":
        with readable(path), pyarrow.parquet.ParquetFile(path) as file:
            return int(file.metadata.num_rows)
    if kind == ".arrow":
        with readable(path):
            return sum(batch.num_rows for batch in _arrow_batches(path))
    if kind != ".jsonl":
        return None
    with _opened(path) as file:
        return sum(not line.isspace() for line in file)


def content_hash(path: Path) -> str:
    """A hash of the bytes of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def decode_cells(rows: LocatedRows, on_bad_line: OnBadLine) -> LocatedRows:
    """Rows of CSV, with the values of the columns that are not text."""
    for location, row in rows:
        try:
            decoded = without_nulls({name: _cell(location, name, text) for name, text in row.items()})
        except UserError as error:
            on_bad_line(error)
            continue
        yield location, decoded


def json_line(row: Row) -> bytes:
    """A row as a line of UTF-8; see `json_value`. Bytes and images of Pillow become data URIs, as rows have images."""
    return f"{json.dumps(row, ensure_ascii=False, default=_line_value)}\n".encode()


def _line_value(value: Any) -> Any:
    is_image = type(value).__module__.startswith("PIL.")
    if is_image or isinstance(value, bytes):
        return f"data:;base64,{base64.b64encode(png(value) if is_image else value).decode()}"
    return json_value(value)


def json_value(value: Any) -> Any:
    """A value of a type that JSON lacks: decimals are numbers, arrays of numpy lists, dates and bytes text."""
    if isinstance(value, Decimal):
        return decimal_number(value)
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else str(value)


def without_nulls(value: Any) -> Any:
    """A value without the null entries of mappings, with which Arrow fills missing columns and keys."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


@contextlib.contextmanager
def readable(path: str | Path) -> Iterator[None]:
    """Raise a UserError for any error of pyarrow and datasets about invalid content; they have no common base class."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001
        table = _TABLES.get(Path(path).suffix)
        kind = "a readable data set" if table is None else f"valid {table}"
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path} is not {kind} ({reason}): check the file") from error


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[io.TextIOWrapper]:
    """The text of a file, decompressed; line ends are kept.

    Raises:
        UserError: if it is not UTF-8, or not compressed as its name says.
    """
    compression = _COMPRESSED.get(path.suffix)
    try:
        binary: Any = path.open("rb") if compression is None else pyarrow.input_stream(str(path), compression)
        with io.TextIOWrapper(binary, encoding="utf-8-sig", newline="") as file:
            yield file
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: convert it") if compression else not_text(path) from error
    except OSError as error:
        if compression is None or error.errno is not None:
            raise UserError(f"a data file must be readable, {path} is not ({error.strerror}): check it") from error
        raise UserError(f"{path} is not valid {compression} ({error}): check the file") from error


def _jsonl_rows(path: Path, on_bad_line: OnBadLine) -> LocatedRows:
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            if number == 1 and line.strip() == "[":  # else each of its lines would be a problem
                raise UserError(f"{path}:1: a line must be JSON, the file is one list: rename it to .json")
            try:
                located_row = _parsed(line, f"{path}:{number}")
            except UserError as error:
                on_bad_line(error)
                continue
            yield located_row


def _parsed(line: str, location: str) -> tuple[str, Row]:
    try:
        row = parse_json(line.rstrip("\r\n"))
    except NotJSON as error:
        column = "" if error.column is None else f" at column {error.column}"
        whole = ", or rename the file to .json if it is one list" if line.lstrip().startswith("[") else ""
        raise UserError(f"{location}: a line must be JSON ({error.reason}{column}): fix the line{whole}") from error
    if not isinstance(row, dict):
        whole = ", or rename the file to .json if it is one list" if isinstance(row, list) else ""
        raise UserError(f"{location}: a row must be a JSON object, got {type(row).__name__}: fix the line{whole}")
    return location, row


def _json_rows(path: Path, _: OnBadLine) -> LocatedRows:
    try:
        with _opened(path) as file:
            content = parse_json(file.read())
    except NotJSON as error:
        raise UserError(
            f"{path}:{error.line}: a .json source must be JSON ({error.reason}): fix it, or rename it to .jsonl"
        ) from error
    rows = content if isinstance(content, list) else []
    other = next((f"a list with {type(row).__name__}" for row in rows if not isinstance(row, dict)), None)
    if other is not None or not isinstance(content, list):
        raise UserError(
            f"{path}: a .json source must be a list of objects, got {other or type(content).__name__}: fix it, or "
            "rename it to .jsonl if each line is an object"
        )
    for number, row in enumerate(content, start=1):
        yield f"{path}: row {number}", row


def _csv_rows(path: Path, on_bad_line: OnBadLine) -> LocatedRows:
    """The rows of a CSV file under its header; an empty cell is a missing column. A row is located by its first
    line."""
    csv.field_size_limit(sys.maxsize)  # the default is 128 KiB; the setting applies to the whole process
    with _opened(path) as file:
        reader = csv.reader(file, strict=True)
        header: list[str] | None = None
        line = 1
        try:
            for cells in reader:
                location = f"{path}:{line}"
                line = reader.line_num + 1
                if not cells:  # a blank line
                    continue
                if header is None:
                    header = cells
                    if len(cells) == 1 and re.search("[;\t]", cells[0]):
                        raise UserError(
                            f"{location}: cells of a CSV file are separated by commas, got {cells[0]!r:.60}: convert it"
                        )
                    if not all(cells) or len(set(cells)) < len(cells):
                        raise UserError(
                            f"{location}: the first line of a CSV file must name its columns, each once, got "
                            f"{', '.join(cells)}: fix it"
                        )
                elif len(cells) != len(header):
                    on_bad_line(
                        UserError(
                            f"{location}: a row must have the {len(header)} cells of the first line, got "
                            f"{len(cells)}: put cells with commas in double quotes, or fix the row"
                        )
                    )
                else:
                    yield location, {name: cell for name, cell in zip(header, cells, strict=True) if cell}
        except csv.Error as error:
            raise UserError(f"{path}:{line}: a line must be CSV ({error}): fix the line") from error


def _cell(location: str, column: str, text: str) -> Any:
    if column not in _JSON_CELLS:
        return text
    try:
        return parse_json(text.lower() if text.lower() in ("true", "false") else text)
    except NotJSON as error:
        raise UserError(
            f"{location}: column {column!r} of a CSV file must be JSON ({error.reason}), got {text!r}: fix the row"
        ) from error


def _table_rows(path: Path, _: OnBadLine) -> LocatedRows:
    with readable(path):
        for index, row in enumerate(arrow_rows(_batches(path)), start=1):
            yield f"{path}: row {index}", row


def _batches(path: Path) -> Iterator[pyarrow.RecordBatch]:
    """The batches of a Parquet or Arrow file."""
    if file_type(path) == ".arrow":
        yield from _arrow_batches(path)
        return
    with pyarrow.parquet.ParquetFile(path, memory_map=True, arrow_extensions_enabled=True) as file:
        yield from file.iter_batches(batch_size=rows_at_a_time(file.schema_arrow))


def _arrow_batches(path: Path) -> Iterator[pyarrow.RecordBatch]:
    """The batches of Arrow's stream, which `datasets` writes, or of its file format (Feather)."""
    with pyarrow.memory_map(str(path)) as file:
        is_stream = file.read(6) != b"ARROW1"
        file.seek(0)
        if is_stream:
            yield from pyarrow.ipc.open_stream(file)
            return
        reader = pyarrow.ipc.open_file(file)
        yield from map(reader.get_batch, range(reader.num_record_batches))
