"""The log-probs of updates, which a checkpoint within a step stores and leaves as they are."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from hybrid_rlhf.rl.updates.updater import LastLogprobs
from hybrid_rlhf.runtime.world import World
from tests.support.ranks import run_ranks

OLD = -torch.arange(1.0, 13.0).view(4, 3) / 10


def updated(world: World) -> list[Tensor]:
    """Ratios after two updates of two rows each, with two checkpoints between them; each rank has one of the rows.
    The second is resumed from."""
    collected = LastLogprobs(OLD)
    collected.begin([0, 2])
    collected.add([2 * world.rank], OLD[[2 * world.rank]])
    collected.tensors(world)
    resumed = LastLogprobs.from_tensors(collected.tensors(world), world)
    assert resumed is not None
    for each in (collected, resumed):
        each.begin([1, 3])
        each.add([1 + 2 * world.rank], OLD[[1 + 2 * world.rank]] + 1)
    return [each.ratios(OLD, world) for each in (collected, resumed)]


def test_checkpoints_within_a_step_leave_the_log_probs_as_they_are(tmp_path: Path) -> None:
    expected = torch.tensor([1.0, torch.e, 1.0, torch.e])[:, None].expand(4, 3)
    for found in run_ranks(updated, 2, tmp_path):
        for ratios in found:
            torch.testing.assert_close(ratios, expected)
