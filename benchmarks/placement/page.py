"""Sections of docs/benchmarks/placement.md that programs write, each between two marks."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks" / "placement.md"


def write_section(name: str, text: str) -> None:
    """Replace a section of the page."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, _, rest = PAGE.read_text().partition(begin)
    _, _, after = rest.partition(end)
    PAGE.write_text(f"{before}{begin}{text.rstrip()}\n{end}{after}")
