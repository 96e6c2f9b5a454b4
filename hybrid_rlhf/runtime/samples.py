"""Sample completions of a run: samples.jsonl and, every so often, a few on the console."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hybrid_rlhf.runtime.lines import LineFile, drop_lines_past
from hybrid_rlhf.runtime.logs import LOGGER_NAME, shortened

SAMPLES_FILE = "samples.jsonl"
_SHOWN = 2
logger = logging.getLogger(LOGGER_NAME)


class SampleLog:
    """Writes the samples of every k-th step."""

    def __init__(self, folder: Path, *, every: int, enabled: bool) -> None:
        self._path, self._every, self._enabled = folder / SAMPLES_FILE, every, enabled
        self._lines = LineFile(self._path)

    def resume(self, step: int) -> None:
        """Drop the lines past a step, left by a run that was cut off.

        Raises:
            OSError: when they cannot be dropped.
        """
        if self._enabled:
            drop_lines_past(self._path, step)

    def flush(self) -> None:
        """Bring the lines to the disk itself: a checkpoint must not know more than they do."""
        self._lines.flush()

    def write(self, step: int, rows: Callable[[], Sequence[dict[str, Any]]]) -> None:
        """Append a step's rows, if it is one of those; `rows` is called only then."""
        if not self._enabled or not self._every or (step - 1) % self._every:
            return
        samples = rows()
        self._lines.append({"step": step, **row} for row in samples)
        for row in samples[:_SHOWN]:
            asked = row["prompt"][-1].get("content", "")
            logger.info(
                "  sample  %s  ->  %s  (score %.2f)",
                shortened(asked, 100),
                shortened(row["completion"], 100),
                row["score"],
            )
