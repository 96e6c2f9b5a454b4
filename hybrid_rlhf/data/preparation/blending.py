"""Blends sources: rows in given shares, none twice, in a mixed order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from pathlib import Path

import numpy as np

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.rows.files import LocatedRows, json_line
from hybrid_rlhf.data.rows.placing import require_image_paths
from hybrid_rlhf.data.rows.sources import RowReader, open_source
from hybrid_rlhf.runtime.files.atomic import whole_file

_ROUNDING = 1e-12
"""Relative rounding error of a computed number of rows, which may be just below a whole number."""


def blend_rows(output: Path, shares: Sequence[tuple[str, float]], *, rows: int | None, seed: int) -> dict[str, int]:
    """Write a seeded choice of rows of each source, in the order of the source, the sources mixed evenly.

    Args:
        output: JSONL file, which appears only once it is complete.
        shares: path and share of each source; shares need not add up to 1.
        rows: rows to write; None: as many as the shares allow.
        seed: seed of the choice and the order.

    Returns:
        the number of rows taken from each source.

    Raises:
        UserError: if a source cannot be read, has fewer rows than its share, or names images by paths that the folder
            of the output does not have.
    """
    sources = [open_source(path) for path, _ in shares]
    counts = [source.total() for source in sources]
    taken = _taken(shares, counts, rows)
    choices = [
        _chosen_rows(source, count, number, [seed, index])
        for index, (source, count, number) in enumerate(zip(sources, counts, taken, strict=True))
    ]
    order = np.repeat(np.arange(len(sources)), taken)
    np.random.default_rng([seed, len(sources)]).shuffle(order)
    with whole_file(output) as file:
        for index in order.tolist():
            location, row = next(choices[index])
            require_image_paths(location, row, output.parent)
            file.write(json_line(row))
    return {path: number for (path, _), number in zip(shares, taken, strict=True)}


def _taken(shares: Sequence[tuple[str, float]], counts: Sequence[int], rows: int | None) -> list[int]:
    """Number of rows of each source; whole numbers that add up to the total, by the largest remainders."""
    whole = sum(share for _, share in shares)
    parts = [share / whole for _, share in shares]
    possible = min(int(count / part * (1 + _ROUNDING)) for count, part in zip(counts, parts, strict=True))
    total = possible if rows is None else rows
    exact = np.asarray(parts) * total
    floors = np.floor(exact * (1 + _ROUNDING)).astype(int)
    by_remainder = np.argsort(floors - exact, kind="stable")
    floors[by_remainder[: total - int(floors.sum())]] += 1
    taken = floors.tolist()
    for (path, _), count, number in zip(shares, counts, taken, strict=True):
        if number > count:
            raise UserError(
                f"a source must have the rows of its share, {path} has {count:,} of {number:,}: give --rows {possible} "
                "or lower its share"
            )
        if not number:
            raise UserError(f"each source must give a row, {path} gives none of {total:,}: raise --rows or its share")
    return taken


def _chosen_rows(source: RowReader, count: int, number: int, seed: list[int]) -> LocatedRows:
    chosen = np.zeros(count, dtype=bool)
    chosen[np.random.default_rng(seed).permutation(count)[:number]] = True
    return compress(source, chosen)
