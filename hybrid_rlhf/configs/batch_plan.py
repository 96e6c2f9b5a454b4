"""Batch arithmetic: the user gives global sizes, this derives micro-batches and accumulation. Pure numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybrid_rlhf.configs.errors import UserError


@dataclass(frozen=True)
class BatchPlan:
    """How the rows of one optimizer update are shared out."""

    global_batch_size: int
    """Rows in one update."""
    ranks: int
    micro_batch_size: int
    """Rows that pass through a model at once on a rank."""

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches on a rank in one update."""
        return self.global_batch_size // (self.ranks * self.micro_batch_size)

    def describe(self) -> str:
        """The plan in one line."""
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        micro_batches = f"{self.accumulation_steps} micro-batch{'es' * (self.accumulation_steps > 1)}"
        return (
            f"batch plan: {self.global_batch_size} rows an update = "
            f"{ranks} x {micro_batches} x {self.micro_batch_size} rows"
        )


def plan_batch(
    *,
    global_batch_size: int,
    ranks: int,
    micro_batch_size: int | None,
    micro_batch_tokens: int,
    max_length: int,
    key: str = "train.global_batch_size",
) -> BatchPlan:
    """Share the rows of an update over ranks and micro-batches.

    Args:
        global_batch_size: rows of one update, over all ranks.
        ranks: that train together.
        micro_batch_size: rows at once; none: as many as keep rows x max_length within micro_batch_tokens.
        micro_batch_tokens: that bound.
        max_length: longest row in tokens.
        key: the config key to name in an error.

    Raises:
        UserError: when the sizes do not divide; names the nearest that do.
    """
    unit = ranks * (micro_batch_size or 1)
    if global_batch_size % unit:
        parts = f"{ranks} ranks" + (f" x {micro_batch_size} rows = {unit}" if micro_batch_size else "")
        raise UserError(
            f"{key} must be a multiple of {parts}, got {global_batch_size}: {nearest(global_batch_size, unit)}"
        )
    per_rank = global_batch_size // ranks
    if micro_batch_size is None:
        fitting = max(1, micro_batch_tokens // max_length)
        micro_batch_size = max(size for size in range(1, min(per_rank, fitting) + 1) if per_rank % size == 0)
    return BatchPlan(global_batch_size, ranks, micro_batch_size)


def plan_rollout(
    *,
    prompts_per_step: int,
    samples_per_prompt: int,
    mini_batches: int,
    ranks: int,
    micro_batch_size: int | None,
    micro_batch_tokens: int,
    max_length: int,
) -> BatchPlan:
    """Share the completions of a PPO step over mini-batches, ranks and micro-batches; the plan of one mini-batch.

    Raises:
        UserError: when the sizes do not divide; names the nearest rollout.prompts_per_step that does.
    """
    unit = mini_batches * ranks * (micro_batch_size or 1)
    rows = prompts_per_step * samples_per_prompt
    if rows % unit:
        step = unit // math.gcd(unit, samples_per_prompt)
        parts = f"{mini_batches} mini-batches x {ranks} ranks" + (
            f" x {micro_batch_size} rows" if micro_batch_size else ""
        )
        raise UserError(
            f"rollout.prompts_per_step x samples_per_prompt must be a multiple of {parts} = {unit}, got "
            f"{prompts_per_step} x {samples_per_prompt}: {nearest(prompts_per_step, step)}"
        )
    return plan_batch(
        global_batch_size=rows // mini_batches,
        ranks=ranks,
        micro_batch_size=micro_batch_size,
        micro_batch_tokens=micro_batch_tokens,
        max_length=max_length,
        key="rollout.prompts_per_step",
    )


def nearest(value: int, unit: int) -> str:
    """The multiples of unit around a value, as the end of an error."""
    below, above = value // unit * unit, (value // unit + 1) * unit
    return f"the nearest are {below} and {above}" if below else f"the nearest is {above}"
