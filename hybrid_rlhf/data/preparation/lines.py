"""Rows as lines of JSON."""

from __future__ import annotations

import json

from hybrid_rlhf.data.rows.files import Row


def json_line(row: Row) -> bytes:
    """A row as a line of UTF-8; types that JSON lacks (dates, decimals, bytes in Parquet) become text."""
    return f"{json.dumps(row, ensure_ascii=False, default=str)}\n".encode()
