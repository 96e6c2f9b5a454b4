"""Inside a model on some of the ranks, and outside of it, a collective of other ranks raises."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from hybrid_rlhf.runtime.world import World
from tests.support.ranks import run_ranks


def _reach_out(world: World) -> list[str]:
    """What collectives of other ranks raise, inside and outside a part."""
    part = world.part((0, 2))
    errors = []
    if part.is_member:
        with part.as_default():
            assert dist.get_world_size() == 2
            assert dist.get_rank() == part.rank
            part.barrier()
            with pytest.raises(RuntimeError) as raised:
                world.barrier()
            errors.append(str(raised.value))
    else:
        with pytest.raises(RuntimeError) as raised:
            part.barrier()
        errors.append(str(raised.value))
    world.barrier()
    assert world.part((0, 2)).group is part.group
    return errors


def test_a_collective_that_others_never_enter_raises(tmp_path: Path) -> None:
    inside, outside, _ = run_ranks(_reach_out, 3, tmp_path)
    assert "inside a model on ranks [0, 2]" in inside[0]
    assert "none of them" in outside[0]
