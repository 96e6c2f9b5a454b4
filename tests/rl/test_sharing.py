"""Rows that ranks hold, send to each other and get back are those of a rollout on one rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hybrid_rlhf.functional.masking import masked_var, masked_whiten
from hybrid_rlhf.generation.sampling import Completion
from hybrid_rlhf.rl.sharing import restored_rows, row_values, with_columns_of_all_ranks
from hybrid_rlhf.rl.types import Batch, Episode, Rollout
from hybrid_rlhf.runtime import world as worlds
from hybrid_rlhf.runtime.world import World, solo_world
from tests.support.ranks import run_ranks

CPU = solo_world(torch.device("cpu"))
PROMPTS = 5
SAMPLES = 2


def holder(prompt: int, ranks: int) -> int:
    """Rank 1 of three holds nothing."""
    return (0, 2, 2, 0, 2)[prompt] % ranks


def episode(prompt: int, sample: int) -> Episode:
    """With experts for the first prompts alone; one completion without a token."""
    numbers = np.random.default_rng([prompt, sample])
    tokens = int(numbers.integers(1, 9)) if (prompt, sample) != (2, 1) else 0
    routes = numbers.integers(-1, 99, (3 + tokens, 2, 4)).astype(np.int8) if prompt < 2 else None
    floats = numbers.random((2, tokens)).astype(np.float32).tolist()
    ids = numbers.integers(0, 150_000, tokens).tolist()
    completion = Completion(ids, floats[0], "stop", floats[1], [prompt] * tokens, routes)
    return Episode.of(numbers.integers(0, 99, 3).tolist(), completion)


def batch_of(prompts: list[int]) -> Batch:
    """The rows of some prompts, with what is computed for them."""
    places = [prompt for prompt in prompts for _ in range(SAMPLES)]
    rollout = Rollout.of([episode(prompt, sample) for prompt in prompts for sample in range(SAMPLES)], places)
    groups = rollout.groups
    rollout = replace(rollout, components={"a/b": groups / 3}, scores=groups / 7)
    values = rollout.sampled_logprobs - rollout.drawn_logprobs
    return Batch(rollout, values, values * 2, clipped=groups > 2, selected=values > 0)


def held_batch(world: World) -> Batch:
    """The rows of this rank, with the columns of all."""
    batch = batch_of([prompt for prompt in range(PROMPTS) if holder(prompt, world.size) == world.rank])
    return with_columns_of_all_ranks(batch, world, {"m": 1.0})


def travelled(world: World, slice_bytes: int) -> dict[str, Any]:
    worlds._SLICE_BYTES = slice_bytes
    batch = held_batch(world)
    index = batch.rollout.numbered(world)
    wanted = [[9, 0, 3], [4], []][world.rank]
    read = index.fetch(batch, [wanted])([*wanted, None])
    lengths, mask = index.lengths, batch.rollout.response_mask
    micro = -torch.arange(float(lengths.max())) - torch.tensor([*wanted, 0])[:, None]
    computed = {"x": row_values([([*wanted, None], micro)], lengths), "y": {}}
    returned = index.collect(computed, width=mask.shape[1])
    return {
        "numbers": wanted,
        "gathered": [index.gather(tensor) for tensor in gathered(batch)],
        "read": read.tensors(),
        "returned": [index.bring([row.tolist() for row in returned[name]], everywhere=True) for name in ("x", "y")],
        "first": index.bring(index.mine),
        "variance": masked_var(batch.advantages, mask=mask, total=world.total),
    }


def gathered(batch: Batch) -> list[Any]:
    """Columns of several types and shapes."""
    groups = batch.rollout.groups
    return [batch.lengths, batch.rollout.scores, batch.clipped, torch.stack([groups, groups], dim=1)]


@pytest.mark.parametrize("slice_bytes", [2**27, 300])
def test_rows_travel_as_they_are(slice_bytes: int, tmp_path: Path) -> None:
    """300 bytes: a part of one row at a time."""
    whole = batch_of([*range(PROMPTS)])
    variance = masked_var(whole.advantages, mask=whole.rollout.response_mask)
    for rank, found in enumerate(run_ranks(travelled, 3, tmp_path, slice_bytes)):
        assert all(map(torch.equal, found["gathered"], gathered(whole)))
        expected = whole.rows([*found["numbers"], None]).tensors()
        assert expected.keys() == found["read"].keys()
        for name, tensor in expected.items():
            same = slice(None) if name.endswith("experts") else slice(len(found["numbers"]))
            assert tensor.dtype == found["read"][name].dtype
            assert torch.equal(tensor[same], found["read"][name][same]), name
        x, y = found["returned"]
        for number, row in enumerate(x):
            length = int(whole.lengths[number]) if number in (9, 0, 3, 4) else 0
            assert row[:length] == [-float(place) - number for place in range(length)] and not any(row[length:])
        assert not any(value for row in y for value in row)
        assert found["first"] == ([*range(len(whole))] if rank == 0 else [])
        torch.testing.assert_close(found["variance"], variance, atol=1e-6, rtol=1e-6)


def test_whitening_over_ranks_is_exact_in_float64() -> None:
    """Integers, whose sums are exact in any order."""
    values, mask = torch.randint(-9, 9, (6, 5)).double(), torch.rand(6, 5) > 0.3
    totals: list[Tensor] = []

    def observed(partial: Tensor) -> Tensor:
        totals.append(partial)
        return partial

    expected = masked_whiten(values, mask=mask, total=observed)
    parts = []
    for rows in (slice(2), slice(2, 6)):
        left = iter(totals)
        parts.append(masked_whiten(values[rows], mask=mask[rows], total=lambda _, left=left: next(left)))  # type: ignore[misc]
    assert torch.equal(torch.cat(parts), expected)


def stored(world: World) -> dict[str, Tensor]:
    batch = held_batch(world)
    return {f"p.{name}": tensor for name, tensor in batch.tensors().items()} if len(batch) else {}


def restored(world: World, shards: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    batch = restored_rows(Batch, shards, "p.", {}, world)
    assert batch is not None
    index = batch.rollout.numbered(world)
    rows = range(len(index))
    return [index.fetch(batch, [rows])(rows).tensors(), batch.tensors()]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rows_of_a_checkpoint_come_back_on_any_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    shards = run_ranks(stored, 3, tmp_path / "stored")
    assert [bool(shard) for shard in shards] == [True, False, True]
    assert restored_rows(Batch, shards, "q.", {}, CPU) is None
    expected = batch_of([*range(PROMPTS)]).tensors()
    for rank, (whole, held) in enumerate(run_ranks(restored, ranks, tmp_path / "restored", shards)):
        assert whole.keys() == expected.keys()
        assert all(torch.equal(whole[name], expected[name]) for name in expected)
        if ranks == 3 and shards[rank]:
            assert all(torch.equal(held[name], shards[rank][f"p.{name}"]) for name in held)
