"""The console of a training loop: a log line for each step, and on a terminal a progress bar below the lines.

The bar has a fixed part that fits in 80 columns (step, total, elapsed and remaining time, tokens per second, one
metric) and fills the other columns. The remaining time is the mean duration of the last steps times the number of
remaining steps: rich's own estimate uses the last thirty seconds, which a step of RL exceeds.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from hybrid_rlhf.runtime.observability.formatting import format_clock, format_value
from hybrid_rlhf.runtime.observability.logs import logger

SPEED = "perf/tokens_per_second"
_STEPS_OF_ESTIMATE = 20


class StepDisplay:
    """Shows the progress of a loop."""

    def __init__(
        self,
        title: str,
        *,
        total_steps: int,
        done_steps: int = 0,
        every: int = 1,
        enabled: bool = True,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the contents of the display.

        Args:
            title: name of the loop.
            total_steps: steps of the whole run.
            done_steps: number of steps that earlier processes of the run have made.
            every: steps between two lines; the last step always has one.
            enabled: true if this rank shows anything.
            console: console of the bar; None: standard output, if it is a terminal.
            clock: function that returns seconds.
        """
        self._title = title
        self._total = total_steps
        self._every = every
        self._enabled = enabled
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=_STEPS_OF_ESTIMATE + 1)
        self._progress: Progress | None = None
        if enabled and (console is not None or sys.stdout.isatty()):
            fixed = Column(no_wrap=True)
            self._progress = Progress(
                TextColumn("[bold]{task.description}", table_column=fixed.copy()),
                BarColumn(bar_width=None),
                TextColumn("{task.completed:.0f}/{task.total:.0f}", table_column=fixed.copy()),
                TimeElapsedColumn(table_column=fixed.copy()),
                TextColumn("ETA {task.fields[left]}", table_column=fixed.copy()),
                TextColumn("{task.fields[figures]}", table_column=fixed.copy(), markup=False),
                console=console or Console(),
                expand=True,
            )
            self._task = self._progress.add_task(
                title, total=total_steps, completed=done_steps, left="-:--:--", figures=""
            )

    def __enter__(self) -> Self:
        self._ends.append(self._clock())
        with self._bar_dropped_on_error():
            if self._progress is not None:
                self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._bar_dropped_on_error():
            if self._progress is not None:
                self._progress.stop()

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a finished step; the bar shows the tokens per second and the first metric."""
        if not self._enabled:
            return
        self._ends.append(self._clock())
        seconds = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        left = format_clock(seconds * (self._total - step))
        if self._progress is not None:
            with self._bar_dropped_on_error():
                self._progress.update(self._task, completed=step, left=left, figures=_figures(metrics))
        if step % self._every == 0 or step == self._total:
            text = "  ".join(f"{name} {format_value(value)}" for name, value in metrics.items())
            logger.info("%s %d/%d  ETA %s  %s", self._title, step, self._total, left, text)

    @contextlib.contextmanager
    def _bar_dropped_on_error(self) -> Iterator[None]:
        """Context that continues without the bar if the terminal is closed."""
        try:
            yield
        except OSError as error:
            self._progress = None
            logger.info("the progress bar is no longer shown (%s)", error.strerror or type(error).__name__)


def _figures(metrics: Mapping[str, float]) -> str:
    """The tokens per second and the first metric of training, without its section."""
    speed = [f"{format_value(metrics[SPEED])} tokens/s"] if SPEED in metrics else []
    trained = {name: value for name, value in metrics.items() if name != SPEED and not name.startswith("eval/")}
    first = [f"{name.rpartition('/')[2]} {format_value(value)}" for name, value in trained.items()]
    return "  ".join([*speed, *first[:1]])
