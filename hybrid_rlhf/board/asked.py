"""Blind pairs of two saved models, which answer the same prompts of a file.

Recorded samples of two runs rarely share a prompt, and runs of SFT and DPO record none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice
from typing import Any

from hybrid_rlhf.board.chat import Chats
from hybrid_rlhf.board.preferences import Preferences
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.sampling import SamplingParams

_MOST_ROWS = 10_000
_TRIES = 4
"""Number of prompts that may get two equal answers before the search ends."""


async def ask_models(
    preferences: Preferences, chats: Chats, models: Sequence[str], prompts: str, sampling: SamplingParams
) -> dict[str, Any]:
    """A pair of answers to a prompt that has not been judged for these models; without a pair if there is none.

    Args:
        preferences: where pairs are judged.
        chats: the loaded models.
        models: paths of two models.
        prompts: data as `hybrid-rlhf generate` reads it.
        sampling: of both models.

    Raises:
        UserError: if the data cannot be read, or a model cannot be loaded.
    """
    rows = await asyncio.to_thread(_read, prompts)
    for number in preferences.unjudged(len(rows), models, prompts)[:_TRIES]:
        row = rows[number]
        texts = [""] * len(models)
        async for event in await chats.answers(models, row.messages, sampling, tools=row.tools):
            if "error" in event:
                raise UserError(event["error"])
            texts[event["model"]] += event.get("delta", "")
        if len(set(texts)) == len(texts):
            sides = [{"run": path, "step": None, "index": number, "score": None} for path in models]
            answers = list(zip(texts, sides, strict=True))
            return preferences.show(preferences.shuffled(row.messages, answers, columns=row.columns, prompts=prompts))
    return {"pair": None}


def _read(source: str) -> list[Any]:
    from hybrid_rlhf.data.rows.formats import read_prompt_row  # datasets is imported with the first comparison
    from hybrid_rlhf.data.rows.sources import open_source

    return [read_prompt_row(where, row) for where, row in islice(open_source(source), _MOST_ROWS)]
