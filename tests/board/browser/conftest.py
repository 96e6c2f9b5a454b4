"""A board over made-up runs and a browser, once for these tests. The browser's event loop must not outlive them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.board import ServedBoard, append_rows, sample_rows, served_board, write_run
from tests.support.browser import browser_context, checked_page, require_browser
from tests.support.showcase import write_showcase


@pytest.fixture(scope="package")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBoard]:
    """The runs of the showcase, one with many samples, and one with a sample of each prompt."""
    require_browser()
    folder = write_showcase(tmp_path_factory.mktemp("board") / "output")
    append_rows(write_run(folder / "many", steps=2), [row for step in range(1, 6) for row in sample_rows(step, 1000)])
    rows = [{**row, "components": {"model": row["score"]}} for row in sample_rows(1, 3, group=1)]
    append_rows(write_run(folder / "single", steps=1), rows)
    with served_board(folder) as board:
        yield board


@pytest.fixture(scope="package")
def context(board: ServedBoard) -> Iterator[Any]:
    with browser_context() as context:
        yield context


@pytest.fixture
def page(context: Any) -> Iterator[Any]:
    with checked_page(context) as page:
        yield page
