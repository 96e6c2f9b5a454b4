"""Records of rollouts: readable rows of samples.jsonl, and the values of each token.

`runtime/observability/token_records.py` writes and reads the arrays of tokens.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.data.chat.reasoning import text_decoder
from hybrid_rlhf.data.images.references import ImageReference
from hybrid_rlhf.functional.masking import masked_mean
from hybrid_rlhf.loop.non_finite import json_numbers
from hybrid_rlhf.rl.images import ImagesOf
from hybrid_rlhf.rl.rewards.components import read_prompt
from hybrid_rlhf.rl.types import Batch, Rollout
from hybrid_rlhf.runtime.observability.samples import SHOWN_IMAGES, recorded_images
from hybrid_rlhf.runtime.observability.token_records import COLUMN

_LONGEST_COLUMN = 1000
"""Characters: hidden tests of code would otherwise be written with each completion."""


class SampleTexts:
    """Decodes completions to text."""

    def __init__(self, prompts: Dataset, tokenizer: PreTrainedTokenizerBase, images_of: ImagesOf) -> None:
        """Take the data set of the prompts, the tokenizer, and what finds the images of rows."""
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._images_of = images_of

    def __call__(self, rollout: Rollout, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Rows of a scored rollout as text, with their numbers and scores.

        Each weight version has the number of tokens that it sampled; scores of components are unweighted.
        """
        assert rollout.prompt_rows is not None
        prompts = rollout.prompt_rows.tolist()
        mask = rollout.response_mask
        groups, stopped, lengths = (of.tolist() for of in (rollout.groups, rollout.stopped, mask.sum(dim=1)))
        versions = iter(rollout.weight_versions[mask].tolist())
        scores = json_numbers(rollout.penalized_scores)
        components = {name: json_numbers(values) for name, values in rollout.components.items()}
        images = self._images_of(rollout) or [[]] * len(rollout)
        kl = [None] * len(rollout) if rollout.kl is None else json_numbers(rollout.kl)
        return [
            {
                "index": number,
                "group": groups[row],
                "prompt_row": prompts[row],
                "prompt": read_prompt(self._prompts[prompts[row]]),
                "columns": _short(json.loads(self._prompts[prompts[row]]["columns"])),
                **self._images(prompts[row], images[row]),
                "completion": sample_text(rollout, row, self._tokenizer),
                "length": lengths[row],
                "stopped": stopped[row],
                "score": scores[row],
                "components": {name: values[row] for name, values in components.items()},
                "kl": kl[row],
                "weight_versions": [
                    (version, len(list(tokens)))
                    for version, tokens in itertools.groupby(itertools.islice(versions, lengths[row]))
                ],
            }
            for row, number in enumerate(numbers)
        ]

    def _images(self, prompt: int, images: Sequence[ImageReference]) -> dict[str, Any]:
        """The images of a prompt, and the others that its episode has shown."""
        own = recorded_images(self._prompts[prompt])
        digests = {image["digest"] for image in own}
        others = recorded_images({"images": [vars(image) for image in images if image.digest not in digests]})
        return {key: found for key, found in (("images", own), (SHOWN_IMAGES, others)) if found}

    def of_batch(self, batch: Batch, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Rows of a batch, with the mean advantage of their tokens."""
        means = masked_mean(batch.advantages, mask=batch.rollout.response_mask, dim=1)
        rows = self(batch.rollout, numbers)
        return [{**row, "advantage": mean} for row, mean in zip(rows, json_numbers(means), strict=True)]


def _short(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a row for people; a value that is long as JSON is the beginning of that text."""
    texts = {name: json.dumps(value, ensure_ascii=False) for name, value in columns.items()}
    return {
        name: value if len(texts[name]) <= _LONGEST_COLUMN else f"{texts[name][:_LONGEST_COLUMN]}..."
        for name, value in columns.items()
    }


def sample_text(rollout: Rollout, row: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """All turns of a row, and the observations between them."""
    places = rollout.response_mask[row].nonzero().flatten().tolist()
    tokens = rollout.input_ids[row, slice(places[0], places[-1] + 1) if places else slice(0)]
    return text_decoder(tokenizer)(tokens.tolist())


def token_rows(batch: Batch, ratios: Tensor | None = None) -> list[dict[str, np.ndarray]]:
    """Token arrays of each row of a batch without padding; with `ratios` of its updates, if any."""
    rollout = batch.rollout
    known: dict[str, Tensor | None] = {
        "logprobs": rollout.sampled_logprobs,
        "old_logprobs": rollout.old_logprobs,
        "ref_logprobs": rollout.ref_logprobs,
        "teacher_logprobs": rollout.teacher_logprobs,
        "entropy": rollout.entropy,
        "values": rollout.old_values,
        "ratio": ratios,
        "advantages": batch.advantages,
        "returns": batch.returns,
        "rewards": batch.rewards,
        "weight_versions": rollout.weight_versions.int(),
    }
    columns = {name: values.numpy() for name, values in known.items() if values is not None}
    rows = []
    for row, length in enumerate(rollout.lengths.tolist()):
        sampled = rollout.response_mask[row, :length].numpy()
        rows.append(
            {
                "ids": rollout.input_ids[row, :length].int().numpy(),
                "response": sampled,
                **{f"{COLUMN}{name}": values[row, :length][sampled] for name, values in columns.items()},
            }
        )
    return rows


def token_arrays(rows: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The arrays of a rollout from those of its rows, in the format of `TokenRecord.of`."""
    responses = [row["response"] for row in rows]
    prompts = [int(sampled.argmax()) if sampled.any() else len(sampled) for sampled in responses]
    return {
        "offsets": _offsets([len(sampled) for sampled in responses]),
        "response_offsets": _offsets([int(sampled.sum()) for sampled in responses]),
        "prompt_lengths": np.array(prompts, np.int64),
        **{name: np.concatenate([row[name] for row in rows]) for name in rows[0]},
    }


def _offsets(counts: Sequence[int]) -> np.ndarray:
    """[N + 1] int64, where the entries of each row begin, and where the last end."""
    return np.cumsum([0, *counts], dtype=np.int64)
