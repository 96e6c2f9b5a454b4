"""Mismatched completions, from which KTO estimates the KL divergence of its reference point.

Source: Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization" (arXiv 2402.01306), section
4.1. Deviation: the mismatched completions of a row are fixed instead of taken from its micro-batch, so that
the reference model scores it only once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from datasets import Dataset

from hybrid_rlhf.data.row_views import RowView, augmented_rows, column_array

_Prompt = tuple[np.ndarray, list[str]]
"""Tokens of the prompt of a row, and the digests of its images."""


def with_mismatched_completions(rows: Dataset, *, max_length: int) -> RowView:
    """Double the `responses` and `masks` of each row: append its prompt with completions of the next row that has
    another prompt. Where all rows have the same prompt, they are completions of the next row.

    A pair takes the chosen and the rejected completion of the next pair, so that both count equally, as in TRL's
    unpaired data (kto_trainer.py). A row with one completion takes one of the next row, selected by the row's index.

    The beginning of a prompt is truncated where it is too long together with the completion. With images, of which
    nothing is cut, the end of the completion is truncated, if it has none.
    """
    places = _next_of_other_prompt(rows, max_length)

    def add(index: int, row: Mapping[str, Any]) -> Mapping[str, Any]:
        following = rows[int(places[index])]
        begin = row["masks"][0].index(True)
        responses = list(row["responses"])
        masks = list(row["masks"])
        images = list(row.get("images") or ())
        order = list(row.get("image_order") or [[] for _ in responses])
        theirs = following.get("images") or ()
        of_prompt, of_their_prompt = row.get("prompt_images", 0), following.get("prompt_images", 0)
        for number in range(len(row["responses"])):
            mismatched = (index + number) % len(following["responses"])
            end = following["masks"][mismatched].index(True)
            completion, mask = (following[name][mismatched][end:][: max_length - 1] for name in ("responses", "masks"))
            prompt = row["responses"][0][:begin]
            own = following["image_order"][mismatched][of_their_prompt:] if theirs else []
            if of_prompt and not own:
                completion, mask = completion[: max_length - begin], mask[: max_length - begin]
            elif not of_prompt and not own:
                prompt = prompt[max(0, begin + len(completion) - max_length) :]
            responses.append(prompt + completion)
            masks.append([False] * len(prompt) + mask)
            order.append([*range(of_prompt), *range(len(images), len(images) + len(own))])
            images += [theirs[image] for image in own]
        added = {"responses": responses, "masks": masks}
        return added | ({"images": images, "image_order": order} if images else {})

    # Upper bounds of the tokens with the mismatched completions, for the size of micro-batches.
    lengths = column_array(rows, "length")
    counts = np.asarray([len(labels) for labels in rows["labels"]])
    added = counts * np.minimum(max_length, lengths + lengths[places])
    tokens = column_array(rows, "tokens") + added
    return augmented_rows(rows, add, {"tokens": tokens.tolist(), "padded_tokens": (2 * added).tolist()})


def _next_of_other_prompt(rows: Dataset, max_length: int) -> np.ndarray:
    """[N] int64, index of the next row with another prompt, after the last row that of the first such row; of the next
    row where all have the same prompt."""
    is_cut = column_array(rows, "length") >= max_length
    prompts = _prompts(rows)
    nothing: _Prompt = np.arange(0), []
    first = last = next(prompts, nothing)
    differs = np.zeros(len(rows), dtype=bool)
    for place, prompt in enumerate(prompts, 1):
        differs[place] = not _are_same(prompt, last, cut=bool(is_cut[place] or is_cut[place - 1]))
        last = prompt
    differs[:1] = not _are_same(first, last, cut=bool(is_cut[:1].any() or is_cut[-1:].any()))
    begins = np.flatnonzero(differs)
    after = np.arange(1, len(rows) + 1)
    return begins[np.searchsorted(begins, after) % len(begins)] if len(begins) else after % max(len(rows), 1)


def _prompts(rows: Dataset) -> Iterator[_Prompt]:
    of_images = [name for name in ("images", "prompt_images") if name in rows.column_names]
    for batch in rows.select_columns(["responses", "masks", *of_images]).with_format("arrow").iter(batch_size=1000):
        shown = [batch[name].to_pylist() for name in of_images] or [[None] * len(batch), [0] * len(batch)]
        for responses, masks, images, count in zip(batch["responses"], batch["masks"], *shown, strict=True):
            begin = masks.values[0].values.to_numpy(zero_copy_only=False).argmax()
            ids = responses.values[0].values.to_numpy()[:begin]
            yield ids, [image["digest"] for image in (images or ())[:count]]


def _are_same(one: _Prompt, another: _Prompt, *, cut: bool) -> bool:
    """True if two rows have the same prompt; where it was cut (data/encoding.py), each may lack a part of its text."""
    (prompt, images), (other, other_images) = one, another
    if images != other_images:
        return False
    if not cut:
        return np.array_equal(prompt, other)
    shared = min(len(prompt), len(other))
    begin = np.append(prompt[:shared] != other[:shared], True).argmax()
    end = np.append(prompt[::-1][:shared] != other[::-1][:shared], True).argmax()
    return bool(begin + end >= shared)
