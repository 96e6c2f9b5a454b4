"""The training loop that supervised and RL trainers share: steps, evaluations, metrics, advice, checkpoints.

Subclasses define the computation of a step, the evaluation, and the state in checkpoints besides the engines.
"""

from __future__ import annotations

import contextlib
import gc
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial

from hybrid_rlhf.configs.sections.training import LoopConfig
from hybrid_rlhf.engines.saved.checkpoints import LoopState
from hybrid_rlhf.loop.advice.advisor import Advisor
from hybrid_rlhf.loop.checkpointing import CheckpointManager, due
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.observability.metrics import read_metrics
from hybrid_rlhf.runtime.observability.profiling import describe_peaks, profiled
from hybrid_rlhf.runtime.run import Run


class Trainer(ABC):
    """Runs all steps of a run, from the start or from its checkpoint."""

    def __init__(
        self,
        name: str,
        *,
        total_steps: int,
        config: LoopConfig,
        run: Run,
        checkpoints: CheckpointManager,
        shown_metrics: tuple[str, ...],
    ) -> None:
        """Take the name, length, config and run, and the prefixes of the metrics shown on the console."""
        self.name = name
        self.total_steps = total_steps
        self._config = config
        self._run = run
        self._checkpoints = checkpoints
        self._world = run.world
        self._shown_metrics = shown_metrics
        self._advisor = Advisor()

    @abstractmethod
    def step(self, step: int) -> dict[str, float]:
        """Compute a step, counted from 1, and return its metrics. Every rank calls."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Metrics on held-out data; {} without any."""

    @abstractmethod
    def state(self, step: int) -> LoopState:
        """Return the state of the loop after a step, for a checkpoint."""

    @abstractmethod
    def resume(self) -> int | None:
        """Restore the run's checkpoint and return the last finished step; None for a new run."""

    @property
    def has_next(self) -> bool:
        """True if there is data for another step."""
        return True

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Context around all steps."""
        return contextlib.nullcontext()

    def train(self) -> None:
        """Run all remaining steps."""
        run = self._run
        done = self.resume()
        run.open_metrics(done)
        if self._world.is_main:  # the advice of the steps before a resumption is not repeated
            for line in read_metrics(run.folder):
                self._advisor.watch(line["step"], line)
            if peaks := describe_peaks(self._world.device):
                logger.info("%s", peaks)
        if done is None:
            before = self.evaluate()
            self._log(0, before)
            run.report(f"{self.name} before training", before)
        step = done or 0
        display = run.display(self.name, total_steps=self.total_steps, done_steps=step)
        with _without_scans(), self._checkpoints.running(), self.running(), display:
            while step < self.total_steps and self.has_next:
                step += 1
                with profiled(step, run.config.logging.profile_steps, run.folder, self._world):
                    metrics = self.step(step)
                is_last = step == self.total_steps or not self.has_next
                if is_last or due(step, self._config.eval_every):
                    metrics |= self.evaluate()
                self._log(step, metrics)
                display.show(step, self._shown(metrics))
                self._checkpoints.after_step(step, partial(self.state, step), metrics)

    def _shown(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics to show on the console, in the order of their prefixes."""
        return {
            name: value for prefix in self._shown_metrics for name, value in metrics.items() if name.startswith(prefix)
        }

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step, and log warnings of the advisor."""
        self._run.log(step, metrics)
        if self._world.is_main:
            for finding in self._advisor.watch(step, metrics):
                logger.warning("%s", finding)
                self._run.alert("advice", f"{finding.rule}: {finding.evidence}: {finding.advice}")


@contextlib.contextmanager
def _without_scans() -> Iterator[None]:
    """Context whose garbage collections do not scan the objects of before, such as those of torch and the models."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
