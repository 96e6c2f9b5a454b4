"""Batch arithmetic: derives micro-batches and accumulation from the global sizes of the user. Numbers only."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.training import MicroBatches


@dataclass(frozen=True)
class BatchPlan:
    """Division of the rows of an optimizer update over ranks and micro-batches."""

    global_batch_size: int
    """Number of rows in one update."""
    ranks: int
    micro_batches: MicroBatches

    def describe(self) -> str:
        """The plan in one line."""
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        rows = self.micro_batches.rows
        if rows is None:
            limit = f"up to {self.micro_batches.tokens} tokens"
        else:
            limit = f"{rows} row{'s' * (rows > 1)}"
        return f"batch plan: {self.global_batch_size} rows per update over {ranks}, micro-batches of {limit}"


def plan_batch(*, global_batch_size: int, ranks: int, micro_batches: MicroBatches) -> BatchPlan:
    """Share the rows of an update over ranks and micro-batches.

    Args:
        global_batch_size: rows of one update, over all ranks.
        ranks: number of ranks that train together.
        micro_batches: size of the micro-batches; a number of rows must divide the update.

    Raises:
        UserError: when the sizes do not divide; names the nearest that do.
    """
    rows = micro_batches.rows
    if rows is not None and global_batch_size % (unit := ranks * rows):
        raise UserError(
            f"train.global_batch_size must be a multiple of {ranks} ranks x {rows} rows = {unit}, got "
            f"{global_batch_size}: {nearest(global_batch_size, unit)}"
        )
    return BatchPlan(global_batch_size, ranks, micro_batches)


def plan_rollout(
    *,
    prompts_per_step: int,
    completions_per_prompt: int,
    mini_batches: int,
    ranks: int,
    micro_batches: MicroBatches,
) -> BatchPlan:
    """Share the completions of an RL step over mini-batches, ranks and micro-batches; the plan of one mini-batch.

    Raises:
        UserError: when the sizes do not divide; names the nearest rollout.prompts_per_step that does.
    """
    size = micro_batches.rows
    rows = prompts_per_step * completions_per_prompt
    unit = mini_batches if size is None else mini_batches * ranks * size
    if rows % unit:
        parts = f"{mini_batches} mini-batches"
        if size is not None:
            parts += f" x {ranks} ranks x {size} rows = {unit}"
        raise UserError(
            f"rollout.prompts_per_step x completions per prompt must be a multiple of {parts}, got "
            f"{prompts_per_step} x {completions_per_prompt}: give fewer algorithm.mini_batches or other prompts, "
            f"{nearest(prompts_per_step, unit // math.gcd(unit, completions_per_prompt))}"
        )
    return BatchPlan(rows // mini_batches, ranks, micro_batches)


def nearest(value: int, unit: int) -> str:
    """The multiples of unit around a value, as the end of an error."""
    below = value // unit * unit
    above = (value // unit + 1) * unit
    return f"the nearest are {below} and {above}" if below else f"the nearest is {above}"
