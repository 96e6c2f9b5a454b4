"""Knowledge distillation: a student learns a teacher's whole distribution at each token of an answer.

The answers are the data's, or, in as many updates as distill.on_policy_fraction says, the student's own (GKD). Each is
divided once by the tokens of the whole update, as in SFT.

Sources: Hinton et al. 2015 (arXiv 1503.02531); MiniLLM (arXiv 2306.08543); GKD (arXiv 2306.13649), algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.algorithms.starting import pad_token, require_same_tokens, resolve
from hybrid_rlhf.algorithms.supervised import Objective
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.data.augmented import AugmentedRows, Rows
from hybrid_rlhf.data.bins import sequences
from hybrid_rlhf.data.chat import stop_token_ids
from hybrid_rlhf.data.collation import TokenBatch, collate_tokens
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.engines.hybrid import HybridEngine
from hybrid_rlhf.engines.partition import gathered
from hybrid_rlhf.functional.distillation import DistillationRule
from hybrid_rlhf.functional.losses import LossSum
from hybrid_rlhf.generation.sampling import SamplingParams, derive_seed
from hybrid_rlhf.models.distillation import Lesson, Teacher
from hybrid_rlhf.runtime.run import Run


@dataclass(frozen=True)
class DistillBatch:
    """A micro-batch, and what it was made of."""

    tokens: TokenBatch
    rows: Sequence[Mapping[str, Any] | None]
    """Of the data, packed or not; with `place` where answers may be sampled."""
    on_policy: bool = False
    """Whether the answers are the student's."""


class DistillObjective(Objective[DistillBatch]):
    """Divergence from a teacher."""

    name = "distill"

    def __init__(self, config: SFTConfig, teacher: ModelEngine, tokenizer: PreTrainedTokenizerBase) -> None:
        """Take the step's config, the teacher's engine and the tokenizer of both."""
        self._teacher, self._tokenizer, self._device = teacher, tokenizer, teacher.device
        self._config, self._seed, self._max_length = config.distill, config.seed, config.data.max_length
        self._pad_token_id = pad_token(tokenizer)
        self.packs = teacher.packs

    def collate(self, rows: Sequence[Mapping[str, Any] | None]) -> DistillBatch:
        """See Objective."""
        return DistillBatch(collate_tokens(rows, self._pad_token_id).to(self._device), rows)

    def resample(self, engine: ModelEngine, batches: Sequence[DistillBatch], *, step: int) -> Sequence[DistillBatch]:
        """See Objective: with the seeded chance of an update, the student answers in place of the data."""
        chance = np.random.default_rng(derive_seed(self._seed, step)).random()
        if not isinstance(engine, HybridEngine) or chance >= self._config.on_policy_fraction:
            return batches
        parts = [self._sequences(batch, step) for batch in batches]
        asked = [request for part in parts for _, request in part if request is not None]
        generation_config = engine.lm.generation_config
        stop = stop_token_ids(self._tokenizer, generation_config.eos_token_id if generation_config else None)
        with engine.inference(stop_token_ids=stop) as generation:
            answers = iter(generation.generate([prompt for prompt, _ in asked], [params for _, params in asked]))
        replaced = []
        for batch, part in zip(batches, parts, strict=True):
            answered = [row if request is None else _answered(request[0], next(answers)) for row, request in part]
            tokens = collate_tokens(answered, self._pad_token_id).to(self._device)
            replaced.append(DistillBatch(tokens, batch.rows, on_policy=True))
        return replaced

    def count(self, batch: DistillBatch) -> int:
        """See Objective: tokens with loss."""
        return int(batch.tokens.loss_mask.sum())

    def tokens(self, batch: DistillBatch) -> int:
        """See Objective."""
        return int(batch.tokens.attention_mask.sum())

    def loss(self, engine: ModelEngine, batch: DistillBatch) -> LossSum:
        """See Objective."""
        tokens, config = batch.tokens, self._config
        rule = DistillationRule(
            config.divergence, config.beta, config.temperature, 0.0 if batch.on_policy else config.sft_coef
        )
        inputs = (tokens.input_ids, tokens.attention_mask, tokens.loss_mask)
        module = self._teacher.module
        assert isinstance(module, Teacher)
        with torch.no_grad():
            hidden = self._teacher(*inputs)
        with gathered(module.head.parameters()):
            total, apart, nll = engine(*inputs, lesson=Lesson(hidden, module.head, rule))
        count = torch.tensor(float(self.count(batch)), device=self._device)
        return LossSum(total, count, {"divergence": apart, "sft": nll, "on_policy": count * batch.on_policy})

    def metrics(self, means: Mapping[str, float], prefix: str) -> dict[str, float]:
        """See Objective: sft is the negative log-likelihood a token of the answers, whoever gave them."""
        told = {f"{prefix}/{name}": means[name] for name in ("loss", "divergence", "sft")}
        told[f"{prefix}/perplexity"] = math.exp(min(means["sft"], 700.0))
        return told | ({f"{prefix}/on_policy": means["on_policy"]} if prefix == self.name else {})

    def _sequences(
        self, batch: DistillBatch, step: int
    ) -> list[tuple[Mapping[str, Any] | None, tuple[list[int], SamplingParams] | None]]:
        """Each sequence of a micro-batch, with its prompt and how to sample; plain text and padding have none."""
        found: list[tuple[Mapping[str, Any] | None, tuple[list[int], SamplingParams] | None]] = []
        for row in batch.rows:
            for number, sequence in enumerate(sequences(row)):
                begin = 0 if sequence is None or sequence["is_text"] else last_answer(sequence["loss_mask"])
                if row is None or sequence is None or begin == 0:
                    found.append((sequence, None))
                    continue
                params = SamplingParams(
                    max_new_tokens=min(self._config.max_new_tokens, self._max_length - begin),
                    temperature=self._config.sampling_temperature,
                    seed=derive_seed(self._seed, step, row["place"], number),
                )
                found.append((sequence, (sequence["input_ids"][:begin], params)))
        return found


def _answered(prompt: list[int], completions: Sequence[Any]) -> dict[str, Any]:
    """A row of a prompt and its one sampled answer."""
    answer = list(completions[0].token_ids)
    return {"input_ids": prompt + answer, "loss_mask": [False] * len(prompt) + [True] * len(answer)}


def last_answer(loss_mask: Sequence[bool]) -> int:
    """Where the last answer of a conversation begins; 0: it has no prompt."""
    place = len(loss_mask)
    while place and not loss_mask[place - 1]:
        place -= 1
    while place and loss_mask[place - 1]:
        place -= 1
    return place


def with_places(rows: Rows, config: SFTConfig) -> Rows:
    """Rows that know their place, the key of what is sampled for them, and may grow by a sampled answer."""
    if not config.distill.on_policy_fraction:
        return rows
    lengths, limit = list(rows["length"]), config.data.max_length
    packed = "padded_tokens" in rows.column_names
    most = list(rows["padded_tokens"]) if packed else [limit] * len(lengths)
    grown = [min(m, n + m // limit * config.distill.max_new_tokens) for n, m in zip(lengths, most, strict=True)]
    return AugmentedRows(rows, lambda place, _: {"place": place}, columns={"length": grown})


def find_teacher(config: SFTConfig, run: Run, tokenizer: PreTrainedTokenizerBase) -> str:
    """Where the teacher is.

    Raises:
        UserError: when there is none, or its tokens are not the student's.
    """
    path = resolve(config, run, config.distill.teacher, key="distill.teacher")
    require_same_tokens("teacher", path, tokenizer, config.model, learner="student")
    return path
