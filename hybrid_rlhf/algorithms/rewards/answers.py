"""A rollout as text: what functions, endpoints and reward models with tokens of their own read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.algorithms.experience import Sequences
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat import answer_text
from hybrid_rlhf.data.messages import Message, Tools, row_tools

_RESERVED = ("prompts", "completions")


@dataclass(frozen=True)
class Answers:
    """Completions with their prompts; all lists have one entry a completion."""

    prompts: list[list[Message]]
    """The conversation up to where the assistant speaks."""
    completions: list[str]
    """Its answer, without special tokens; of an episode what the actor said, a line between its turns."""
    columns: dict[str, list[Any]]
    """The data's other columns by name; None where a row has no such column."""

    def __len__(self) -> int:
        return len(self.completions)

    @classmethod
    def read(
        cls, prompts: Sequence[Mapping[str, Any]], sequences: Sequences, tokenizer: PreTrainedTokenizerBase
    ) -> Self:
        """The text of a rollout.

        Args:
            prompts: rows of `load_prompt_data`, with `prompt` and `columns` as JSON.
            sequences: equally many completions of each prompt, those of the first prompt first.
            tokenizer: the actor's.

        Raises:
            UserError: for a data column with the name of a function's own argument.
        """
        samples = len(sequences.input_ids) // len(prompts)
        rows = [row for row in prompts for _ in range(samples)]
        others = [json.loads(row["columns"]) for row in rows]
        names = list(dict.fromkeys(name for other in others for name in other))
        for name in _RESERVED:
            if name in names:
                raise UserError(
                    f"a reward function's own arguments are {' and '.join(_RESERVED)}, "
                    f"the data has a column {name!r}: rename it"
                )
        ids, mask = sequences.input_ids.cpu(), sequences.response_mask.cpu()
        return cls(
            [json.loads(row["prompt"]) for row in rows],
            [_said(row, kept, tokenizer) for row, kept in zip(ids, mask, strict=True)],
            {name: [other.get(name) for other in others] for name in names},
        )

    def tools(self, place: int) -> Tools | None:
        """The functions that a completion's assistant may call."""
        return row_tools("the row", {"tools": self.columns["tools"][place]}) if "tools" in self.columns else None

    def select(self, indices: Sequence[int]) -> Self:
        """Some rows, in the order given."""
        return type(self)(
            [self.prompts[i] for i in indices],
            [self.completions[i] for i in indices],
            {name: [values[i] for i in indices] for name, values in self.columns.items()},
        )


def _said(ids: Tensor, mask: Tensor, tokenizer: PreTrainedTokenizerBase) -> str:
    """The runs of a mask [T] in ids [T] as text."""
    places = mask.nonzero().flatten()
    cuts = ((places[1:] - places[:-1]) > 1).nonzero().flatten() + 1
    turns = torch.tensor_split(ids[places], cuts)
    return "\n".join(answer_text(turn.tolist(), tokenizer) for turn in turns)
