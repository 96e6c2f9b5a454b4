"""The open resources of a board: its runs with their curves and samples, jobs, preferences, chats."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hybrid_rlhf.board.chat import Chats
from hybrid_rlhf.board.events import EventHub, Watcher
from hybrid_rlhf.board.preferences import Preferences
from hybrid_rlhf.board.processes.estimates import Estimates
from hybrid_rlhf.board.processes.jobs import Jobs
from hybrid_rlhf.board.processes.presets import Presets
from hybrid_rlhf.board.processes.training import Training, world_size
from hybrid_rlhf.board.runs.folders import RunFolder, RunFolders
from hybrid_rlhf.board.runs.metrics import MetricsFile
from hybrid_rlhf.board.runs.models import SavedModels
from hybrid_rlhf.board.runs.reading import file_problem
from hybrid_rlhf.board.runs.summary import RunSummaries
from hybrid_rlhf.board.runs.tokens import RunTokens
from hybrid_rlhf.board.samples.index import SampleIndex
from hybrid_rlhf.board.samples.lines import last_text, prompt_messages
from hybrid_rlhf.board.samples.rows import Samples
from hybrid_rlhf.board.signals import SampledStep, Signal, find_signals
from hybrid_rlhf.configs.commands.board import BoardConfig
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.files.names import METRICS_FILE, SAMPLES_FILE

_MOST_OPEN = 16
"""Number of runs whose curves, samples and plans are kept in memory."""
_SIGNAL_LINES = 20_000
"""Number of steps whose metrics are read for signals, spread over a longer run: each is an object."""
_SIGNAL_STEPS = 12
"""Number of steps whose samples are examined."""
_SIGNAL_TEXTS = 64
"""Number of completions of a step that are read."""
OpenT = TypeVar("OpenT")


class BoardWorkspace:
    """The state of a board; may be used by several threads."""

    def __init__(self, config: BoardConfig, chats: Chats) -> None:
        """Take the settings, and the models of chats.

        Raises:
            UserError: if a folder is missing.
        """
        self.folders = RunFolders([Path(folder) for folder in config.folders])
        self.summaries = RunSummaries()
        self.hub = EventHub()
        self.jobs = Jobs(self.hub)
        self.estimates = Estimates()
        self.chats = chats
        self.training = Training(self.folders, self.summaries)
        self.presets = Presets(self.folders, self.summaries)
        self.models = SavedModels(self.folders, self.summaries, config.models)
        self.preferences = Preferences(self.folders.roots[0])
        self._run_estimates = Estimates()  # a form's end each other
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="board-plans")
        self._plans: OrderedDict[str, dict[str, float] | None] = OrderedDict()
        self._metrics: OrderedDict[str, MetricsFile] = OrderedDict()
        self._samples: OrderedDict[str, Samples] = OrderedDict()
        self._lock = threading.Lock()
        self._watcher = Watcher(self.folders, self.hub, self._index_on, self.training.is_alive)

    def open(self) -> None:
        """Start to watch; called on the event loop of the server."""
        self.hub.open()
        self._watcher.start()

    def close(self) -> None:
        """Stop all threads and processes, except runs."""
        self._watcher.close()
        self._planner.shutdown(wait=False, cancel_futures=True)
        self.estimates.close()
        self._run_estimates.close()
        self.jobs.close()
        self.chats.close()

    def metrics(self, run: RunFolder) -> MetricsFile:
        """The curves of a run, updated."""
        metrics = self._kept(self._metrics, run, lambda: MetricsFile(run.folder / METRICS_FILE))
        metrics.update()
        return metrics

    def samples(self, run: RunFolder) -> Samples:
        """The samples of a run.

        Raises:
            UserError: if their file is a link or another file that the board does not open.
        """
        if (problem := file_problem(run.folder / SAMPLES_FILE)) is not None:
            raise UserError(f"{run.name}: {problem}")
        return self._kept(
            self._samples, run, lambda: Samples(run, RunTokens(run.folder, lambda: self._tokenizer_files(run)))
        )

    def memory_plan(self, run: RunFolder) -> dict[str, float] | None:
        """Planned GiB of each phase; None until the plan is made, or if it cannot be made."""

        def begin() -> None:
            self._planner.submit(self._plan, run)

        return self._kept(self._plans, run, begin)

    def _plan(self, run: RunFolder) -> None:
        summary = self.summaries.summary(run)
        (config, _) = self.summaries.config(run)
        if summary["command"] is None or summary["model"] is None:
            return
        with contextlib.suppress(UserError):  # a model that is no longer here
            plan = self._run_estimates.plan(summary["command"], {**config, "resume": "never"}, world_size(run.folder))
            with self._lock:
                if run.id in self._plans:
                    self._plans[run.id] = {phase["phase"]: phase["gib"] for phase in plan["memory"]}
            self.hub.publish("runs", {})

    def signals(self, run: RunFolder) -> list[Signal]:
        """The signs of a run that a person should look at."""
        metrics = self.metrics(run)
        steps, _, columns = metrics.columns(metrics.names())
        rows = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), _SIGNAL_LINES)).astype(int))
        lines = [
            {"step": int(steps[row])}
            | {name: column[row] for name, column in columns.items() if np.isfinite(column[row])}
            for row in rows
        ]
        return find_signals(lines, self._sampled(run))

    def _sampled(self, run: RunFolder) -> list[SampledStep]:
        """Steps with samples, the first and the last among them, with some texts of each."""
        sampled = []
        with self.samples(run).view() as view:
            index = view.column("position")
            steps = np.unique(view.column("step"))
            for place in np.unique(np.linspace(0, len(steps) - 1, min(len(steps), _SIGNAL_STEPS)).astype(int)):
                rows = np.flatnonzero(view.column("step") == steps[place])
                # spread over the step, as its first rows may belong to few prompts
                rows = rows[np.linspace(0, len(rows) - 1, min(len(rows), _SIGNAL_TEXTS)).astype(int)]
                lines = view.lines(rows)
                texts = [str(line["completion"]) for line in lines]
                prompts = [last_text(prompt_messages(line)) for line in lines]
                count = len(np.unique(view.column("prompt")[rows]))
                sampled.append(SampledStep(int(steps[place]), index[rows].astype(int), texts, prompts, count))
        return sampled

    def forget(self, run: RunFolder) -> None:
        """Close a run that was deleted, and remove its index."""
        with self._lock:
            self._metrics.pop(run.id, None)
            self._plans.pop(run.id, None)
            samples = self._samples.pop(run.id, None)
        (samples.index if samples else SampleIndex(run)).remove()

    def _kept(self, opened: OrderedDict[str, OpenT], run: RunFolder, make: Callable[[], OpenT]) -> OpenT:
        with self._lock:
            if run.id not in opened:
                opened[run.id] = make()
            opened.move_to_end(run.id)
            while len(opened) > _MOST_OPEN:
                opened.popitem(last=False)
            return opened[run.id]

    def _index_on(self) -> bool:
        """Index new samples of the runs that a client has opened."""
        with self._lock:
            opened = list(self._samples.values())
        return any([samples.index.update(0.3) for samples in opened])

    def _tokenizer_files(self, run: RunFolder) -> list[Path]:
        """Possible files of a run's tokenizer."""
        config: dict[str, Any] = self.summaries.config(run)[0]
        model = config.get("model")
        path = model.get("path") if isinstance(model, dict) else None
        folders = [run.folder / "actor", run.folder, *([Path(path)] if isinstance(path, str) else [])]
        return [folder / "tokenizer.json" for folder in folders]
