"""Completions of a rollout as readable rows of samples.jsonl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.loop.non_finite import json_number
from hybrid_rlhf.rl.batch import Rollout
from hybrid_rlhf.rl.rollouts.exchange import run_lengths


class SampleTexts:
    """Writes completions out as text."""

    def __init__(self, prompts: Dataset, tokenizer: PreTrainedTokenizerBase) -> None:
        """Take the data set of the prompts, and the tokenizer."""
        self._prompts, self._tokenizer = prompts, tokenizer

    def __call__(self, rollout: Rollout, rows: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Prompt, completion, score, KL and weight versions of some rows of a scored rollout; none: of all.

        Weight versions are written with the number of tokens that each sampled.
        """
        assert rollout.prompt_rows is not None
        prompts, scores, kl = rollout.prompt_rows.tolist(), rollout.penalized_scores, rollout.kl
        return [
            {
                "prompt": json.loads(self._prompts[prompts[row]]["prompt"]),
                "completion": self._text(rollout, row),
                "score": json_number(scores[row]),
                "kl": None if kl is None else json_number(kl[row]),
                "weight_versions": run_lengths(rollout.weight_versions[row][rollout.response_mask[row]].tolist()),
            }
            for row in (range(len(scores)) if rows is None else rows)
        ]

    def _text(self, rollout: Rollout, row: int) -> str:
        """All turns, and the observations between them."""
        places = rollout.response_mask[row].nonzero().flatten().tolist()
        tokens = rollout.input_ids[row, slice(places[0], places[-1] + 1) if places else slice(0)]
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
