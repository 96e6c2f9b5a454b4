"""Completions arrive on every rank as they were sampled."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from hybrid_rlhf.generation.sampling import Completion
from hybrid_rlhf.rl.rollouts.exchange import Sampled, gather_completions
from hybrid_rlhf.runtime.world import World
from tests.support.ranks import run_ranks


def completions_on(rank: int) -> list[Sampled]:
    """None on rank 1; others with and without experts and truncation, one without a token."""
    chance = random.Random(rank)
    found = []
    for place in range(0 if rank == 1 else 5):
        tokens = chance.randint(0 if place else 1, 9) if place != 2 else 0
        # as the engine reports them: float32 numbers
        floats = torch.rand(2, tokens, generator=torch.Generator().manual_seed(place)).tolist()
        shape = (3 + tokens, 2, 4)
        routes = np.random.default_rng(place).integers(-1, 99, shape).astype((np.int8, np.int16)[place % 2])
        completion = Completion(
            [chance.randint(0, 150_000) for _ in range(tokens)],
            floats[0],
            ("stop", "length")[place % 2],  # type: ignore[arg-type]
            floats[1] if place % 2 else [],
            weight_versions=[chance.randint(0, 2) for _ in range(tokens)],
            routes=routes if place > 2 else None,
        )
        found.append(Sampled(10 * rank + place, [chance.randint(0, 99) for _ in range(3)], completion))
    return found


def _both_ways(world: World) -> tuple[list[Sampled], list[Sampled]]:
    mine = completions_on(world.rank)
    return gather_completions(mine, world), [each for of_rank in world.all_gather_objects(mine) for each in of_rank]


def test_completions_arrive_as_they_were_sampled(tmp_path: Path) -> None:
    for flat, pickled in run_ranks(_both_ways, 3, tmp_path):
        assert len(flat) == 10 and flat == pickled
        for one, other in zip(flat, pickled, strict=True):
            mine, theirs = one.completion.routes, other.completion.routes
            assert (mine is None) == (theirs is None)
            if mine is not None and theirs is not None:
                assert mine.dtype == theirs.dtype and np.array_equal(mine, theirs)
