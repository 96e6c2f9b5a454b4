"""The log-probs of updates, which a checkpoint within a step stores and leaves as they are."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from hybrid_rlhf.rl.updates.updater import LastLogprobs
from hybrid_rlhf.runtime.world import World
from tests.support.ranks import run_ranks
from tests.support.rl import rollout_of

OLD = -torch.arange(1.0, 13.0).view(4, 3) / 10


def updated(world: World) -> list[Tensor]:
    """Ratios after two updates of two rows each, with a checkpoint between them; each rank has one of the rows, and
    holds two. The second is resumed from."""
    mask = torch.ones(2, 3, dtype=torch.bool)
    index = rollout_of(mask, mask, groups=torch.tensor([0, 1]) + 2 * world.rank).numbered(world)
    collected = LastLogprobs()
    collected.begin([0, 2])
    collected.add([2 * world.rank], OLD[[2 * world.rank]], index.lengths)
    resumed = LastLogprobs.from_tensors(world.all_gather_objects(collected.tensors()), world)
    assert resumed is not None
    for each in (collected, resumed):
        each.begin([1, 3])
        each.add([3 - 2 * world.rank], OLD[[3 - 2 * world.rank]] + 1, index.lengths)
    return [index.gather(each.ratios(OLD[index.mine], index)) for each in (collected, resumed)]


def test_checkpoints_within_a_step_leave_the_log_probs_as_they_are(tmp_path: Path) -> None:
    expected = torch.tensor([1.0, torch.e, 1.0, torch.e])[:, None].expand(4, 3)
    for found in run_ranks(updated, 2, tmp_path):
        for ratios in found:
            torch.testing.assert_close(ratios, expected)
