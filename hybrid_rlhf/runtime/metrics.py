"""Metrics of a run: metrics.jsonl, TensorBoard, and a line or a progress bar on the console.

Only rank 0 writes. A line of metrics.jsonl is a JSON object with `step`, `time_seconds` and the names of the contract.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hybrid_rlhf.runtime.logs import LOGGER_NAME

METRICS_FILE = "metrics.jsonl"
logger = logging.getLogger(LOGGER_NAME)


class MetricsWriter:
    """Writes the metrics of each step to a folder."""

    def __init__(self, folder: Path, *, tensorboard: bool, resumed_step: int = 0, start_seconds: float = 0.0) -> None:
        """Open the sinks.

        Args:
            folder: of the run.
            tensorboard: also write events to folder/tensorboard.
            resumed_step: lines past this step, left by a run that was cut off, are dropped.
            start_seconds: time_seconds of the run so far.
        """
        file = folder / METRICS_FILE
        _drop_lines_past(file, resumed_step)
        self._lines = file.open("a")
        self._start = time.monotonic() - start_seconds
        self._events = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, and not always wanted

            self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_step + 1)

    @property
    def time_seconds(self) -> float:
        """Seconds since the run began, interruptions left out."""
        return time.monotonic() - self._start

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line."""
        line = {"step": step, "time_seconds": round(self.time_seconds, 3), **metrics}
        self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()
        if self._events is not None:
            for name, value in metrics.items():
                self._events.add_scalar(name, value, step)

    def flush(self) -> None:
        """Return when what was written is on the disk."""
        self._lines.flush()
        os.fsync(self._lines.fileno())

    def close(self) -> None:
        """Flush and close the sinks."""
        self._lines.close()
        if self._events is not None:
            self._events.close()


class StepDisplay:
    """Shows where a loop is: a progress bar on a terminal, otherwise one line a step."""

    def __init__(
        self, title: str, *, total_steps: int, done_steps: int = 0, every: int = 1, enabled: bool = True
    ) -> None:
        self._title, self._total, self._every, self._enabled = title, total_steps, every, enabled
        self._progress: Progress | None = None
        if enabled and sys.stdout.isatty():
            self._progress = Progress(
                TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                TextColumn("{task.fields[figures]}"), console=Console(soft_wrap=True),
            )  # fmt: skip
            self._task = self._progress.add_task(title, total=total_steps, completed=done_steps, figures="")

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, step: int, figures: Mapping[str, float]) -> None:
        """Show the figures that matter after a step."""
        if not self._enabled:
            return
        text = "  ".join(f"{name} {format_figure(value)}" for name, value in figures.items())
        if self._progress is not None:
            self._progress.update(self._task, completed=step, figures=text)
        elif step % self._every == 0 or step == self._total:
            logger.info("%s %d/%d  %s", self._title, step, self._total, text)


def format_figure(value: float) -> str:
    """A figure in at most about six characters."""
    return f"{value:.2e}" if value and abs(value) < 1e-3 else f"{value:.4g}"


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; a last line that was cut off is left out."""
    file = folder / METRICS_FILE
    if not file.exists():
        return []
    lines = []
    for line in file.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


def _drop_lines_past(file: Path, step: int) -> None:
    if not file.exists():
        return
    kept = [line for line in read_metrics(file.parent) if line["step"] <= step]
    beside = file.with_suffix(".jsonl.partial")
    beside.write_text("".join(json.dumps(line) + "\n" for line in kept))
    os.replace(beside, file)
