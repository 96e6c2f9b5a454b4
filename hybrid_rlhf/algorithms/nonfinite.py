"""Steps in which something was NaN or infinite: skipped on all ranks together, counted, their rows kept.

Weights, optimizer and statistics are as if such a step had not been. After several in a row the run stops: it would not
mend itself.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.logs import LOGGER_NAME
from hybrid_rlhf.runtime.run import Run

FOLDER = "nonfinite"
Row = TypeVar("Row")
logger = logging.getLogger(LOGGER_NAME)


class NotFinite(Exception):
    """A rollout that cannot be learned from; the same on every rank."""

    def __init__(self, what: Sequence[str]) -> None:
        super().__init__(", ".join(what))
        self.what = what


def rows_not_finite(parts: Mapping[str, Tensor], *, mask: Tensor) -> dict[str, list[int]]:
    """Rows of each part, [N] or [N, T], where something that counts is not finite; parts without one are left out."""
    found = {}
    for name, values in parts.items():
        faulty = ~values.isfinite()
        if values.dim() == 2:
            faulty = (faulty & mask).any(dim=1)
        rows: list[int] = faulty.nonzero().flatten().tolist()
        if rows:
            found[name] = rows
    return found


def rows_to_blame(micro_batches: Sequence[Sequence[Row | None]], losses: Sequence[Tensor]) -> list[Row]:
    """Rows of the micro-batches whose loss is not finite; where all losses are, a gradient was not: all rows."""
    faulty = [part for part, loss in zip(micro_batches, losses, strict=True) if not loss.isfinite()]
    return [row for part in faulty or micro_batches for row in part if row is not None]


def rounded(value: Tensor) -> float | None:
    """A number to show, in JSON: none where it is not finite."""
    return round(float(value), 4) if value.isfinite() else None


class SkippedSteps:
    """Counts them; the same on every rank."""

    def __init__(self, run: Run, *, limit: int) -> None:
        """Take the run, and how many in a row end it; 0: any number goes."""
        self._run, self._limit = run, limit
        self._total = self._in_a_row = 0

    def keep(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """Append the rows of this rank that are to blame to the run's nonfinite folder."""
        if rows:
            file = self._run.folder / FOLDER / f"rank_{self._run.world.rank:05}.jsonl"
            file.parent.mkdir(exist_ok=True)
            with file.open("a", encoding="utf-8") as lines:
                lines.writelines(json.dumps({"step": step, **row}, default=str) + "\n" for row in rows)

    def settle(self, step: int, what: Sequence[str]) -> dict[str, float]:
        """Count a step; every rank calls alike.

        Args:
            step: the step.
            what: was not finite; nothing: all is well.

        Returns:
            metrics; {} as long as no step of the run was skipped.

        Raises:
            UserError: when too many in a row were skipped.
        """
        self._in_a_row = self._in_a_row + 1 if what else 0
        self._total += bool(what)
        if what:
            told = (
                f"step {step} is skipped, {' and '.join(what)} not finite; its rows are in {self._run.folder}/{FOLDER}"
            )
            if self._run.world.is_main:
                logger.warning(told)
        if self._limit and self._in_a_row >= self._limit:
            raise UserError(
                f"a step needs finite numbers, {self._in_a_row} in a row had none ({' and '.join(what)} not finite): "
                f"lower optimizer.lr, look at the rows in {self._run.folder}/{FOLDER}, or take model.dtype bfloat16 or "
                "float32 in place of float16; faults.max_skipped_steps says how many are borne"
            )
        return {"faults/skipped_steps": float(self._total)} if self._total else {}

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        return {"total": self._total, "in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a checkpoint."""
        self._total, self._in_a_row = state["total"], state["in_a_row"]
