"""The interface of a sink, and the thread of each sink.

A tracker may wait minutes for its server, so a step only puts its metrics into a queue. A sink that fails is logged
once and then disabled; metrics.jsonl has the same values.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from hybrid_rlhf.configs.credentials import redacted
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.run import SinkName
from hybrid_rlhf.runtime.background import BackgroundQueue
from hybrid_rlhf.runtime.files.atomic import write_whole
from hybrid_rlhf.runtime.files.reading import stored_object
from hybrid_rlhf.runtime.observability.logs import logger

EndState = Literal["finished", "stopped", "failed", "stalled"]
"""How a run ended; a stopped run was ended by a signal, and can be resumed."""
IDS_FILE = "sinks.json"
"""Ids of the run in its trackers, by sink, with which a resumed run continues them."""
CLOSE_SECONDS = 30.0
"""Time for which the end of a run waits for a sink."""
_ids_lock = threading.Lock()


@dataclass(frozen=True)
class TrackedRun:
    """Properties of a run that a sink needs."""

    folder: Path
    project: str = "hybrid_rlhf"
    name: str = "run"
    params: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys of the config, with plain values."""
    resumed_step: int = -1
    """Step after which lines of metrics.jsonl were dropped; -1: all were dropped."""
    run_id: str | None = None
    """Id of the run in the tracker, if an earlier start has opened it."""


class MetricsSink(ABC):
    """A destination of metrics; all calls come from the same thread."""

    module: ClassVar[str]
    """Name of the module that the sink imports."""
    title: ClassVar[str]

    @abstractmethod
    def __init__(self, run: TrackedRun) -> None:
        """Open the sink, and continue the run with `run.run_id`."""

    run_id: str | None = None
    """Id for the next start of the same run."""

    @abstractmethod
    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step; values may be NaN or infinite."""

    @abstractmethod
    def close(self, end_state: EndState) -> None:
        """Write pending metrics, and mark the run as ended."""


class SinkThread:
    """Opens a sink and writes to it in a thread; raises nothing."""

    def __init__(self, kind: type[MetricsSink], run: TrackedRun) -> None:
        self._kind = kind
        self._run = run
        self._sink: MetricsSink | None = None
        self._queue: BackgroundQueue[Callable[[MetricsSink], None]] = BackgroundQueue(
            self._handle, name=kind.title, on_error=self._give_up
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step to the queue."""
        values = dict(metrics)
        self._queue.put(lambda sink: sink.write(step, values))

    def close(self, end_state: EndState, *, within_seconds: float = CLOSE_SECONDS) -> None:
        """Wait until everything is written, for a limited time."""
        self._queue.put(lambda sink: sink.close(end_state))
        if left := self._queue.close(within_seconds):
            logger.warning("%s does not answer: it lacks the last %d entries", self._kind.title, left)

    def _handle(self, call: Callable[[MetricsSink], None]) -> None:
        if self._sink is None:
            self._sink = self._kind(self._run)
            _keep_id(self._run.folder, self._kind.module, self._sink.run_id)
        call(self._sink)

    def _give_up(self, error: Exception) -> None:
        logger.warning(
            "%s is %s written, metrics.jsonl has all metrics (%s: %s)",
            self._kind.title,
            "not" if self._sink is None else "no longer",
            type(error).__name__,
            redacted(" ".join(str(error).split()))[:300],
        )


def require_installed(kinds: Mapping[SinkName, type[MetricsSink]], names: Sequence[SinkName]) -> None:
    """Refuse sinks whose package is missing, before anything is loaded.

    Raises:
        UserError: with the command that installs it.
    """
    for name in names:
        if importlib.util.find_spec(kinds[name].module) is None:
            raise UserError(
                f"logging.sinks {name} needs the package {kinds[name].module}, which is not installed: "
                f"pip install 'hybrid_rlhf[{name}]'"
            )


def read_ids(folder: Path) -> dict[str, str]:
    """Ids of the run in its trackers; {} if there are none yet."""
    return stored_object(folder / IDS_FILE)


def _keep_id(folder: Path, module: str, run_id: str | None) -> None:
    with _ids_lock:
        if run_id is not None and read_ids(folder).get(module) != run_id:
            write_whole(folder / IDS_FILE, json.dumps({**read_ids(folder), module: run_id}) + "\n")
