"""Raw results of the benchmark pages: `benchmarks/results/PAGE.zip` with a member a result.

The same members give the same bytes: they are sorted and have one date.
"""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid_rlhf.runtime.files.atomic import write_whole

RESULTS = Path(__file__).parent / "results"


def names(page: str, folder: Path = RESULTS) -> list[str]:
    """Members of a page's archive; none if there is no archive."""
    file = folder / f"{page}.zip"
    if not file.exists():
        return []
    with zipfile.ZipFile(file) as archive:
        return archive.namelist()


def read(page: str, name: str, folder: Path = RESULTS) -> str:
    """Text of a member."""
    with zipfile.ZipFile(folder / f"{page}.zip") as archive:
        return archive.read(name).decode()


def find(page: str, name: str, folder: Path = RESULTS) -> str | None:
    """Text of a member; None if there is no such member."""
    return read(page, name, folder) if name in names(page, folder) else None


def write(page: str, name: str, text: str, folder: Path = RESULTS) -> None:
    """Add or replace a member; the archive is whole at any time."""
    file = folder / f"{page}.zip"
    members: dict[str, str | bytes] = {}
    if file.exists():
        with zipfile.ZipFile(file) as archive:
            members = {member: archive.read(member) for member in archive.namelist()}
    members[name] = text
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for member in sorted(members):
            archive.writestr(zipfile.ZipInfo(member), members[member], zipfile.ZIP_DEFLATED, 9)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(file, content.getvalue())


def read_csv(page: str, name: str, folder: Path = RESULTS) -> list[dict[str, str]]:
    """Rows of a CSV member; none if there is no such member."""
    return list(csv.DictReader(io.StringIO(find(page, name, folder) or "")))


def write_csv(page: str, name: str, rows: Sequence[Mapping[str, Any]], folder: Path = RESULTS) -> None:
    """Add or replace a CSV member."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write(page, name, text.getvalue(), folder)
