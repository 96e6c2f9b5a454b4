"""Sinks in the run folder: TensorBoard events, and a table."""

from __future__ import annotations

import csv
import functools
import io
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_rlhf.runtime.files.atomic import write_whole
from hybrid_rlhf.runtime.observability.sinks.sink import EndState, MetricsSink, TrackedRun

CSV_FILE = "metrics.csv"


class TensorBoardSink(MetricsSink):
    """Events in the folder tensorboard; a resumed run marks later ones as superseded."""

    module = "tensorboard"
    title = "TensorBoard"

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        _print_no_errors_of_tensorboard()  # before its thread starts
        self._events = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.resumed_step + 1)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write each metric as a scalar event."""
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step)

    def close(self, end_state: EndState) -> None:
        """Close the file of events."""
        self._events.close()


@functools.cache
def _print_no_errors_of_tensorboard() -> None:
    """Print no traceback of an OSError in TensorBoard's thread: the next write raises it again."""
    print_error = threading.excepthook

    def hook(error: threading.ExceptHookArgs) -> None:
        if not (type(error.thread).__module__.startswith("tensorboard") and isinstance(error.exc_value, OSError)):
            print_error(error)

    threading.excepthook = hook


class CsvSink(MetricsSink):
    """metrics.csv: a row per step, a column per metric; empty where a step lacks the metric."""

    module = "csv"
    title = "metrics.csv"

    def __init__(self, run: TrackedRun) -> None:
        self._path = run.folder / CSV_FILE
        rows = _read(self._path)
        earlier = [row for row in rows if int(row["step"]) <= run.resumed_step]
        self._columns = list(rows[0]) if rows else ["step"]
        self._write_all(earlier)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a row; a new metric adds a column, which rewrites the file."""
        row = {"step": step, **metrics}
        new = [name for name in row if name not in self._columns]
        if new:
            self._columns += new
            self._write_all([*_read(self._path), row])
            return
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerow(row)

    def close(self, end_state: EndState) -> None:
        """Do nothing: every row has been written."""

    def _write_all(self, rows: list[dict[str, Any]]) -> None:
        text = io.StringIO(newline="")
        table = csv.DictWriter(text, self._columns)
        table.writeheader()
        table.writerows(rows)
        write_whole(self._path, text.getvalue())


def _read(path: Path) -> list[dict[str, Any]]:
    """The complete rows of a table; [] without one. A crash may have cut the last line."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline="")))
