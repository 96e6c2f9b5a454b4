"""Metrics of a run: metrics.jsonl, TensorBoard, and a line or a progress bar on the console.

Only rank 0 writes. A line of metrics.jsonl is a JSON object with `step`, `time_seconds` and the names of the contract;
a figure that is not finite is null. A sink that fails is told of once, and does not end the run.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hybrid_rlhf.runtime.lines import LineFile, drop_lines_past, read_lines
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

        Raises:
            OSError: when lines past the step cannot be dropped.
        """
        drop_lines_past(folder / METRICS_FILE, resumed_step)
        self._lines = LineFile(folder / METRICS_FILE)
        self._start = time.monotonic() - start_seconds
        self._events: Any = None
        if tensorboard:
            with self._events_or_none():
                from torch.utils.tensorboard import SummaryWriter  # slow to import, and not always wanted

                self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_step + 1)

    @property
    def time_seconds(self) -> float:
        """Seconds since the run began, interruptions left out."""
        return time.monotonic() - self._start

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line."""
        figures = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._lines.append([{"step": step, "time_seconds": round(self.time_seconds, 3), **figures}])
        if self._events is not None:
            with self._events_or_none():
                for name, value in metrics.items():
                    self._events.add_scalar(name, value, step)

    def flush(self) -> None:
        """Bring metrics.jsonl to the disk itself: a checkpoint must not know more than it does."""
        self._lines.flush()

    def close(self) -> None:
        """Write what is left and close the sinks."""
        self._lines.close()
        if self._events is not None:
            with self._events_or_none():
                self._events.close()

    @contextlib.contextmanager
    def _events_or_none(self) -> Iterator[None]:
        """Where TensorBoard fails it is left: metrics.jsonl has the same figures."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - its writer raises what its thread did
            self._events = None
            logger.warning("TensorBoard events are written no more (%s: %s)", type(error).__name__, error)


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
        with self._bar_or_none():
            if self._progress is not None:
                self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._bar_or_none():
            if self._progress is not None:
                self._progress.stop()

    def show(self, step: int, figures: Mapping[str, float]) -> None:
        """Show the figures that matter after a step."""
        if not self._enabled:
            return
        text = "  ".join(f"{name} {format_figure(value)}" for name, value in figures.items())
        if self._progress is not None:
            with self._bar_or_none():
                self._progress.update(self._task, completed=step, figures=text)
        elif step % self._every == 0 or step == self._total:
            logger.info("%s %d/%d  %s", self._title, step, self._total, text)

    @contextlib.contextmanager
    def _bar_or_none(self) -> Iterator[None]:
        """A terminal that is gone takes the bar with it, not the run."""
        try:
            yield
        except OSError as error:
            self._progress = None
            logger.info("the progress bar is shown no more (%s)", error.strerror or type(error).__name__)


def format_figure(value: float) -> str:
    """A figure in at most about six characters."""
    return f"{value:.2e}" if value and abs(value) < 1e-3 else f"{value:.4g}"


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, null as NaN again; a last line that was cut off is left out."""
    lines = read_lines(folder / METRICS_FILE)
    return [{name: math.nan if value is None else value for name, value in line.items()} for line in lines]
