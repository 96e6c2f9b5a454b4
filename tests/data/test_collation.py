"""Collation: padding, masks, pairs."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf.data.collation import collate_preferences, collate_tokens

PAD = 2
tokens = st.lists(st.integers(0, 9), min_size=1, max_size=7)  # PAD is among them
quick = settings(max_examples=60, deadline=None)


def marked(ids: list[int]) -> st.SearchStrategy[tuple[list[int], list[bool]]]:
    """Tokens, and which of them carry loss."""
    return st.tuples(st.just(ids), st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))


@quick
@given(st.lists(st.none() | tokens.flatmap(marked), min_size=1, max_size=5))
def test_collated_tokens_read_back(rows: list[tuple[list[int], list[bool]] | None]) -> None:
    batch = collate_tokens([row and {"input_ids": row[0], "loss_mask": row[1]} for row in rows], PAD)
    filled = [row or ([PAD], [False]) for row in rows]
    width = max(len(ids) for ids, _ in filled)

    def padded(lists: list[list[Any]], value: Any) -> list[list[Any]]:
        return [values + [value] * (width - len(values)) for values in lists]

    assert batch.input_ids.tolist() == padded([ids for ids, _ in filled], PAD)
    assert batch.attention_mask.tolist() == padded([[True] * len(ids) for ids, _ in filled], False)
    # the first token has no predecessor
    assert batch.loss_mask.tolist() == padded([[False, *mask[1:]] for _, mask in filled], False)
    assert batch.input_ids.dtype is torch.long
    assert batch.attention_mask.dtype is batch.loss_mask.dtype is torch.bool


def test_preferences_keep_each_completion_once_and_all_pairs() -> None:
    rows = [
        {
            "responses": [[4, 5], [4, 6, 7], [4]],
            "masks": [[False, True], [False, True, True], [False]],
            "pairs": [[0, 1], [0, 2], [2, 1]],
            "margins": [0.0, 1.0, 2.0],
        },
        None,
        {
            "responses": [[8], [9, 9]],
            "masks": [[False], [False, True]],
            "pairs": [[1, 0]],
            "margins": [0.5],
            "ref_logprobs": [-1.5, -2.5],
        },
    ]
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
