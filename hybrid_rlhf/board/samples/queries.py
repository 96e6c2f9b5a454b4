"""Which samples a client asks for, and in which order, from the columns of the index.

Numbers that are missing match no range and come last. Rows of the same value keep the order of the file, so pages
neither repeat nor leave out a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from hybrid_rlhf.board.samples.view import IndexView
from hybrid_rlhf.configs.errors import UserError

Rows = NDArray[np.int64]
MOST_ROWS = 500
"""Of one answer."""
PROMPT_KEY = r"^[0-9a-f]{16}$"
_SAMPLED = 2**16
_SLACK = 512
"""A value of a rank is looked for among those between two values of a sorted sample, so many before and after it: four
standard deviations of a random sample of that size."""


class SampleQuery(BaseModel):
    """The query of GET /api/runs/RUN/samples."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    step: int | None = Field(None, ge=0, lt=2**31)
    prompt: str | None = Field(None, pattern=PROMPT_KEY)
    sort: Literal["score", "length", "kl", "step"] = "step"
    order: Literal["asc", "desc"] = "asc"
    score_min: float | None = None
    score_max: float | None = None
    length_min: float | None = None
    length_max: float | None = None
    kl_min: float | None = None
    kl_max: float | None = None
    component: str | None = Field(None, max_length=200)
    component_min: float | None = None
    component_max: float | None = None
    text: str | None = Field(None, max_length=1000)
    offset: int = Field(0, ge=0, lt=2**31)
    limit: int = Field(50, ge=1, le=MOST_ROWS)


class PromptQuery(BaseModel):
    """The query of GET /api/runs/RUN/prompts."""

    model_config = ConfigDict(extra="forbid")

    text: str | None = Field(None, max_length=1000)
    offset: int = Field(0, ge=0, lt=2**31)
    limit: int = Field(50, ge=1, le=MOST_ROWS)


@dataclass(frozen=True)
class Found:
    """The rows of a page, and how many there are in all."""

    total: int
    rows: Rows
    is_limited: bool = False
    """Whether the words of the text are so frequent that only the newest rows were searched."""


def find(view: IndexView, query: SampleQuery) -> Found:
    """The rows of one page.

    Raises:
        UserError: for a component that the run does not have, or a text without a word.
    """
    mask, is_limited = _mask(view, query)
    total = view.rows if mask is None else int(np.count_nonzero(mask))
    first, last = min(query.offset, total), min(query.offset + query.limit, total)
    if first == last:
        return Found(total, np.empty(0, np.int64), is_limited)
    candidates = None if mask is None else np.flatnonzero(mask)
    if query.sort == "step":  # the order of the file
        places = np.arange(first, last) if query.order == "asc" else total - 1 - np.arange(first, last)
    else:
        column = view.column(query.sort)
        keys = column if candidates is None else column[candidates]
        places = _ranked(keys, first, last, descending=query.order == "desc")
    return Found(total, places if candidates is None else candidates[places], is_limited)


def prompt_key(number: int) -> str:
    """The key of a prompt for clients."""
    return f"{int(number) % 2**64:016x}"


def key_number(key: str) -> int:
    """The inverse of `prompt_key`."""
    number = int(key, 16)
    return number - 2**64 if number >= 2**63 else number


def row_of(view: IndexView, step: int, position: int) -> int | None:
    """The row of a sample; the last one, should a step have been written twice."""
    found = np.flatnonzero((view.column("step") == step) & (view.column("index") == position))
    return int(found[-1]) if len(found) else None


def _mask(view: IndexView, query: SampleQuery) -> tuple[NDArray[np.bool_] | None, bool]:
    """Which rows match, None for all; and whether the text matches more."""
    state = view.state
    masks: list[NDArray[np.bool_]] = []
    if query.step is not None:
        masks.append(view.column("step") == query.step)
    if query.prompt is not None:
        place = view.prompt_place(key_number(query.prompt))
        masks.append(view.column("prompt") == (-1 if place is None else place))
    ranges: list[tuple[str, Any, Any]] = [
        ("score", query.score_min, query.score_max),
        ("length", query.length_min, query.length_max),
        ("kl", query.kl_min, query.kl_max),
    ]
    if query.component is not None:
        if query.component not in state.components:
            names = ", ".join(state.components) or "none"
            raise UserError(f"component must be one of the run ({names}), got {query.component!r}: choose another")
        ranges.append((f"component/{query.component}", query.component_min, query.component_max))
    elif query.component_min is not None or query.component_max is not None:
        raise UserError("component_min and component_max need a component, got none: name it")
    for name, least, most in ranges:
        if least is not None:
            masks.append(view.column(name) >= least)
        if most is not None:
            masks.append(view.column(name) <= most)
    is_limited = False
    if query.text:
        found, is_limited = view.completions.search(query.text)
        prompts, has_more = view.prompt_texts.search(query.text)
        masks.append(found | view.rows_of_prompts(prompts))
        is_limited |= has_more
    if not masks:
        return None, False
    mask = masks[0]
    for other in masks[1:]:
        mask = mask & other
    return mask, is_limited


def _ranked(keys: NDArray[np.float32], first: int, last: int, *, descending: bool = False) -> Rows:
    """The places of ranks `first` to `last`, equal keys in the order of their places, NaN last.

    Only the keys of these ranks are sorted: what lies before and after them is counted.
    """
    known = int(np.count_nonzero(keys == keys))
    places = []
    if first < known:
        end = min(last, known)
        ranks = (known - 1 - first, known - end) if descending else (first, end - 1)
        begin, final = (_value_of_rank(keys, rank, known) for rank in ranks)
        before = np.count_nonzero(keys > begin if descending else keys < begin)
        places.append(np.flatnonzero(keys == begin)[first - before :])
        if begin != final:
            between = np.flatnonzero((keys > min(begin, final)) & (keys < max(begin, final)))
            order = np.argsort(-keys[between] if descending else keys[between], kind="stable")
            places += [between[order], np.flatnonzero(keys == final)]
        places = [np.concatenate(places)[: end - first]]
    if last > known:
        places.append(np.flatnonzero(keys != keys)[max(first - known, 0) : last - known])
    return np.concatenate(places)


def _value_of_rank(keys: NDArray[np.float32], rank: int, known: int) -> np.float32:
    """The key of a rank in ascending order; `known` keys are no NaN."""
    sample = np.sort(keys[:: max(1, len(keys) // _SAMPLED)])
    sample = sample[: np.count_nonzero(sample == sample)]
    place = rank * len(sample) // known
    low = sample[place - _SLACK] if place >= _SLACK else np.float32(-np.inf)
    high = sample[place + _SLACK] if place + _SLACK < len(sample) else np.float32(np.inf)
    before = np.count_nonzero(keys < low)
    if not before <= rank < np.count_nonzero(keys <= high):  # rows that repeat at the stride of the sample
        return np.float32(np.partition(keys, rank)[rank])
    if low == high:
        return np.float32(low)
    near = keys[(keys >= low) & (keys <= high)]
    return np.float32(np.partition(near, rank - before)[rank - before])
