"""Conversion of rows, as `hybrid-rlhf data convert` does it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybrid_rlhf.data.preparation.conversion.converting import ConversionReport, convert
from hybrid_rlhf.data.rows.files import Row
from hybrid_rlhf.data.rows.sources import open_source
from tests.data.rows import Converted


@pytest.fixture
def converted(write_jsonl: Callable[..., Path]) -> Converted:
    """The converted rows of a file, or of rows that are written to one, and what is reported."""

    def read(rows: Path | list[Row], **more: Any) -> tuple[list[Row], ConversionReport]:
        file = rows if isinstance(rows, Path) else write_jsonl(rows)
        output = file.with_suffix(".out.jsonl")
        output.unlink(missing_ok=True)
        settings = {"format": "auto", "ranked_as": "ranks", "skip_bad": False, "source": str(file)} | more
        report = convert(output=output, **settings)
        return [row for _, row in open_source(str(output))] if output.exists() else [], report

    return read
