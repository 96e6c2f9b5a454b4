"""Properties of dealing, positions and padding for any sizes. Cases by hand: test_loaders.py."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf.configs.batch_plan import MicroBatches
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.collation import collate_preferences, collate_tokens
from hybrid_rlhf.data.loaders import GlobalBatches, deal

PAD = 2
tokens = st.lists(st.integers(0, 9), min_size=1, max_size=7)  # PAD is among them


def marked(ids: list[int]) -> st.SearchStrategy[tuple[list[int], list[bool]]]:
    """Tokens, and which of them carry loss."""
    return st.tuples(st.just(ids), st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))


quick = settings(max_examples=60, deadline=None)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@quick
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40), micro=st.integers(1, 5))
def test_dealing_pads_no_more_than_it_must(ranks: int, lengths: list[int], micro: int) -> None:
    shares = [
        deal(range(len(lengths)), lengths, rank=rank, ranks=ranks, micro_batches=MicroBatches(micro))
        for rank in range(ranks)
    ]
    flat = [[row for batch in share for row in batch] for share in shares]
    missing = sum(row is None for share in flat for row in share)
    assert missing == -len(lengths) % (ranks * micro), "one unit is filled up, and no more"
    for share in flat:
        real = [row is not None for row in share]
        assert real == sorted(real, reverse=True), "None comes last"
    counts = [sum(row is not None for row in share) for share in flat]
    assert missing >= ranks or max(counts) - min(counts) <= 1
    longest = [lengths[share[0]] for share in flat if share[0] is not None]
    assert longest == sorted(lengths, reverse=True)[: len(longest)], "each rank begins with one of the longest"


def test_dealing_by_hand() -> None:
    rows, lengths = [10, 11, 12, 13, 14], [3, 9, 5, 9, 1]
    assert deal(rows, lengths, rank=0, ranks=1, micro_batches=MicroBatches(2)) == [[11, 13], [12, 10], [14, None]]
    # longest first: 11, 13 | 12, 10 | 14, None; every other pair goes round the other way
    assert deal(rows, lengths, rank=0, ranks=2, micro_batches=MicroBatches(1)) == [[11], [10], [14]]
    assert deal(rows, lengths, rank=1, ranks=2, micro_batches=MicroBatches(1)) == [[13], [12], [None]]


@quick
@given(rows=st.integers(1, 40), size=st.integers(1, 12), seed=st.integers(0, 5), stop=st.integers(0, 30))
def test_a_position_goes_on_exactly_wherever_it_is_taken(rows: int, size: int, seed: int, stop: int) -> None:
    size = min(rows, size)
    whole = list(GlobalBatches(rows, global_batch_size=size, seed=seed).iterate(3))
    first = GlobalBatches(rows, global_batch_size=size, seed=seed)
    list(islice(first.iterate(3), stop))
    second = GlobalBatches(rows, global_batch_size=size, seed=seed)
    second.load_state_dict(first.state_dict())
    assert list(second.iterate(3)) == whole[stop:]


@quick
@given(rows=st.integers(1, 40), size=st.integers(1, 12), seed=st.integers(0, 5))
def test_an_epoch_sees_no_row_twice(rows: int, size: int, seed: int) -> None:
    size = min(rows, size)
    batches = GlobalBatches(rows, global_batch_size=size, seed=seed)
    seen = [row for batch in batches.iterate(1) for row in batch]
    assert len(seen) == len(set(seen)) == rows // size * size == batches.steps_per_epoch * size
    kept = GlobalBatches(rows, global_batch_size=size, seed=seed, drop_last=False)
    assert sorted(row for batch in kept.iterate(1) for row in batch) == list(range(rows))
    assert kept.steps_per_epoch == -(-rows // size)


def test_the_order_is_of_the_seed_and_for_ever_without_a_last_epoch() -> None:
    def order(seed: int, count: int = 25) -> list[list[int]]:
        return list(islice(GlobalBatches(16, global_batch_size=4, seed=seed).iterate(), count))

    assert order(0) == order(0) != order(1)
    assert len(order(0)) == 25
    plain = GlobalBatches(6, global_batch_size=4, seed=0, shuffle=False, drop_last=False)
    assert list(plain.iterate(1)) == [[0, 1, 2, 3], [4, 5]]


def test_too_few_rows_are_refused_only_where_the_last_batch_is_left_out() -> None:
    with pytest.raises(UserError) as caught:
        GlobalBatches(5, global_batch_size=8, seed=0)
    assert str(caught.value) == (
        "an update takes 8 rows, the training data has 5: add rows or set the batch size to 5 or less"
    )
    assert GlobalBatches(5, global_batch_size=8, seed=0, drop_last=False).steps_per_epoch == 1


@quick
@given(st.lists(st.none() | tokens.flatmap(marked), min_size=1, max_size=5))
def test_collated_tokens_read_back(rows: list[tuple[list[int], list[bool]] | None]) -> None:
    batch = collate_tokens([row and {"input_ids": row[0], "loss_mask": row[1]} for row in rows], PAD)
    width = max(len(row[0]) if row else 1 for row in rows)
    for tensor in (batch.input_ids, batch.attention_mask, batch.loss_mask):
        assert tensor.shape == (len(rows), width)
    assert batch.input_ids.dtype is torch.long
    assert batch.attention_mask.dtype is batch.loss_mask.dtype is torch.bool
    assert (batch.input_ids[~batch.attention_mask] == PAD).all() and not batch.loss_mask[~batch.attention_mask].any()
    for index, row in enumerate(rows):
        ids, loss = row or ([PAD], [False])
        assert batch.attention_mask[index].tolist() == [place < len(ids) for place in range(width)]
        assert batch.input_ids[index, : len(ids)].tolist() == ids
        assert batch.loss_mask[index, : len(ids)].tolist() == [False, *loss[1:]], "the first has no predecessor"


@st.composite
def preference(draw: st.DrawFn) -> dict[str, list]:  # type: ignore[type-arg]
    responses = draw(st.lists(tokens, min_size=2, max_size=4))
    index = st.integers(0, len(responses) - 1)
    pairs = draw(st.lists(st.tuples(index, index), min_size=1, max_size=4))
    margins = draw(st.lists(st.floats(-4, 4, width=32), min_size=len(pairs), max_size=len(pairs)))
    masks = [[place % 2 == 1 for place in range(len(ids))] for ids in responses]
    return {"responses": responses, "masks": masks, "pairs": [list(pair) for pair in pairs], "margins": margins}


@quick
@given(st.lists(st.one_of(st.none(), preference()), min_size=1, max_size=4))
def test_collated_pairs_point_at_their_answers(rows: list[dict[str, list] | None]) -> None:  # type: ignore[type-arg]
    batch = collate_preferences(rows, PAD)
    real = [row for row in rows if row is not None]
    assert len(batch.input_ids) == sum(len(row["responses"]) for row in real) + rows.count(None)
    answers = [ids[mask].tolist() for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)]
    for ids, attention, own in zip(batch.input_ids, batch.attention_mask, batch.response_mask, strict=True):
        if int(attention.sum()) > 1 or len(real) == len(rows):
            assert own.tolist() == [bool(there) and place % 2 == 1 for place, there in enumerate(attention)]
        assert own.shape == ids.shape
    wanted = [(row["responses"][i], row["responses"][j]) for row in real for i, j in row["pairs"]]
    pairs = zip(batch.chosen_index.tolist(), batch.rejected_index.tolist(), strict=True)
    assert [(answers[i], answers[j]) for i, j in pairs] == wanted
    assert batch.margin.dtype is torch.float32
    assert batch.margin.tolist() == [margin for row in real for margin in row["margins"]]


def test_a_batch_moves_as_one() -> None:
    batch = collate_tokens([{"input_ids": [1, 2], "loss_mask": [False, True]}], PAD).to(torch.device("meta"))
    assert {batch.input_ids.device, batch.attention_mask.device, batch.loss_mask.device} == {torch.device("meta")}
