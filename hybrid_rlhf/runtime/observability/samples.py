"""Sample completions of a run: samples.jsonl, and a few of them on the console."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybrid_rlhf.runtime.files.json_lines import JsonLinesFile, drop_lines_after
from hybrid_rlhf.runtime.files.names import SAMPLES_FILE
from hybrid_rlhf.runtime.observability.logs import logger, shortened

_SHOWN = 2


class SampleLog:
    """Writes the samples of every k-th step."""

    def __init__(self, folder: Path, *, every: int, enabled: bool) -> None:
        self._path = folder / SAMPLES_FILE
        self._every = every
        self._enabled = enabled
        self._lines = JsonLinesFile(self._path)

    def resume(self, step: int) -> None:
        """Drop the lines after a step, written by an interrupted run.

        Raises:
            OSError: if they cannot be dropped.
        """
        if self._enabled:
            drop_lines_after(self._path, step)

    def flush(self) -> None:
        """Flush the lines to disk: a checkpoint must not be ahead of them."""
        self._lines.flush()

    def records(self, step: int) -> bool:
        """Return True if a step is recorded; the same on every rank."""
        return bool(self._every) and (step - 1) % self._every == 0

    def write(self, step: int, samples: Sequence[dict[str, Any]]) -> None:
        """Append the rows of a recorded step."""
        if not self._enabled or not self.records(step):
            return
        self._lines.append({"step": step, **row} for row in samples)
        for row in samples[:_SHOWN]:
            question = row["prompt"][-1].get("content", "")
            logger.info(
                "  sample  %s  ->  %s  (score %.2f)",
                shortened(question, 100),
                shortened(row["completion"], 100),
                row["score"],
            )
