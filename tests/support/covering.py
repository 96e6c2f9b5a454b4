"""Pairwise covering: the few of all combinations that have every pair of values of any two factors.

Most faults of combined settings need two of them (Kuhn, Wallace, Gallo 2004, Software fault interactions and
implications for software testing, IEEE TSE 30(6)). `make test` runs these; `make faults` runs all combinations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

import pytest

_LEAST_FACTORS, _LEAST_CASES = 3, 9


def mark_all_but_covering(items: Iterable[pytest.Item]) -> None:
    """Mark as `faults` the cases of tests of three factors or more that a covering of their pairs does not need."""
    cases: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for functions in cases.values():
        names = [_first_name(mark) for mark in functions[0].iter_markers("parametrize")]
        if len(names) < _LEAST_FACTORS or len(functions) < _LEAST_CASES:
            continue
        rows = [tuple(repr(function.callspec.params[name]) for name in names) for function in functions]
        kept = covering(rows)
        for row, function in zip(rows, functions, strict=True):
            if row not in kept:
                function.add_marker(pytest.mark.faults)


def _first_name(mark: pytest.Mark) -> str:
    names = mark.args[0] if mark.args else mark.kwargs["argnames"]
    return names.split(",")[0].strip() if isinstance(names, str) else names[0]


def covering(rows: Sequence[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """Rows that have every pair of values in two columns that any row has, chosen greedily."""
    pairs = {row: {((i, row[i]), (j, row[j])) for i, j in combinations(range(len(row)), 2)} for row in rows}
    missing = set().union(*pairs.values())
    chosen: set[tuple[str, ...]] = set()
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen
