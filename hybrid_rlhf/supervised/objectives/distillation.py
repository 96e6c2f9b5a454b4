"""Knowledge distillation: a student learns a teacher's distribution at each token of the completions.

Completions are those of the data, or the student's own in a fraction distill.on_policy_fraction of the updates (GKD).
The loss is divided once by the tokens of the whole update, as in SFT.

Sources: Hinton et al. 2015 (arXiv 1503.02531); MiniLLM (arXiv 2306.08543); GKD (arXiv 2306.13649), algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.sft import DistillConfig
from hybrid_rlhf.data.chat.conversation import stop_token_ids
from hybrid_rlhf.data.collation import TokenBatch, collate_tokens
from hybrid_rlhf.data.images.references import tokenised_images
from hybrid_rlhf.data.packing import row_sequences
from hybrid_rlhf.data.row_views import RowSequence, augmented_rows
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.engines.hybrid import HybridEngine
from hybrid_rlhf.engines.partition import gathered
from hybrid_rlhf.functional.distillation import DistillationRule
from hybrid_rlhf.functional.losses import LossSum
from hybrid_rlhf.generation.sampling import SamplingParams, derive_seed
from hybrid_rlhf.loop.setup import pad_token
from hybrid_rlhf.models.distillation import Teacher
from hybrid_rlhf.models.policy import TeacherTargets
from hybrid_rlhf.supervised.trainer import Objective

_Sequence = tuple[Mapping[str, Any] | None, tuple[list[int], SamplingParams] | None]
"""A sequence of a row with its prompt and sampling parameters, which are None for text and padding."""


@dataclass(frozen=True)
class DistillBatch:
    """A micro-batch with the rows that it was made of."""

    tokens: TokenBatch
    rows: Sequence[Mapping[str, Any] | None]
    """Rows of the data, packed or not; with `place` where completions may be sampled."""
    on_policy: bool = False
    """True if the completions are sampled from the student."""


class DistillObjective(Objective[DistillBatch]):
    """Divergence from a teacher, plus SFT loss by sft_coef."""

    name = "distill"

    def __init__(
        self,
        config: DistillConfig,
        teacher: ModelEngine,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int,
        max_length: int,
        has_images: bool = False,
    ) -> None:
        """Take the teacher's engine, the tokenizer of both models, the run's seed, the longest row in tokens and
        whether rows have images."""
        super().__init__(pad_token_id=pad_token(tokenizer), device=teacher.device, has_images=has_images)
        self._teacher = teacher
        self._tokenizer = tokenizer
        self._config = config
        self._seed = seed
        self._max_length = max_length
        self.packs = teacher.packs

    def collate(self, rows: Sequence[Mapping[str, Any] | None]) -> DistillBatch:
        """Collate the rows as tokens, and keep the rows."""
        return DistillBatch(self._tokens(rows), rows)

    def _tokens(self, rows: Sequence[Mapping[str, Any] | None]) -> TokenBatch:
        return self.with_images(collate_tokens(rows, self._pad_token_id), rows)

    def resample(self, engine: ModelEngine, batches: Sequence[DistillBatch], *, step: int) -> Sequence[DistillBatch]:
        """In updates chosen by a seeded draw, replace the completions of the data by the student's own."""
        draw = np.random.default_rng(derive_seed(self._seed, step)).random()
        if not isinstance(engine, HybridEngine) or draw >= self._config.on_policy_fraction:
            return batches
        sequences_of = [self._sequences(batch, step) for batch in batches]
        asked = [(row, request) for pairs in sequences_of for row, request in pairs if row is not None and request]
        generation_config = engine.lm.generation_config
        stop = stop_token_ids(self._tokenizer, generation_config.eos_token_id if generation_config else None)
        with engine.inference(stop_token_ids=stop) as generation:
            reader = generation.image_reader() if self._has_images and generation.image_reader else None
            completions = iter(
                generation.generate(
                    [prompt for _, (prompt, _) in asked],
                    [params for _, (_, params) in asked],
                    images=[]
                    if reader is None
                    else [reader.prompt_images(prompt, tokenised_images(row)) for row, (prompt, _) in asked],
                )
            )
        replaced = []
        for batch, pairs in zip(batches, sequences_of, strict=True):
            rows = [
                row if row is None or request is None else _completed(row, request[0], next(completions))
                for row, request in pairs
            ]
            replaced.append(DistillBatch(self._tokens(rows), batch.rows, on_policy=True))
        return replaced

    def count(self, batch: DistillBatch) -> int:
        """Number of tokens with loss."""
        return int(batch.tokens.loss_mask.sum())

    def masks(self, batch: DistillBatch) -> tuple[Tensor, Tensor]:
        """See Objective."""
        return batch.tokens.attention_mask, batch.tokens.loss_mask

    def loss(self, engine: ModelEngine, batch: DistillBatch) -> LossSum:
        """Return the divergence from the teacher plus the SFT loss, summed over the tokens with loss."""
        tokens = batch.tokens
        config = self._config
        rule = DistillationRule(
            config.divergence, config.beta, config.temperature, 0.0 if batch.on_policy else config.sft_coef
        )
        inputs = (tokens.input_ids, tokens.attention_mask, tokens.loss_mask)
        module = self._teacher.module
        assert isinstance(module, Teacher)
        with torch.no_grad():
            hidden = self._teacher(*inputs, images=tokens.images)
        with gathered(module.head.parameters()):
            targets = TeacherTargets(hidden, module.head, rule)
            total, divergence, nll = engine(*inputs, images=tokens.images, targets=targets)
        count = torch.full((), float(self.count(batch)), device=self._device)
        loss = LossSum(total, count, {"divergence": divergence, "sft": nll, "on_policy": count * batch.on_policy})
        return engine.with_router_losses(loss, tokens.for_loss(self._device).loss_mask.sum(dim=1))

    def metrics(self, means: Mapping[str, float], prefix: str) -> dict[str, float]:
        """Means per token; sft is the negative log-likelihood of the completions, sampled or not."""
        metrics = {f"{prefix}/{name}": means[name] for name in ("loss", "divergence", "sft")}
        metrics[f"{prefix}/perplexity"] = math.exp(min(means["sft"], 700.0))
        return metrics | ({f"{prefix}/on_policy": means["on_policy"]} if prefix == self.name else {})

    def _sequences(self, batch: DistillBatch, step: int) -> list[_Sequence]:
        """The sequences of a micro-batch."""
        sequences: list[_Sequence] = []
        for row in batch.rows:
            for number, sequence in enumerate(row_sequences(row)):
                begin = 0 if sequence is None or sequence["is_text"] else last_completion_start(sequence["loss_mask"])
                if row is None or sequence is None or begin == 0:
                    sequences.append((sequence, None))
                    continue
                sampling = self._config.sampling
                params = replace(
                    sampling,
                    max_new_tokens=min(sampling.max_new_tokens, self._max_length - begin),
                    seed=derive_seed(self._seed, step, row["place"], number),
                )
                sequences.append((sequence, (sequence["input_ids"][:begin], params)))
        return sequences


