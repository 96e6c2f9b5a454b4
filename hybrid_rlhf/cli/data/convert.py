"""`hybrid-rlhf data convert FILE --output OUT.jsonl`: converts a published format into rows that every step reads."""

from __future__ import annotations

import sys

from hybrid_rlhf.configs.commands.data import ConvertConfig
from hybrid_rlhf.configs.sections.data import DataSource
from hybrid_rlhf.runtime.command_line import command
from hybrid_rlhf.runtime.output import print_result

SHOWN = 20
"""Number of problems to print as text; JSON has more."""


@command(ConvertConfig, positional="path")
def main(config: ConvertConfig) -> None:
    """Convert a source; exit code 1 if a row cannot be converted and skip_bad is off."""
    from hybrid_rlhf.data.preparation.conversion.converting import convert
    from hybrid_rlhf.data.rows.files import rows_file

    output = rows_file(config.output, overwrite=config.overwrite)
    source = DataSource(path=config.path, columns=config.columns)
    report = convert(
        source,
        output,
        format=config.format,
        ranked_as=config.ranked_as,
        skip_bad=config.skip_bad,
        tags=config.tags,
    )
    failed = bool(report.problems.count) and not config.skip_bad
    lines = problem_lines(report.problems.texts, report.problems.count)
    if failed:
        lines.append("nothing is written: fix the rows above, or leave them out with --skip_bad true")
    else:
        skipped = f", {report.problems.count:,} left out" if report.problems.count else ""
        lines.append(f"{report.rows:,} rows of {report.format}{skipped}: {report.written:,} rows in {output}")
        if report.unread:
            names = ", ".join(f"{name} ({count:,})" for name, count in report.unread.most_common())
            lines.append(
                f"left out, as {report.format} has no such columns: {names}; rename those to keep with --columns"
            )
    document = {
        "format": report.format,
        "rows": report.rows,
        "written": report.written,
        "output": None if failed else str(output),
        "problems": report.problems.count,
        "problem_texts": report.problems.texts,
        "unread_columns": report.unread,
    }
    print_result(document, "\n".join(lines))
    if failed:
        sys.exit(1)


def problem_lines(texts: list[str], count: int, noun: str = "problem") -> list[str]:
    """The first problems, and the number of further ones."""
    more = [f"... and {count - SHOWN:,} more {noun}s"] if count > SHOWN else []
    return [*texts[:SHOWN], *more]
