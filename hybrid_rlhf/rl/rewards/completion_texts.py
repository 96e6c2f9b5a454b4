"""A rollout as text: input of functions, endpoints, and reward models with another tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat.conversation import completion_text
from hybrid_rlhf.data.chat.messages import Message, Tools, row_tools
from hybrid_rlhf.rl.batch import Rollout

RESERVED = ("prompts", "completions")
"""Arguments of a reward function that are no columns."""


@dataclass(frozen=True)
class CompletionTexts:
    """Completions with their prompts. All lists have one entry per completion."""

    prompts: list[list[Message]]
    """Conversations before the completion."""
    completions: list[str]
    """Completions without special tokens. The turns of an episode are joined by newlines, without observations."""
    columns: dict[str, list[Any]]
    """Other columns of the data by name; None where a row lacks the column."""

    def __len__(self) -> int:
        return len(self.completions)

    @classmethod
    def read(cls, prompts: Sequence[Mapping[str, Any]], rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> Self:
        """The text of a rollout.

        Args:
            prompts: rows of `load_prompt_data`, with `prompt` and `columns` as JSON.
            rollout: the same number of completions of each prompt, in the order of the prompts; or with `samples` any
                number, and the places of their prompts in `groups`.
            tokenizer: tokenizer of the actor.

        Raises:
            UserError: for a data column with the name of an argument of reward functions.
        """
        rows = [prompts[place] for place in rollout.places(len(prompts)).tolist()]
        others = [json.loads(row["columns"]) for row in rows]
        names = list(dict.fromkeys(name for other in others for name in other))
        for name in RESERVED:
            if name in names:
                raise UserError(
                    f"{' and '.join(RESERVED)} are arguments of a reward function, "
                    f"the data has a column {name!r}: rename it"
                )
        ids, mask = rollout.input_ids.cpu(), rollout.response_mask.cpu()
        return cls(
            [json.loads(row["prompt"]) for row in rows],
            [_sampled_text(row, sampled, tokenizer) for row, sampled in zip(ids, mask, strict=True)],
            {name: [other.get(name) for other in others] for name in names},
        )

    def tools(self, place: int) -> Tools | None:
        """Tools that the assistant may call in a completion."""
        return row_tools("the row", {"tools": self.columns["tools"][place]}) if "tools" in self.columns else None

    def select(self, indices: Sequence[int]) -> Self:
        """Some rows, in the given order."""
        return type(self)(
            [self.prompts[i] for i in indices],
            [self.completions[i] for i in indices],
            {name: [values[i] for i in indices] for name, values in self.columns.items()},
        )


def _sampled_text(ids: Tensor, mask: Tensor, tokenizer: PreTrainedTokenizerBase) -> str:
    """Text of the sampled tokens of a row, ids [T] under mask [T]; consecutive tokens form a turn."""
    places = mask.nonzero().flatten()
    cuts = ((places[1:] - places[:-1]) > 1).nonzero().flatten() + 1
    turns = torch.tensor_split(ids[places], cuts)
    return "\n".join(completion_text(turn.tolist(), tokenizer) for turn in turns)
