"""Writes checkpoints of a training loop when they are due, and resumes from one.

Checkpoints are written every so many steps or minutes, and on a signal: SIGUSR1 saves, SIGTERM and SIGINT save and
stop.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from hybrid_rlhf.configs.parsing.listing import changed_keys
from hybrid_rlhf.configs.sections.training import CheckpointConfig
from hybrid_rlhf.engines.averaging import WeightAverage
from hybrid_rlhf.engines.role_model import RoleModel
from hybrid_rlhf.engines.saved.checkpoints import CheckpointWriter, LoopState, load_checkpoint
from hybrid_rlhf.engines.saved.training_state import state_of
from hybrid_rlhf.runtime.command_line import read_config
from hybrid_rlhf.runtime.files.checkpoint_folder import checkpoint_name, read_manifest
from hybrid_rlhf.runtime.liveness.signals import STOPPED_EXIT_CODE
from hybrid_rlhf.runtime.observability.logs import logger, shortened
from hybrid_rlhf.runtime.run import Run


class CheckpointManager:
    """Saves and restores the engines of a run and the state of its training loop."""

    def __init__(
        self,
        run: Run,
        config: CheckpointConfig,
        engines: Mapping[str, RoleModel],
        average: WeightAverage | None = None,
    ) -> None:
        """Take the run, the checkpoint settings, the engines by role, and the moving average of the actor's weights."""
        self._run = run
        self._world = run.world
        self._config = config
        self._states = {
            role: state_of(engine, average if role == "actor" else None) for role, engine in engines.items()
        }
        self._writer = CheckpointWriter(run.folder, self._states, run.world, config)
        self._interrupts = run.signals
        self._handled_saves = 0
        self._saved_at = time.monotonic()
        self._warned_of_missing_metric = False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context around the loop: handles signals, and completes pending writes at the end."""
        with self._interrupts.catch():
            yield
            self._writer.finish()

    def resume(self) -> LoopState | None:
        """Restore the engines from the run's checkpoint and return the state of the loop; None for a new run."""
        checkpoint = self._run.checkpoint
        if checkpoint is None:
            return None
        states = self._states
        manifest = read_manifest(checkpoint)
        if "reference" not in manifest["engines"]:  # checkpoints omit a reference that never changes
            states = {role: state for role, state in states.items() if role != "reference"}
        loop = load_checkpoint(checkpoint, states=states, world=self._world)
        if self._world.is_main:
            ranks = self._world.size
            before = manifest["world_size"]
            change_of_ranks = f" on {ranks} ranks instead of {before}" if ranks != before else ""
            logger.info("resumes from %s%s", checkpoint, change_of_ranks)
            old, new = manifest["config"], read_config(self._run.config)
            if changed := changed_keys(type(self._run.config), old, new):
                values = [f"{key} {_shown(new.get(key))} instead of {_shown(old.get(key))}" for key in changed]
                logger.warning("settings differ from those of the checkpoint: %s", ", ".join(values))
        return loop

    def after_step(self, step: int, loop: Callable[[], LoopState], metrics: Mapping[str, float]) -> None:
        """Save a checkpoint after a step if one is due or requested. Every rank calls.

        Args:
            step: number of the step.
            loop: returns the state of the loop.
            metrics: metrics of the step.

        Raises:
            OSError: when a checkpoint cannot be written.
            SystemExit: after the checkpoint that SIGTERM or SIGINT requested.
        """
        minutes = (time.monotonic() - self._saved_at) / 60
        is_due = 0 < self._config.save_minutes <= minutes or due(step, self._config.save_every)
        self._save_if_due(loop, metrics, is_due=is_due)

    def within_step(self, loop: Callable[[], LoopState]) -> None:
        """Save a checkpoint between two updates of a step if a signal requests one. Every rank calls.

        Raises:
            OSError: when a checkpoint cannot be written.
            SystemExit: after the checkpoint that SIGTERM or SIGINT requested.
        """
        self._save_if_due(loop, {}, is_due=False)

    def _save_if_due(self, loop: Callable[[], LoopState], metrics: Mapping[str, float], *, is_due: bool) -> None:
        """Save if a checkpoint is due, or a signal has reached any rank; stop if the signal asks for it."""
        if self._writer.pending is not None:
            self._writer.poll()
        signals = self._interrupts
        save = is_due or signals.saves > self._handled_saves
        flags = torch.tensor([float(signals.stop), float(save)], device=self._world.device)
        stop, save = self._world.all_reduce(flags, dist.ReduceOp.MAX).tolist()
        if not (stop or save):
            return
        state = loop()
        self._save(state, metrics)
        if not stop:
            return
        self._writer.finish()
        if self._world.is_main:
            name = checkpoint_name(state.step, state.update)
            logger.info("stopped by a signal after writing checkpoints/%s: resume with --resume auto", name)
        raise SystemExit(STOPPED_EXIT_CODE)

    def _save(self, state: LoopState, metrics: Mapping[str, float]) -> None:
        """Save the state of the loop, with the metrics of its last step; {} within a step."""
        best = self._config.best_metric
        if best is not None and best[1] not in metrics and state.update is None and not self._warned_of_missing_metric:
            self._warned_of_missing_metric = True
            if self._world.is_main:
                logger.warning(
                    "train.keep_best: step %d has no metric %s, so its checkpoint is not compared: evaluate and save "
                    "at the same steps",
                    state.step,
                    best[1],
                )
        phase = self._run.watchdog.phase
        self._run.watchdog.beat(f"save after step {state.step}")
        self._run.flush()
        self._writer.save(state, figures=metrics, config=read_config(self._run.checkpoint_config))
        # Every rank receives the signal: one that arrives in the meantime requests no second checkpoint.
        self._handled_saves = self._interrupts.saves
        self._saved_at = time.monotonic()
        self._run.watchdog.beat(phase)


def _shown(value: Any) -> str:
    """A value as in a config file, shortened."""
    return shortened(json.dumps(value, ensure_ascii=False))


def due(step: int, every: int) -> bool:
    """Return True if an action that runs every `every` steps runs after this one; 0 means never."""
    return every > 0 and step % every == 0
