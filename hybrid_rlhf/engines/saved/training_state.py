"""State that an engine needs to resume: fragments, schedule, loss scale, and the moving average of its weights.

The frozen weights of a trained model are not included: they are loaded from the model folder, as at the start.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.engines.averaging import WeightAverage
from hybrid_rlhf.engines.deepspeed_internals import (
    copy_master_weights_to_model,
    counters,
    loss_scale,
    set_counters,
    set_loss_scale,
)
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.engines.role_model import RoleModel
from hybrid_rlhf.engines.saved.fragments import (
    has_eight_bits,
    local_values,
    named_tensors,
    optimizer_steps,
    parameter_fragments,
    set_optimizer_steps,
    training_fragments,
)
from hybrid_rlhf.models.fragment_files import WEIGHT, Fragment, SavedFragments


class TrainingState:
    """Reads and writes the state of one engine; for a frozen engine, its weights."""

    def __init__(self, engine: ModelEngine, average: WeightAverage | None = None) -> None:
        """Args: the engine, and the moving average of its weights if there is one."""
        self.world = engine.world
        self._average = average
        self._model = engine

    @property
    def _engine(self) -> DeepSpeedEngine:
        return self._model.deepspeed_engine

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that this rank writes, by name, as views of memory that training changes."""
        return named_tensors(fragment.share for fragment in self._fragments())

    def numbers(self) -> dict[str, Any]:
        """Return the state that is the same on every rank, as JSON values."""
        if not self._model.is_trained:
            return {}
        engine = self._engine
        schedule: Any = engine.lr_scheduler
        return {
            "ranks": self.world.size,
            "zero_stage": int(engine.zero_optimization_stage()),
            "optimizer_steps": optimizer_steps(engine),
            "schedule": {"last_epoch": schedule.last_epoch},
            "counters": counters(engine),
            "loss_scale": loss_scale(engine),
        }

    def restore(self, files: list[Path], numbers: dict[str, Any]) -> None:
        """Restore a state written by any number of ranks in any ZeRO stage. Every rank must make this call.

        Raises:
            UserError: when the files belong to another model, or to other ranks than moments in 8 bits need.
        """
        if self._model.is_trained and has_eight_bits(self._engine):
            written, found = ((given["ranks"], given["zero_stage"]) for given in (numbers, self.numbers()))
            if written != found:
                raise UserError(
                    "optimizer.name adamw_8bit resumes with the number of ranks and the ZeRO stage of the checkpoint, "
                    f"{written[0]} and {written[1]}, got {found[0]} and {found[1]}: use those"
                )
        SavedFragments(files).fill(self._fragments())
        if self._model.is_trained:
            copy_master_weights_to_model(self._engine)
            set_optimizer_steps(self._engine, numbers["optimizer_steps"])
            _restore_numbers(self._engine, numbers)

    def _fragments(self) -> Iterator[Fragment]:
        if self._model.is_trained:
            yield from training_fragments(self._engine, self.world)
        else:
            named = list(self._model.module.named_parameters())
            yield from parameter_fragments(named, (local_values(p) for _, p in named), kind=WEIGHT, world=self.world)
        if self._average is not None:
            yield from self._average.fragments(self.world)


def _restore_numbers(engine: DeepSpeedEngine, numbers: dict[str, Any]) -> None:
    schedule: Any = engine.lr_scheduler
    schedule.last_epoch = numbers["schedule"]["last_epoch"]
    schedule._step_count = schedule.last_epoch + 1
    # computed and not stored: the optimizer has other groups where other ranks split experts
    schedule._last_lr = [
        lr * factor(schedule.last_epoch) for lr, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    ]
    for group, lr in zip(engine.optimizer.param_groups, schedule._last_lr, strict=True):
        group["lr"] = lr
    set_counters(engine, numbers["counters"])
    set_loss_scale(engine, numbers["loss_scale"])


class AbsentState:
    """Replaces TrainingState on a rank without the engine: writes nothing, restores only the weight version."""

    def __init__(self, engine: RoleModel) -> None:
        self.world = engine.world
        self._engine = engine

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Return no tensors."""
        return iter(())

    def numbers(self) -> dict[str, Any]:
        """Return no numbers."""
        return {}

    def restore(self, files: list[Path], numbers: dict[str, Any]) -> None:
        """Restore the weight version."""
        self._engine.note_version(numbers.get("counters", {}).get("global_steps", 0))


AnyState = TrainingState | AbsentState


def state_of(engine: RoleModel, average: WeightAverage | None = None) -> AnyState:
    """Return the state of an engine; a placeholder on a rank without the engine."""
    return TrainingState(engine, average) if isinstance(engine, ModelEngine) else AbsentState(engine)
