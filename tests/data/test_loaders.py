"""Sharding of global batches over ranks, their order, and positions that are saved and restored."""

from __future__ import annotations

import heapq
from itertools import islice

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf.configs.sections.training import MicroBatches
from hybrid_rlhf.data.loaders import BatchLoader, shard_batch
from hybrid_rlhf.data.row_views import row_subset
from tests.support.errors import refused

quick = settings(max_examples=60, deadline=None)


def shares_of(lengths: list[int], ranks: int, micro_batches: MicroBatches) -> list[list[list[int | None]]]:
    """The micro-batches of each rank, with the places of the rows."""
    rows = range(100, 100 + len(lengths))
    shares = [shard_batch(rows, lengths, rank=rank, ranks=ranks, micro_batches=micro_batches) for rank in range(ranks)]
    return [[[row and row - 100 for row in batch] for batch in share] for share in shares]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 4), st.integers(1, 120))
def test_sharding_by_tokens_keeps_the_limit_and_balances(lengths: list[int], ranks: int, tokens: int) -> None:
    shares = shares_of(lengths, ranks, MicroBatches(tokens=tokens))
    rows = [row for share in shares for batch in share for row in batch if row is not None]
    assert sorted(rows) == list(range(len(lengths)))
    assert len({len(share) for share in shares}) == 1, "all ranks have the same number of micro-batches"
    batches = [batch for share in shares for batch in share]
    loads = [sum(lengths[row] for row in batch if row is not None) for batch in batches]
    assert all(load <= tokens or len(batch) == 1 for load, batch in zip(loads, batches, strict=True)) or (
        max(loads) <= max(lengths)
    )
    assert max(loads) - min(loads) <= max(lengths), "each row is in the micro-batch with the fewest tokens"
    assert all(batch == [None] for batch, load in zip(batches, loads, strict=True) if not load)


