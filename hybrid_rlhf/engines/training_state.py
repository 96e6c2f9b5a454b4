"""All that an engine needs to go on: fragments, schedule, loss scale, and the moving average of its weights.

Frozen weights of an engine that learns are not among them: they come from the model's own folder, as at the start.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from hybrid_rlhf.engines.averaging import WeightAverage
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.engines.fragment_files import SavedFragments, named_tensors
from hybrid_rlhf.engines.fragments import (
    WEIGHT,
    Fragment,
    held,
    optimizer_steps,
    parameter_fragments,
    set_optimizer_steps,
    training_fragments,
    weights_from_fragments,
)

_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")


class TrainingState:
    """Reads and writes the state of one engine; of a frozen one, its weights."""

    def __init__(self, engine: ModelEngine, average: WeightAverage | None = None) -> None:
        """Take the engine, and the moving average of its weights if there is one."""
        self._world, self._average = engine.world, average
        self._module, self._engine = engine.module, engine.deepspeed_engine
        self._learns = engine.learns

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What this rank writes, by name; views of memory that training goes on to change."""
        return named_tensors(fragment.share(self._world) for fragment in self._fragments())

    def numbers(self) -> dict[str, Any]:
        """What is the same on every rank; JSON."""
        if not self._learns:
            return {}
        engine = self._engine
        schedule: Any = engine.lr_scheduler
        scaler = _loss_scaler(engine)
        return {
            "zero_stage": int(engine.zero_optimization_stage()),
            "optimizer_steps": optimizer_steps(engine),
            "schedule": {"last_epoch": schedule.last_epoch, "lrs": schedule.get_last_lr()},
            "counters": {name: getattr(engine, name) for name in _COUNTERS},
            "loss_scale": {name: getattr(scaler, name) for name in _SCALER if hasattr(scaler, name)},
        }

    def restore(self, files: list[Path], numbers: dict[str, Any]) -> None:
        """Put back what any number of ranks in any ZeRO stage wrote; every rank must call.

        Raises:
            UserError: when the files are of another model.
        """
        SavedFragments(files).fill(self._fragments())
        if self._learns:
            weights_from_fragments(self._engine)
            set_optimizer_steps(self._engine, numbers["optimizer_steps"])
            _restore_numbers(self._engine, numbers)

    def _fragments(self) -> Iterator[Fragment]:
        if self._learns:
            yield from training_fragments(self._engine)
        else:
            named = list(self._module.named_parameters())
            yield from parameter_fragments(named, (held(p) for _, p in named), kind=WEIGHT, world=self._world)
        if self._average is not None:
            yield from self._average.fragments(self._world)


def _restore_numbers(engine: DeepSpeedEngine, numbers: dict[str, Any]) -> None:
    schedule: Any = engine.lr_scheduler
    schedule.last_epoch = numbers["schedule"]["last_epoch"]
    schedule._step_count = schedule.last_epoch + 1
    schedule._last_lr = list(numbers["schedule"]["lrs"])
    for group, lr in zip(engine.optimizer.param_groups, schedule._last_lr, strict=True):
        group["lr"] = lr
    for name, value in numbers["counters"].items():
        setattr(engine, name, value)
    scaler = _loss_scaler(engine)
    for name, value in numbers["loss_scale"].items():
        if hasattr(scaler, name):
            setattr(scaler, name, value)


def _loss_scaler(engine: DeepSpeedEngine) -> Any:
    """What holds the scale of float16, under DeepSpeed's name for it with ZeRO or without; none: nothing does."""
    return getattr(engine.optimizer, "loss_scaler", getattr(engine.optimizer, "loss_scale_config", None))
