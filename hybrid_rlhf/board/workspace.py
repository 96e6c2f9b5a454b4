"""What one board has open: its runs with their curves and samples, jobs, preferences, chats."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hybrid_rlhf.board.events import EventHub, Watcher
from hybrid_rlhf.board.runs.folders import RunFolder, RunFolders
from hybrid_rlhf.board.runs.metrics import MetricsFile
from hybrid_rlhf.board.runs.summary import RunSummaries
from hybrid_rlhf.board.samples.rows import Samples, token_texts_of
from hybrid_rlhf.configs.commands.board import BoardConfig
from hybrid_rlhf.runtime.files.names import METRICS_FILE

_MOST_OPEN = 16
"""Runs whose curves are kept in memory."""
OpenT = TypeVar("OpenT")


class Workspace:
    """The state of a board; may be used by several threads."""

    def __init__(self, config: BoardConfig) -> None:
        """Take the settings.

        Raises:
            UserError: if a folder is missing.
        """
        self.folders = RunFolders([Path(folder) for folder in config.folders])
        self.summaries, self.hub = RunSummaries(), EventHub()
        self._metrics: OrderedDict[str, MetricsFile] = OrderedDict()
        self._samples: OrderedDict[str, Samples] = OrderedDict()
        self._token_texts = token_texts_of(self._tokenizer_files)
        self._lock = threading.Lock()
        self._watcher = Watcher(self.folders, self.hub, self._index_on)

    def open(self) -> None:
        """Begin to watch; called on the loop of the server."""
        self.hub.open()
        self._watcher.start()

    def close(self) -> None:
        """Stop what runs."""
        self._watcher.close()
        for samples in self._samples.values():
            samples.index.close()

    def metrics(self, run: RunFolder) -> MetricsFile:
        """The curves of a run, up to date."""
        metrics = self._kept(self._metrics, run, lambda: MetricsFile(run.folder / METRICS_FILE))
        metrics.update()
        return metrics

    def samples(self, run: RunFolder) -> Samples:
        """The samples of a run."""
        return self._kept(self._samples, run, lambda: Samples(run, self._token_texts), most=None)

    def _kept(
        self, opened: OrderedDict[str, OpenT], run: RunFolder, make: Callable[[], OpenT], most: int | None = _MOST_OPEN
    ) -> OpenT:
        with self._lock:
            if run.id not in opened:
                opened[run.id] = make()
            opened.move_to_end(run.id)
            while most is not None and len(opened) > most:
                opened.popitem(last=False)
            return opened[run.id]

    def _index_on(self) -> bool:
        """Index new samples of the runs that someone has looked at."""
        with self._lock:
            opened = list(self._samples.values())
        return any([samples.index.update(0.3) for samples in opened])

    def _tokenizer_files(self, run: RunFolder) -> list[Path]:
        """Where the tokenizer of a run may lie."""
        config: dict[str, Any] = self.summaries.config(run)[0]
        model = config.get("model")
        path = model.get("path") if isinstance(model, dict) else None
        folders = [run.folder / "actor", run.folder, *([Path(path)] if isinstance(path, str) else [])]
        return [folder / "tokenizer.json" for folder in folders]
