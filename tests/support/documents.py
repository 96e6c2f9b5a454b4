"""Metrics that the documentation lists."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from tests.support.runs import ROOT


@functools.cache
def documented_metrics() -> list[str]:
    """The names in the tables of docs/metrics.md."""
    rows = re.findall(r"^\| (`[^|]*`) \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def undocumented_metrics(names: Iterable[str]) -> set[str]:
    """Those that docs/metrics.md does not list; NAME and PHASE in it stand for any name."""
    known = "|".join(re.sub("NAME|PHASE", r"[\\w.:/-]+", re.escape(name)) for name in documented_metrics())
    return {name for name in names if re.fullmatch(known, name) is None}
