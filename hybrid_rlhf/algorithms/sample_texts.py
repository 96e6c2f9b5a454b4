"""Completions of a rollout as rows of samples.jsonl, for people to read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.algorithms.experience import Sequences
from hybrid_rlhf.algorithms.nonfinite import rounded


class SampleTexts:
    """Writes them out."""

    def __init__(self, prompts: Dataset, tokenizer: PreTrainedTokenizerBase) -> None:
        """Take the data that the prompts are from, and the tokenizer."""
        self._prompts, self._tokenizer = prompts, tokenizer

    def __call__(
        self, prompts: Sequence[int], sequences: Sequences, *, scores: Tensor, kl: Tensor | None,
        rows: Sequence[int] | None = None,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Some of a rollout's completions, or all.

        Args:
            prompts: of each sequence the row of its prompt in the data.
            sequences: N of them.
            scores: [N].
            kl: [N] in nats, where there is a reference.
            rows: which sequences; none: all.
        """
        return [
            {
                "prompt": json.loads(self._prompts[prompts[row]]["prompt"]),
                "completion": self._said(sequences, row),
                "score": rounded(scores[row]),
                "kl": None if kl is None else rounded(kl[row]),
            }
            for row in (range(len(scores)) if rows is None else rows)
        ]

    def _said(self, sequences: Sequences, row: int) -> str:
        """All turns, and what was said between them."""
        places = sequences.response_mask[row].nonzero().flatten().tolist()
        tokens = sequences.input_ids[row, slice(places[0], places[-1] + 1) if places else slice(0)]
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
