"""Filters and order of the samples that a client requests.

Missing numbers match no range and come last. Rows with the same value keep the order of the file, so that pages neither
repeat nor skip a row.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from hybrid_rlhf.board.samples.index import Rows, SampleView, search_words
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.serving.web import KnownKeys

MOST_ROWS = 500
"""Largest number of rows in an answer."""
PROMPT_KEY = r"^[0-9a-f]{16}$"


class PromptQuery(KnownKeys):
    """The query of GET /api/runs/RUN/prompts."""

    text: str | None = Field(None, max_length=1000)
    offset: int = Field(0, ge=0, lt=2**31)
    limit: int = Field(50, ge=1, le=MOST_ROWS)

    def page(self, rows: Rows) -> Rows:
        """The requested part of the rows."""
        return rows[self.offset : self.offset + self.limit]


class SampleQuery(PromptQuery):
    """The query of GET /api/runs/RUN/samples."""

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


def find(view: SampleView, query: SampleQuery) -> Rows:
    """All rows that match, in the order of the query.

    Raises:
        UserError: for a component that the run does not have, or a text without a word.
    """
    if query.component is not None and query.component not in view.state.components:
        names = ", ".join(view.state.components) or "none"
        raise UserError(f"component must be one of the run ({names}), got {query.component!r}: choose another")
    if query.component is None and not query.component_min is query.component_max is None:
        raise UserError("component_min and component_max need a component, got none: name it")
    matches = np.ones(view.state.rows, bool)
    if query.step is not None:
        matches &= view.column("step") == query.step
    if query.prompt is not None:
        matches &= np.isin(np.arange(len(matches)), view.rows_of_prompt(query.prompt))
    for name in ("score", "length", "kl", "component"):
        column = f"component/{query.component}" if name == "component" else name
        least, most = getattr(query, f"{name}_min"), getattr(query, f"{name}_max")
        if least is not None:
            matches &= view.column(column) >= least
        if most is not None:
            matches &= view.column(column) <= most
    if query.text:
        words = search_words(query.text)
        prompts = view.ask("SELECT rowid FROM prompt_words WHERE prompt_words MATCH ?", words)
        has_words = np.isin(view.column("prompt"), prompts)
        has_words[view.ask("SELECT rowid FROM completion_words WHERE completion_words MATCH ?", words)] = True
        matches &= has_words
    rows = np.flatnonzero(matches)
    if query.sort == "step":  # the order of the file
        return rows if query.order == "asc" else rows[::-1]
    keys = view.column(query.sort)[rows]
    return rows[np.argsort(keys if query.order == "asc" else -keys, kind="stable")]
