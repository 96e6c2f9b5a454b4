"""Converts a source in a published format into a JSONL file of rows that every step reads.

Rows are read and written one at a time. Each row that is written has been read by the reader of its step, so that a
converted file has no row that training refuses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, get_args

from hybrid_rlhf.configs.commands.data import FormatName, RankedAs
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.data import DataSource
from hybrid_rlhf.data.preparation.conversion.dialogues import dialogue_pair
from hybrid_rlhf.data.preparation.conversion.records import (
    Conversion,
    LocatedRow,
    RankedCompletions,
    Record,
    TrackedRow,
    row_by_row,
)
from hybrid_rlhf.data.preparation.conversion.scored import (
    comparison_row,
    helpsteer2_records,
    helpsteer3_row,
    nectar_row,
    ultrafeedback_row,
)
from hybrid_rlhf.data.preparation.conversion.trees import tree_records
from hybrid_rlhf.data.preparation.conversion.turns import (
    openai_row,
    query_row,
    sharegpt_row,
)
from hybrid_rlhf.data.rows.files import Row, json_line
from hybrid_rlhf.data.rows.formats import read_labelled_row, read_preference_row, read_prompt_row, read_sft_row
from hybrid_rlhf.data.rows.placing import require_image_paths
from hybrid_rlhf.data.rows.problems import RowProblems
from hybrid_rlhf.data.rows.published import MATCHES, MESSAGE_COLUMNS, SHARED, detected_format
from hybrid_rlhf.data.rows.sources import found_columns, open_source
from hybrid_rlhf.runtime.files.atomic import whole_file
from hybrid_rlhf.runtime.observability.progress import ProgressLog

CONVERSIONS: dict[FormatName, Conversion] = {
    "hh": row_by_row(dialogue_pair),
    "sharegpt": row_by_row(sharegpt_row, keeps_images=True),
    "ultrafeedback": row_by_row(ultrafeedback_row),
    "alpaca": row_by_row(query_row, keeps_images=True),
    "openassistant": tree_records,
    "helpsteer2": helpsteer2_records,
    "helpsteer3": row_by_row(helpsteer3_row),
    "nectar": row_by_row(nectar_row),
    "openai_comparisons": row_by_row(comparison_row),
    "query": row_by_row(query_row, keeps_images=True),
    "openai_messages": row_by_row(openai_row, keeps_images=True),
}
assert CONVERSIONS.keys() == MATCHES.keys() == {*get_args(FormatName)} - {"auto"}


@dataclass(frozen=True)
class ConversionReport:
    """Numbers of rows that a conversion has read and written."""

    format: FormatName
    rows: int
    written: int
    """0 if a problem has prevented the output."""
    problems: RowProblems
    unread: Counter[str]
    """Number of rows with each column that the format does not have."""


class _Abandoned(Exception):
    """Raised to remove the output when there are problems."""


def convert(
    source: str | DataSource,
    output: Path,
    *,
    format: FormatName,
    ranked_as: RankedAs,
    skip_bad: bool,
    tags: Mapping[str, str] | None = None,
) -> ConversionReport:
    """Convert a source.

    Args:
        source: a file, a folder or a hub name, or a source with other names of columns.
        output: JSONL file, which appears only once it is complete.
        format: the format of the source; auto: the first that matches the first row.
        ranked_as: how ranked completions are written.
        skip_bad: true to leave out rows that cannot be converted; otherwise they prevent the output.
        tags: names that the source's turns have for keys and speakers, by those that conversions read.

    Raises:
        UserError: if the source cannot be read, no format matches, or it has no row for the output.
    """
    problems = RowProblems()
    unread = Counter[str]()
    read = 0
    written = 0
    reader = open_source(source)
    path = reader.source.path
    rows = ((location, _renamed(row, tags or {})) for location, row in reader.readable_rows(problems.add))
    first = next(rows, None)
    if first is None:
        raise UserError(f"a data source must have rows, {path} has none that can be read: {_first(problems)}")
    chosen = _detected(*first) if format == "auto" else format
    progress = ProgressLog(f"converting {path}", total=reader.count())

    def counted() -> Iterator[LocatedRow]:
        nonlocal read
        for location, row in progress.track(chain([first], rows)):
            read += 1
            tracked = TrackedRow(row)
            failed = problems.count
            yield location, tracked
            unread.update(tracked.unread() if problems.count == failed else ())

    try:
        with whole_file(output) as file:
            for location, record in CONVERSIONS[chosen](counted(), ranked_as, problems):
                with problems.collected():
                    row = checked(location, record, ranked_as)
                    require_image_paths(location, row, output.parent)
                    file.write(json_line(row))
                    written += 1
            if problems.count and not skip_bad:
                raise _Abandoned
            if not written:
                raise UserError(f"{path} must have a row that becomes one of {chosen}, got none: {_first(problems)}")
    except _Abandoned:
        written = 0
    return ConversionReport(chosen, read, written, problems, unread)


def _renamed(row: Row, tags: Mapping[str, str]) -> Row:
    """A row whose turns have the keys and speakers that conversions read."""
    names = {theirs: ours for ours, theirs in tags.items()}

    def read(turn: Any) -> Any:
        if not isinstance(turn, dict):
            return turn
        renamed = {names.get(key, key): value for key, value in turn.items()}
        speakers = {key: names[renamed[key]] for key in ("from", "role") if renamed.get(key) in names}
        return renamed | speakers

    turns = {name: row[name] for name in (*SHARED, *MESSAGE_COLUMNS) if names and name in row}
    return row | {
        name: [*map(read, value)] if isinstance(value, list) else read(value) for name, value in turns.items()
    }


def _detected(location: str, row: Row) -> FormatName:
    detected = detected_format(row)
    if detected is None:
        raise UserError(
            f"{location}: a row must be in one of the formats {', '.join(MATCHES)}, got columns {found_columns(row)}: "
            "name the format with --format, or rename columns"
        )
    return detected


def checked(location: str, record: Record, ranked_as: RankedAs) -> Row:
    """Check that a step can read the row of a record, and return the row.

    Raises:
        UserError: if no step can read it.
    """
    row = record.written(location, ranked_as) if isinstance(record, RankedCompletions) else record
    if "rejected" in row or "responses" in row:
        read_preference_row(location, row, refusal="")
    elif "label" in row and "completion" in row:
        read_labelled_row(location, row, refusal="")
    elif set(row) & {"messages", "completion", "chosen"}:
        read_sft_row(location, row, refusal="")
    else:
        read_prompt_row(location, row, refusal="")
    return row


def _first(problems: RowProblems) -> str:
    return problems.texts[0] if problems.texts else "check the file, or name the format with --format"