@pytest.mark.parametrize(("length", "rounds"), [(2560, 64), (1400, 32)])
def test_equal_rows_are_placed_once(length: int, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If all completions reach the length limit, the total length underestimates the number of micro-batches. Every
    number from there on was tried, which took 18 s for 8,192 rows."""
    placed: list[object] = []
    pop = heapq.heappop
    monkeypatch.setattr(heapq, "heappop", lambda heap: placed.append(1) or pop(heap))
    found = shard_batch(range(512), [length] * 512, rank=0, ranks=8, micro_batches=MicroBatches(tokens=4096))
    assert len(found) == rounds and len(placed) == 512


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 4), st.integers(50, 200))
def test_padding_counts_against_the_token_limit(lengths: list[int], ranks: int, tokens: int) -> None:
    for share in shares_of(lengths, ranks, MicroBatches(tokens=tokens, padded=True)):
        for batch in share:
            assert len(batch) * max(lengths[row] if row is not None else 1 for row in batch) <= tokens


def loader(rank: int = 0, ranks: int = 1, rows: int = 23, **changes: object) -> BatchLoader:
    data = datasets.Dataset.from_list([{"id": i, "length": 1 + (7 * i) % 5} for i in range(rows)])
    settings = {"global_batch_size": 4, "micro_batches": MicroBatches(1), "seed": 3}
    return BatchLoader(data, world_rank=rank, world_size=ranks, **{**settings, **changes})  # type: ignore[arg-type]


def ids(batches: list[list[dict[str, int] | None]]) -> set[int]:
    return {row["id"] for batch in batches for row in batch if row is not None}


@pytest.mark.parametrize("ranks", [2, 4])
def test_global_batches_do_not_depend_on_the_ranks(ranks: int) -> None:
    alone = [ids(step) for step in loader().iterate(2)]
    shares = [list(loader(rank, ranks).iterate(2)) for rank in range(ranks)]
    together = [set.union(*(ids(share[step]) for share in shares)) for step in range(len(alone))]
    assert alone == together and len(alone) == 10
    assert alone[:5] != alone[5:], "a new order each epoch"
    assert all(len(step) == 4 for step in alone)
    shares = [list(loader(rank, ranks, in_order=True).iterate(1)) for rank in range(ranks)]
    assert sorted(i for share in shares for step in share for i in ids(step)) == list(range(23)), "of an evaluation"


@pytest.mark.parametrize(
    ("rows", "size", "text"),
    [
        (60, 32, "an epoch of 60 rows has only 1 update of 32 rows: train.global_batch_size 6 gives 10"),
        (7, 3, "an epoch of 7 rows has only 2 updates of 3 rows: train.global_batch_size 1 gives 7"),
        (23, 2, ""),
        (5, 1, ""),
    ],
)
def test_few_updates_are_named_with_the_batch_size_that_gives_more(rows: int, size: int, text: str) -> None:
    """One epoch at batch 32 on 60 rows was one update, without a word."""
    assert loader(rows=rows, global_batch_size=size).few_updates_text() == text


def sampler(rows: int, size: int, seed: int = 3, **options: bool) -> BatchLoader:
    return loader(rows=rows, global_batch_size=min(rows, size), seed=seed, **options)


@quick
@given(st.integers(1, 30), st.integers(1, 8), st.integers(0, 3), st.integers(0, 12))
def test_upcoming_rows_are_those_of_the_next_batches(rows: int, size: int, done: int, batches: int) -> None:
    order = sampler(rows, size)
    coming = order.row_batches()
    for _ in range(done):
        next(coming)
    before = order.state_dict()
    upcoming = order.upcoming(batches)
    assert order.state_dict() == before
    assert upcoming == list(dict.fromkeys(row for _ in range(batches) for row in next(coming)))


def test_a_row_subset_has_rows_and_columns_of_the_data() -> None:
    data = datasets.Dataset.from_dict({"length": [3, 4, 5], "name": ["a", "b", "c"]})
    subset = row_subset(data, [2, 0])
    assert subset.column_names == ["length", "name"] and len(subset) == 2
    assert subset["length"] == [5, 3] and subset[0] == {"length": 5, "name": "c"}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@quick
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40), micro=st.integers(1, 5))
def test_sharding_pads_at_most_one_unit(ranks: int, lengths: list[int], micro: int) -> None:
    flat = [[row for batch in share for row in batch] for share in shares_of(lengths, ranks, MicroBatches(micro))]
    assert sorted(row for share in flat for row in share if row is not None) == list(range(len(lengths)))
    missing = sum(row is None for share in flat for row in share)
    assert missing == -len(lengths) % (ranks * micro), "the last unit is padded, no other"
    for share in flat:
        real = [row is not None for row in share]
        assert real == sorted(real, reverse=True), "None comes last"
    counts = [sum(row is not None for row in share) for share in flat]
    assert missing >= ranks or max(counts) - min(counts) <= 1
    longest = [lengths[share[0]] for share in flat if share[0] is not None]
    assert longest == sorted(lengths, reverse=True)[: len(longest)], "each rank begins with one of the longest"


def test_sharding_by_hand() -> None:
    rows, lengths = [10, 11, 12, 13, 14], [3, 9, 5, 9, 1]
    assert shard_batch(rows, lengths, rank=0, ranks=1, micro_batches=MicroBatches(2)) == [
        [11, 13],
        [12, 10],
        [14, None],
    ]
    # Longest first: 11, 13 | 12, 10 | 14, None; every other pair in reverse order.
    assert shard_batch(rows, lengths, rank=0, ranks=2, micro_batches=MicroBatches(1)) == [[11], [10], [14]]
    assert shard_batch(rows, lengths, rank=1, ranks=2, micro_batches=MicroBatches(1)) == [[13], [12], [None]]


@quick
@given(rows=st.integers(1, 40), size=st.integers(1, 12), seed=st.integers(0, 5), stop=st.integers(0, 30))
def test_any_position_is_restored_exactly(rows: int, size: int, seed: int, stop: int) -> None:
    whole = list(sampler(rows, size, seed).row_batches(3))
    first, second = sampler(rows, size, seed), sampler(rows, size, seed)
    list(islice(first.row_batches(3), stop))
    second.load_state_dict(first.state_dict())
    assert list(second.row_batches(3)) == whole[stop:]


@quick
@given(rows=st.integers(1, 40), size=st.integers(1, 12), seed=st.integers(0, 5))
def test_an_epoch_sees_no_row_twice(rows: int, size: int, seed: int) -> None:
    size = min(rows, size)
    batches = sampler(rows, size, seed)
    seen = [row for batch in batches.row_batches(1) for row in batch]
    assert len(seen) == len(set(seen)) == rows // size * size == batches.steps_per_epoch * size
    kept = sampler(rows, size, seed, in_order=True)
    assert [row for batch in kept.row_batches(1) for row in batch] == list(range(rows))
    assert kept.steps_per_epoch == -(-rows // size)


def test_the_order_depends_on_the_seed_and_is_endless_by_default() -> None:
    def order(seed: int) -> list[list[int]]:
        return list(islice(sampler(16, 4, seed).row_batches(), 25))

    assert order(0) == order(0) != order(1)
    assert len(order(0)) == 25


def test_too_few_rows_are_rejected_unless_all_are_taken() -> None:
    error = refused(loader, rows=5, global_batch_size=8)
    assert "8 rows, got 5: add rows or reduce train.global_batch_size to 5" in error
    assert loader(rows=5, global_batch_size=8, in_order=True).steps_per_epoch == 1