def _completed(row: Mapping[str, Any], prompt: list[int], completions: Sequence[Any]) -> dict[str, Any]:
    """A row made of a prompt and its sampled completion, with the images of a row."""
    sampled = list(completions[0].token_ids)
    mask = [False] * len(prompt) + [True] * len(sampled)
    return {"input_ids": prompt + sampled, "loss_mask": mask, "images": row.get("images")}


def last_completion_start(loss_mask: Sequence[bool]) -> int:
    """Position at which the last assistant turn of a conversation begins; 0 if no prompt precedes it."""
    place = len(loss_mask)
    while place and not loss_mask[place - 1]:
        place -= 1
    while place and loss_mask[place - 1]:
        place -= 1
    return place


def with_row_numbers(rows: RowSequence, config: DistillConfig, *, max_length: int) -> RowSequence:
    """Rows with their index, the key of the random stream of their samples, and room for a sampled completion."""
    if not config.on_policy_fraction:
        return rows
    lengths = list(rows["length"])
    limit = max_length
    packed = "padded_tokens" in rows.column_names
    most = list(rows["padded_tokens"]) if packed else [limit] * len(lengths)
    grown = [min(m, n + m // limit * config.sampling.max_new_tokens) for n, m in zip(lengths, most, strict=True)]
    return augmented_rows(rows, lambda place, _: {"place": place}, {"length": grown})
