"""Best-fit packing: every row once, none over the capacity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf.configs.sections.training import MicroBatches
from hybrid_rlhf.data.collation import collate_tokens
from hybrid_rlhf.data.loaders import BatchLoader
from hybrid_rlhf.data.packing import best_fit, pack_rows, row_sequences


def slow_best_fit(lengths: Sequence[int], capacity: int) -> list[int]:
    """Sizes of the bins, by looking at each one for each item."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [place for place, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=lambda place: rooms[place])] -= length
        else:
            rooms.append(capacity - length)
    return sorted(capacity - room for room in rooms)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 32), min_size=1, max_size=80), st.integers(0, 99))
def test_bins_are_those_of_best_fit_decreasing(lengths: list[int], seed: int) -> None:
    bins = best_fit(lengths, capacity=32, seed=seed)
    assert sorted(item for items in bins for item in items) == list(range(len(lengths)))
    sizes = sorted(sum(lengths[item] for item in items) for items in bins)
    assert sizes[-1] <= 32 and sizes == slow_best_fit(lengths, 32)
    assert bins == best_fit(lengths, capacity=32, seed=seed)


def test_the_seed_decides_among_equals() -> None:
    lengths = [4] * 40
    first, other = (best_fit(lengths, capacity=12, seed=seed) for seed in (0, 1))
    assert len(first) == len(other) == 14 and first != other


@pytest.fixture
def rows() -> datasets.Dataset:
    return datasets.Dataset.from_list(
        [
            {"input_ids": list(range(3, 3 + n)), "loss_mask": [False] + [True] * (n - 1), "length": n}
            for n in (5, 3, 2, 4)
        ]
    )


def test_a_packed_row_is_laid_out_as_sequences_of_their_own(rows: datasets.Dataset, log_lines: list[str]) -> None:
    found = pack_rows(rows, capacity=7, seed=0, log=True)
    assert log_lines == ["packing: 4 conversations in 2 packed rows of 7 tokens, 100% full"]
    assert found["length"] == [7, 7] and found["padded_tokens"] == [14, 14]
    batch = collate_tokens([found[0], None], 0)
    assert batch.attention_mask.sum(dim=1).tolist() == [5, 2, 1]
    assert batch.input_ids[1, :2].tolist() == [3, 4] and batch.loss_mask.sum(dim=1).tolist() == [4, 1, 0]
    plain = collate_tokens([rows[0], rows[2], None], 0)
    assert torch.equal(batch.input_ids, plain.input_ids) and torch.equal(batch.loss_mask, plain.loss_mask)


@pytest.mark.parametrize("padded", [False, True])
def test_micro_batches_count_the_tokens_of_packed_rows(padded: bool) -> None:
    lengths = [8, 8] + [2] * 24
    read: list[int] = []

    class Rows(dict[Any, Any]):
        """Rows that are made when they are asked for."""

        def __missing__(self, key: int) -> Any:
            read.append(key)
            return {"input_ids": [1] * lengths[key], "loss_mask": [True] * lengths[key]}

    bins = pack_rows(Rows(length=lengths), capacity=8, seed=0)  # type: ignore[arg-type]
    assert len(bins) == 8
    loader = BatchLoader(
        bins,
        global_batch_size=8,
        world_rank=0,
        world_size=1,
        micro_batches=MicroBatches(tokens=32, padded=padded),
        seed=0,
    )
    assert read == [], "sizes come from the column"
    (micro_batches,) = loader.iterate(1)
    for micro in micro_batches:
        shape = collate_tokens(micro, 0).input_ids.shape
        if padded:
            assert shape.numel() <= 32
        assert sum(len(s["input_ids"]) for row in micro for s in row_sequences(row) if s is not None) <= 32
    assert sorted(read) == list(range(26))
