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
        batch = f"{self.global_batch_size} row{'s' * (self.global_batch_size > 1)}"
        rows = self.micro_batches.rows
        if rows is None:
            limit = f"up to {self.micro_batches.tokens} tokens"
        else:
            limit = f"{rows} row{'s' * (rows > 1)}"
        return f"batch plan: {batch} per update over {ranks}, micro-batches of {limit}"


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
    parallel, shared_by = _parallel(ranks, micro_batches)
    if rows is not None and global_batch_size % (unit := parallel * rows):
        raise UserError(
            f"train.global_batch_size must be a multiple of {shared_by} x {rows} rows = {unit}, got "
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
    parallel, shared_by = _parallel(ranks, micro_batches)
    unit = mini_batches if size is None else mini_batches * parallel * size
    if rows % unit:
        parts = f"{mini_batches} mini-batches"
        if size is not None:
            parts += f" x {shared_by} x {size} rows = {unit}"
        raise UserError(
            f"rollout.prompts_per_step x completions per prompt must be a multiple of {parts}, got "
            f"{prompts_per_step} x {completions_per_prompt}: give fewer algorithm.mini_batches or other prompts, "
            f"{nearest(prompts_per_step, unit // math.gcd(unit, completions_per_prompt))}"
        )
    return BatchPlan(rows // mini_batches, ranks, micro_batches)


def _parallel(ranks: int, micro_batches: MicroBatches) -> tuple[int, str]:
    """Number of micro-batches that the ranks compute at once, and the text of what computes one each.

    Raises:
        UserError: when the ranks cannot be divided into groups that compute a micro-batch together.
    """
    together = micro_batches.ranks
    if ranks % together:
        raise UserError(
            f"model.sequence_parallel and model.tensor_parallel must divide the number of ranks {ranks}, got "
            f"{together}: give a divisor"
        )
    groups = ranks // together
    return groups, f"{ranks} ranks" if together == 1 else f"{groups} groups of {together} ranks"


def nearest(value: int, unit: int) -> str:
    """The multiples of unit around a value, as the end of an error."""
    below = value // unit * unit
    above = (value // unit + 1) * unit
    return f"the nearest are {below} and {above}" if below else f"the nearest is {above}"
