"""Writes the tables of docs/migration.md from the names of other systems: `python -m tests.house.migration`."""

from __future__ import annotations

import re
from pathlib import Path

from hybrid_rlhf.configs.parsing.other_systems import SYSTEMS, Row, system

PAGE = Path(__file__).parents[2] / "docs" / "migration.md"


def table(name: str) -> str:
    """The options of a system: a table of those with a key or a remark, then those without a counterpart."""
    rows = system(name).rows
    lines = [f"| {system(name).title} | here | difference |", "|---|---|---|"]
    lines += [f"| {_names(row)} | {_keys(row)} | {row.note or ''} |" for row in rows if row.keys]
    lines += ["", "Without a key of their own:", ""]
    lines += [f"- {_names(row)}: {row.none}" for row in rows if not row.keys]
    return "\n".join(lines)


def _names(row: Row) -> str:
    return ", ".join(f"`{name}`" for name in row.names)


def _keys(row: Row) -> str:
    return ", ".join(f"`{key}`" for key in dict.fromkeys(row.keys))


def rendered(page: str) -> str:
    """The page with the present tables between its marks."""
    for name in SYSTEMS:
        page = re.sub(
            rf"(?<=<!-- table of {name} -->\n\n).*?(?=\n\n<!-- end -->)",
            lambda _: table(name),  # noqa: B023
            page,
            flags=re.DOTALL,
        )
    return page


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
