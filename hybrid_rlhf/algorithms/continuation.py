"""When a loop saves, and how it goes on: after so many steps or minutes, on a signal, and from a checkpoint."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hybrid_rlhf.configs.cli import read_config
from hybrid_rlhf.configs.resuming import changed_keys
from hybrid_rlhf.configs.sections import CheckpointConfig
from hybrid_rlhf.engines.averaging import WeightAverage
from hybrid_rlhf.engines.checkpoints import CheckpointWriter, LoopState, load_checkpoint
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.engines.training_state import TrainingState
from hybrid_rlhf.runtime.checkpoint_folder import checkpoint_name, read_manifest
from hybrid_rlhf.runtime.interrupts import STOPPED_EXIT_CODE, Interrupts
from hybrid_rlhf.runtime.logs import LOGGER_NAME
from hybrid_rlhf.runtime.run import Run

logger = logging.getLogger(LOGGER_NAME)


@dataclass(frozen=True)
class _Wishes:
    """What any rank wants by now, known to all."""

    stop: bool
    save: bool


class Continuation:
    """Saves the engines of a run with the state of its loop, and brings them back."""

    def __init__(
        self,
        run: Run,
        config: CheckpointConfig,
        engines: Mapping[str, ModelEngine],
        average: WeightAverage | None = None,
    ) -> None:
        """Take the run, when it saves, and what by role; the average is the actor's."""
        self._run, self._world, self._config = run, run.world, config
        self._states = {
            role: TrainingState(engine, average if role == "actor" else None) for role, engine in engines.items()
        }
        self._writer = CheckpointWriter(run.folder, self._states, run.world, config)
        self._interrupts = Interrupts()
        self._answered_saves = 0
        self._saved_at = time.monotonic()
        self._told_no_figure = False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around the loop: signals are heeded, and what is still being written is made whole at its end."""
        with self._interrupts.caught():
            yield
            self._writer.finish()

    def resume(self) -> LoopState | None:
        """Put back what the run goes on from, and return the loop's part; none: it starts."""
        checkpoint = self._run.checkpoint
        if checkpoint is None:
            return None
        states = self._states
        manifest = read_manifest(checkpoint)
        if "reference" not in manifest["engines"]:  # it had never changed
            states = {role: state for role, state in states.items() if role != "reference"}
        loop = load_checkpoint(checkpoint, states=states, world=self._world)
        if self._world.is_main:
            ranks, before = self._world.size, manifest["world_size"]
            other = f", on {ranks} ranks in place of {before}" if ranks != before else ""
            logger.info("goes on from %s%s", checkpoint, other)
            if changed := changed_keys(manifest["config"], read_config(self._run.config)):
                logger.warning("settings differ from the checkpoint's: %s", ", ".join(changed))
        return loop

    def after_step(self, step: int, loop: Callable[[], LoopState], figures: Mapping[str, float]) -> None:
        """Save where it is time; every rank calls, with the state after a step and its metrics.

        Raises:
            OSError: when a checkpoint cannot be written.
            SystemExit: after the checkpoint that SIGTERM asked for.
        """
        self._writer.poll()
        wishes = self._wishes()
        if wishes.save or wishes.stop or due(step, self._config.save_every):
            state = loop()
            self._save(state, figures)
            self._stop_if(wishes, state)

    def within_step(self, loop: Callable[[], LoopState]) -> None:
        """Save a half-used rollout where a signal asks; every rank calls, between two updates.

        Raises:
            OSError: when a checkpoint cannot be written.
            SystemExit: after the checkpoint that SIGTERM asked for.
        """
        self._writer.poll()
        wishes = self._wishes(minutes=False)
        if wishes.save or wishes.stop:
            state = loop()
            self._save(state, {})
            self._stop_if(wishes, state)

    def _wishes(self, *, minutes: bool = True) -> _Wishes:
        asked = self._interrupts
        due = minutes and 0 < self._config.save_minutes <= (time.monotonic() - self._saved_at) / 60
        save = asked.saves > self._answered_saves or due
        flags = torch.tensor([float(asked.stop), float(save)], device=self._world.device)
        stop, save = self._world.all_reduce(flags, dist.ReduceOp.MAX).tolist()
        return _Wishes(bool(stop), bool(save))

    def _save(self, state: LoopState, figures: Mapping[str, float]) -> None:
        best = self._config.best_metric
        if best is not None and best[1] not in figures and state.update is None and not self._told_no_figure:
            self._told_no_figure = True
            if self._world.is_main:
                logger.warning(
                    "train.keep_best: step %d has no metric %s, so its checkpoint is not compared: evaluate and save "
                    "at the same steps", state.step, best[1],
                )  # fmt: skip
        phase = self._run.watchdog.phase
        self._run.watchdog.beat(f"save after step {state.step}")
        self._run.flush()
        self._writer.save(state, figures=figures, config=read_config(self._run.resumable_config))
        # A signal that comes meanwhile, as where all ranks are sent one, asks for nothing that is not in this save.
        self._answered_saves, self._saved_at = self._interrupts.saves, time.monotonic()
        self._run.watchdog.beat(phase)

    def _stop_if(self, wishes: _Wishes, state: LoopState) -> None:
        if not wishes.stop:
            return
        self._writer.finish()
        if self._world.is_main:
            name = checkpoint_name(state.step, state.update)
            logger.info("stopped by SIGTERM, all is in checkpoints/%s: go on with --resume auto", name)
        raise SystemExit(STOPPED_EXIT_CODE)


def due(step: int, every: int) -> bool:
    """Whether what is done every so many steps is done after this one; 0: never."""
    return every > 0 and step % every == 0
