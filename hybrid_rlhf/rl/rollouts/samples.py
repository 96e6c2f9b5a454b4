"""Records of rollouts: readable rows of samples.jsonl, and the values of each token.

`runtime/observability/token_records.py` writes and reads the arrays of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.functional.masking import masked_mean
from hybrid_rlhf.loop.non_finite import json_number
from hybrid_rlhf.rl.batch import Batch, Rollout
from hybrid_rlhf.rl.rollouts.exchange import run_lengths
from hybrid_rlhf.runtime.observability.token_records import COLUMN


class SampleTexts:
    """Decodes completions to text."""

    def __init__(self, prompts: Dataset, tokenizer: PreTrainedTokenizerBase) -> None:
        """Take the data set of the prompts, and the tokenizer."""
        self._prompts = prompts
        self._tokenizer = tokenizer

    def __call__(self, rollout: Rollout, rows: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Some rows of a scored rollout as text, with their scores; None for all rows.

        Each weight version has the number of tokens that it sampled; scores of components are unweighted.
        """
        assert rollout.prompt_rows is not None and rollout.groups is not None
        prompts = rollout.prompt_rows.tolist()
        scores = rollout.penalized_scores
        kl = rollout.kl
        return [
            {
                "index": row,
                "group": int(rollout.groups[row]),
                "prompt_row": prompts[row],
                "prompt": json.loads(self._prompts[prompts[row]]["prompt"]),
                "completion": sample_text(rollout, row, self._tokenizer),
                "length": int(rollout.response_mask[row].sum()),
                "stopped": bool(rollout.stopped[row]),
                "score": json_number(scores[row]),
                "components": {name: json_number(values[row]) for name, values in rollout.components.items()},
                "kl": None if kl is None else json_number(kl[row]),
                "weight_versions": run_lengths(rollout.weight_versions[row][rollout.response_mask[row]].tolist()),
            }
            for row in (range(len(scores)) if rows is None else rows)
        ]

    def of_batch(self, batch: Batch) -> list[dict[str, Any]]:
        """All rows of a batch, with the mean advantage of their tokens."""
        means = masked_mean(batch.advantages, mask=batch.rollout.response_mask, dim=1)
        return [{**row, "advantage": json_number(mean)} for row, mean in zip(self(batch.rollout), means, strict=True)]


def sample_text(rollout: Rollout, row: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """All turns of a row, and the observations between them."""
    places = rollout.response_mask[row].nonzero().flatten().tolist()
    tokens = rollout.input_ids[row, slice(places[0], places[-1] + 1) if places else slice(0)]
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def token_arrays(batch: Batch, ratios: Tensor | None = None) -> dict[str, np.ndarray]:
    """Token arrays of a batch without padding, in the format of `TokenRecord.of`; with `ratios` of its updates, if
    any."""
    rollout = batch.rollout
    mask = batch.rollout.response_mask
    prompts = torch.where(mask.any(dim=1), mask.int().argmax(dim=1), rollout.lengths)
    known: dict[str, Tensor | None] = {
        "logprobs": rollout.sampled_logprobs,
        "old_logprobs": rollout.old_logprobs,
        "ref_logprobs": rollout.ref_logprobs,
        "entropy": rollout.entropy,
        "values": rollout.old_values,
        "ratio": ratios,
        "advantages": batch.advantages,
        "returns": batch.returns,
        "rewards": batch.rewards,
        "weight_versions": rollout.weight_versions.int(),
    }
    arrays = {
        "offsets": _offsets(rollout.lengths),
        "response_offsets": _offsets(mask.sum(dim=1)),
        "prompt_lengths": prompts,
        "ids": rollout.input_ids[rollout.attention_mask].int(),
        "response": mask[rollout.attention_mask],
        **{f"{COLUMN}{name}": values[mask] for name, values in known.items() if values is not None},
    }
    return {name: values.cpu().numpy() for name, values in arrays.items()}


def _offsets(counts: Tensor) -> Tensor:
    """[N + 1] int64, where the entries of each row begin, and where the last end."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(dim=0)])
