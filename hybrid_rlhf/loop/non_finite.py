"""Steps with NaN or infinite values: skipped on all ranks, counted, and their rows written out.

A skipped step leaves weights, optimizer and statistics unchanged. After several skipped steps in a row the run stops,
because such a run does not recover.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.run import Run
from hybrid_rlhf.runtime.world import World

FOLDER = "nonfinite"
Row = TypeVar("Row")


class NonFiniteError(Exception):
    """A rollout has values that are not finite; raised on every rank."""

    def __init__(self, what: Sequence[str]) -> None:
        super().__init__(", ".join(what))
        self.what = what


def non_finite_rows(tensors: Mapping[str, Tensor], *, mask: Tensor) -> dict[str, list[int]]:
    """Rows with a value under the mask that is not finite, by name of tensors [N] or [N, T]; only for faulty
    tensors."""
    faulty_rows = {}
    for name, values in tensors.items():
        faulty = ~values.isfinite()
        if values.dim() == 2:
            faulty = (faulty & mask).any(dim=1)
        rows: list[int] = faulty.nonzero().flatten().tolist()
        if rows:
            faulty_rows[name] = rows
    return faulty_rows


def rows_with_non_finite_loss(
    micro_batches: Sequence[Sequence[Row | None]], losses: Sequence[Tensor], *, world: World
) -> list[Row]:
    """Rows of this rank's micro-batches whose loss is not finite; all rows if the losses of all ranks of `world` are
    finite, and only the gradient is not. Every rank of `world` calls."""
    faulty = [rows for rows, loss in zip(micro_batches, losses, strict=True) if not loss.isfinite()]
    if not any(world.all_gather_objects(bool(faulty))):
        faulty = list(micro_batches)
    return [row for rows in faulty for row in rows if row is not None]


def json_numbers(values: Tensor) -> list[float | None]:
    """Values [N] as rounded JSON numbers; None for those that are not finite."""
    return [round(value, 4) if math.isfinite(value) else None for value in values.tolist()]


class SkippedUpdates:
    """Counts skipped steps; the same on every rank."""

    def __init__(self, run: Run, *, limit: int) -> None:
        """Take the run, and the number of skipped steps in a row that stops it; 0: no limit."""
        self._run = run
        self._limit = limit
        self._total = self._in_a_row = 0

    def keep(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """Append rows of this rank that caused a skipped step to the nonfinite folder of the run."""
        if rows:
            file = self._run.folder / FOLDER / f"rank_{self._run.world.rank:05}.jsonl"
            file.parent.mkdir(exist_ok=True)
            with file.open("a", encoding="utf-8") as lines:
                lines.writelines(json.dumps({"step": step, **row}, default=str) + "\n" for row in rows)

    def record(self, step: int, what: Sequence[str]) -> dict[str, float]:
        """Count a step as skipped or not. Every rank calls, with the same arguments.

        Args:
            step: number of the step.
            what: names of the values that are not finite; empty if the step is not skipped.

        Returns:
            metrics; {} while no step of the run has been skipped.

        Raises:
            UserError: when too many steps in a row are skipped.
        """
        self._in_a_row = self._in_a_row + 1 if what else 0
        self._total += bool(what)
        if what:
            names = " and ".join(what)
            folder = self._run.folder / FOLDER
            if self._run.world.is_main:
                logger.warning("step %d is skipped, %s not finite; its rows are in %s", step, names, folder)
        if self._limit and self._in_a_row >= self._limit:
            raise UserError(
                f"losses and gradients must be finite, {self._in_a_row} steps in a row are not ({' and '.join(what)}): "
                f"lower optimizer.lr, inspect the rows in {self._run.folder}/{FOLDER}, set model.dtype bfloat16 or "
                "float32 instead of float16, or raise faults.max_skipped_steps"
            )
        return {"faults/skipped_steps": float(self._total)} if self._total else {}

    def state_dict(self) -> dict[str, int]:
        """The counts, for a checkpoint."""
        return {"total": self._total, "in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the state of a checkpoint."""
        self._total = state["total"]
        self._in_a_row = state["in_a_row"]
