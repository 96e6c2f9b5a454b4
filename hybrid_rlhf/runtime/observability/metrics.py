"""Metrics of a run: metrics.jsonl and the sinks of `logging.sinks`.

Only rank 0 writes. A line of metrics.jsonl is a JSON object with `step`, `time_seconds` and one entry per metric; a
value that is not finite is null. A sink that fails is logged once and does not end the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybrid_rlhf.configs.sections.run import SinkName
from hybrid_rlhf.runtime.files.json_lines import JsonLinesFile, drop_lines_after, read_lines
from hybrid_rlhf.runtime.files.names import METRICS_FILE
from hybrid_rlhf.runtime.observability.sinks.files import CsvSink, TensorBoardSink
from hybrid_rlhf.runtime.observability.sinks.sink import EndState, MetricsSink, SinkThread, TrackedRun, read_ids
from hybrid_rlhf.runtime.observability.sinks.trackers import MlflowSink, TrackioSink, WandbSink

SINKS: dict[SinkName, type[MetricsSink]] = {
    "tensorboard": TensorBoardSink,
    "csv": CsvSink,
    "wandb": WandbSink,
    "mlflow": MlflowSink,
    "trackio": TrackioSink,
}
"""Sinks by their names in the config."""


class MetricsWriter:
    """Writes the metrics of each step to a folder."""

    def __init__(
        self,
        folder: Path,
        *,
        sinks: Sequence[SinkName] = (),
        tracked: TrackedRun | None = None,
        resumed_step: int = 0,
    ) -> None:
        """Open the sinks.

        Args:
            folder: run folder.
            sinks: sinks besides metrics.jsonl.
            tracked: the run's name and project in sinks; None: its folder.
            resumed_step: drop later lines, written by an interrupted run.

        Raises:
            OSError: if later lines cannot be dropped.
        """
        drop_lines_after(folder / METRICS_FILE, resumed_step)
        earlier = read_lines(folder / METRICS_FILE)
        self._lines = JsonLinesFile(folder / METRICS_FILE)
        # Interruptions do not count.
        self._start = time.monotonic() - (earlier[-1]["time_seconds"] if earlier else 0.0)
        tracked = replace(tracked or TrackedRun(folder), resumed_step=resumed_step)
        ids = read_ids(folder)
        self._sinks = [SinkThread(SINKS[name], replace(tracked, run_id=ids.get(SINKS[name].module))) for name in sinks]

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line."""
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        seconds = round(time.monotonic() - self._start, 3)
        self._lines.append([{"step": step, "time_seconds": seconds, **values}])
        for sink in self._sinks:
            sink.write(step, metrics)

    def flush(self) -> None:
        """Flush metrics.jsonl to disk: a checkpoint must not be ahead of it."""
        self._lines.flush()

    def close(self, end_state: EndState = "finished") -> None:
        """Write pending lines and close the sinks; a second call does nothing."""
        self._lines.close()
        sinks = self._sinks
        self._sinks = []
        for sink in sinks:
            sink.close(end_state)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl up to the first incomplete one; null becomes NaN."""
    lines = read_lines(folder / METRICS_FILE)
    return [{name: math.nan if value is None else value for name, value in line.items()} for line in lines]
