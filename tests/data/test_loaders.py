from __future__ import annotations

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf.configs.batch_plan import MicroBatches
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.collation import collate_preferences, collate_tokens
from hybrid_rlhf.data.loaders import BatchLoader, ChosenRows, GlobalBatches, deal


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 4), st.integers(1, 4))
def test_dealing_shares_every_row_once(lengths: list[int], ranks: int, micro: int) -> None:
    rows = list(range(100, 100 + len(lengths)))
    shares = [deal(rows, lengths, rank=rank, ranks=ranks, micro_batches=MicroBatches(micro)) for rank in range(ranks)]
    assert sorted(row for share in shares for batch in share for row in batch if row is not None) == rows
    assert len({len(share) for share in shares}) == 1, "every rank has as many micro-batches"
    assert all(len(batch) == micro for share in shares for batch in share)
    for share in shares:
        own = [lengths[row - 100] for batch in share for row in batch if row is not None]
        assert own == sorted(own, reverse=True)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 4), st.integers(1, 120))
def test_dealing_by_tokens_keeps_the_limit_and_balances(lengths: list[int], ranks: int, tokens: int) -> None:
    rows = list(range(100, 100 + len(lengths)))
    shares = [deal(rows, lengths, rank=r, ranks=ranks, micro_batches=MicroBatches(tokens=tokens)) for r in range(ranks)]
    assert sorted(row for share in shares for batch in share for row in batch if row is not None) == rows
    assert len({len(share) for share in shares}) == 1, "every rank has as many micro-batches"
    batches = [batch for share in shares for batch in share]
    loads = [sum(lengths[row - 100] for row in batch if row is not None) for batch in batches]
    assert all(load <= tokens or len(batch) == 1 for load, batch in zip(loads, batches, strict=True)) or (
        max(loads) <= max(lengths)
    )
    assert max(loads) - min(loads) <= max(lengths), "each row went to the lightest"
    assert all(batch == [None] for batch, load in zip(batches, loads, strict=True) if not load)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 4), st.integers(50, 200))
def test_padding_counts_where_it_is_computed(lengths: list[int], ranks: int, tokens: int) -> None:
    rows, padded = list(range(len(lengths))), MicroBatches(tokens=tokens, padded=True)
    for rank in range(ranks):
        for batch in deal(rows, lengths, rank=rank, ranks=ranks, micro_batches=padded):
            assert len(batch) * max(lengths[row] if row is not None else 1 for row in batch) <= tokens


def test_dealing_balances_tokens() -> None:
    lengths = list(range(1, 33))
    totals = []
    for rank in range(4):
        dealt = deal(range(32), lengths, rank=rank, ranks=4, micro_batches=MicroBatches(4))
        totals.append(sum(lengths[row] for batch in dealt for row in batch if row is not None))
    assert max(totals) - min(totals) == 0


def table(rows: int = 23) -> datasets.Dataset:
    return datasets.Dataset.from_list([{"id": i, "length": 1 + (7 * i) % 5} for i in range(rows)])


def loader(rank: int = 0, ranks: int = 1, **changes: object) -> BatchLoader:
    settings = {"global_batch_size": 4, "micro_batches": MicroBatches(1), "seed": 3}
    return BatchLoader(table(), world_rank=rank, world_size=ranks, **{**settings, **changes})  # type: ignore[arg-type]


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


@pytest.mark.parametrize("stop", [1, 5, 7])
def test_a_saved_position_goes_on_exactly(stop: int) -> None:
    whole = [ids(step) for step in loader().iterate(2)]
    first = loader()
    steps = first.iterate(2)
    for _ in range(stop):
        next(steps)
    second = loader()
    second.load_state_dict(first.state_dict())
    assert [ids(step) for step in second.iterate(2)] == whole[stop:]


def test_evaluation_sees_every_row_once() -> None:
    for ranks in (1, 2, 4):
        shares = [list(loader(rank, ranks, shuffle=False, drop_last=False).iterate(1)) for rank in range(ranks)]
        seen = [i for share in shares for step in share for i in ids(step)]
        assert sorted(seen) == list(range(23))
        assert len({sum(len(step) for step in share) for share in shares}) == 1


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(UserError, match="an update takes 8 rows, the training data has 5"):
        GlobalBatches(5, global_batch_size=8, seed=0)


def test_tokens_are_padded_on_the_right_and_lengths_live_in_masks() -> None:
    batch = collate_tokens(
        [{"input_ids": [5, 2, 7], "loss_mask": [False, True, True]}, None, {"input_ids": [2], "loss_mask": [False]}], 2
    )
    assert batch.input_ids.tolist() == [[5, 2, 7], [2, 2, 2], [2, 2, 2]]
    assert batch.attention_mask.tolist() == [[True] * 3, [True, False, False], [True, False, False]]
    assert batch.loss_mask.tolist() == [[False, True, True], [False] * 3, [False] * 3]


def test_preferences_keep_each_answer_once_and_all_pairs() -> None:
    rows = [
        {
            "responses": [[4, 5], [4, 6, 7], [4]], "masks": [[False, True], [False, True, True], [False]],
            "pairs": [[0, 1], [0, 2], [2, 1]], "margins": [0.0, 1.0, 2.0],
        },
        None,
        {
            "responses": [[8], [9, 9]], "masks": [[False], [False, True]], "pairs": [[1, 0]], "margins": [0.5],
            "ref_logprobs": [-1.5, -2.5],
        },
    ]  # fmt: skip
    batch = collate_preferences(rows, 0)
    assert batch.input_ids.shape == (6, 3)
    assert batch.chosen_index.tolist() == [0, 0, 2, 5]
    assert batch.rejected_index.tolist() == [1, 2, 1, 4]
    assert batch.margin.tolist() == [0.0, 1.0, 2.0, 0.5]
    assert batch.response_mask.sum(dim=1).tolist() == [1, 2, 0, 0, 0, 1]
    assert batch.ref_logprobs.tolist() == [0.0, 0.0, 0.0, 0.0, -1.5, -2.5]
    empty = collate_preferences([None], 0)
    assert len(empty.chosen_index) == 0 and empty.attention_mask.any()
    assert empty.chosen_index.dtype is torch.long


@given(st.integers(1, 30), st.integers(1, 8), st.integers(0, 3), st.integers(0, 12))
def test_upcoming_rows_are_those_of_the_next_batches(rows: int, size: int, done: int, batches: int) -> None:
    size = min(rows, size)
    loader = GlobalBatches(rows, global_batch_size=size, seed=3)
    coming = loader.iterate()
    for _ in range(done):
        next(coming)
    before = loader.state_dict()
    told = loader.upcoming(batches)
    assert loader.state_dict() == before
    assert told == list(dict.fromkeys(row for _ in range(batches) for row in next(coming)))


def test_chosen_rows_are_rows_and_columns_of_the_data() -> None:
    data = datasets.Dataset.from_dict({"length": [3, 4, 5], "name": ["a", "b", "c"]})
    chosen = ChosenRows(data, [2, 0])
    assert chosen.column_names == ["length", "name"] and len(chosen) == 2
    assert chosen["length"] == [5, 3] and chosen[0] == {"length": 5, "name": "c"}
