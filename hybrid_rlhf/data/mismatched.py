"""Mismatched completions, from which KTO estimates the KL divergence of its reference point.

Source: Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization" (arXiv 2402.01306), section
4.1. Deviation: the mismatched completions of a row are fixed instead of taken from its micro-batch, so that
the reference model scores it only once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from datasets import Dataset

from hybrid_rlhf.data.row_views import AugmentedRows, column_array


def with_mismatched_completions(rows: Dataset, *, max_length: int) -> AugmentedRows:
    """Double the `responses` and `masks` of each row: append its prompt with completions of the next row.

    A pair takes the chosen and the rejected completion of the next pair, so that both count equally, as in TRL's
    unpaired data (kto_trainer.py). A row with one completion takes one of the next row, selected by the row's index.

    The beginning of a prompt is truncated where it is too long together with the completion.
    """

    def add(index: int, row: Mapping[str, Any]) -> Mapping[str, Any]:
        following = rows[(index + 1) % len(rows)]
        begin = row["masks"][0].index(True)
        count = len(following["responses"])
        responses = list(row["responses"])
        masks = list(row["masks"])
        for number in range(len(row["responses"])):
            mismatched = (index + number) % count
            end = following["masks"][mismatched].index(True)
            completion = following["responses"][mismatched][end:]
            mask = following["masks"][mismatched][end:]
            completion = completion[: max_length - 1]
            mask = mask[: max_length - 1]
            prompt = row["responses"][0][:begin][max(0, begin + len(completion) - max_length) :]
            responses.append(prompt + completion)
            masks.append([False] * len(prompt) + mask)
        return {"responses": responses, "masks": masks}

    # Upper bounds of the tokens with the mismatched completions, for the size of micro-batches.
    lengths = column_array(rows, "length")
    counts = np.asarray([len(labels) for labels in rows["labels"]])
    added = counts * np.minimum(max_length, lengths + np.roll(lengths, -1))
    tokens = column_array(rows, "tokens") + added
    return AugmentedRows(rows, add, columns={"tokens": tokens.tolist(), "padded_tokens": (2 * added).tolist()})
