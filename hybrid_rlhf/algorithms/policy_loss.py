"""The actor's loss on a micro-batch: the algorithm's own, an entropy bonus, the KL where it is a term of the loss.

All terms are sums over response tokens, weighed alike, divided once by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rlhf.algorithms.experience import Experience, Sequences
from hybrid_rlhf.algorithms.on_policy import OnPolicyAlgorithm, Tokens
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.functional.aggregation import correction_weights, length_weights
from hybrid_rlhf.functional.divergences import kl_loss
from hybrid_rlhf.functional.losses import LossSum
from hybrid_rlhf.functional.masking import masked_sum


@dataclass(frozen=True)
class MiniBatch:
    """What a micro-batch must know of the mini-batch it is a part of."""

    tokens: float
    """Response tokens, over all ranks: what losses are divided by."""
    sequences: float
    """Over all ranks."""
    kl_coef: float = 0.0
    """Of the KL in the loss."""
    kept_tokens: float | None = None
    """Of the tokens those that a correction keeps, where the loss is divided by these."""


class PolicyLoss:
    """Computes it with an actor."""

    def __init__(
        self, actor: ModelEngine, algorithm: OnPolicyAlgorithm, *, temperature: float, max_tokens: int
    ) -> None:
        """Args: the actor, the algorithm, and the rollout's temperature and longest completion."""
        self._actor, self._algorithm, self._config = actor, algorithm, algorithm.config
        self._temperature, self._max_tokens = temperature, max_tokens

    def __call__(
        self, experience: Experience, indices: list[int | None], mini_batch: MiniBatch
    ) -> tuple[LossSum, Tensor]:
        """The loss on rows of experience, and the log-probs [n, t] it was computed from, without gradient."""
        config, batch = self._config, experience.sequences.rows(indices)
        mask = batch.response_mask
        logprobs, entropy = self._actor(batch.input_ids, batch.attention_mask, mask, self._temperature)
        current = logprobs.detach()
        old = rows_like(experience.old_logprobs, indices, mask) if config.reads_old_logprobs else current
        correction = self._correction(old, batch)
        weights = length_weights(
            mask, normalisation=config.loss_normalisation, tokens=mini_batch.tokens, sequences=mini_batch.sequences,
            max_tokens=self._max_tokens, kept=None if correction is None or config.masked_tokens_count else correction,
            kept_tokens=mini_batch.kept_tokens,
        )  # fmt: skip
        stats: dict[str, Tensor] = {}
        if correction is not None:
            weights = weights * correction
            stats["correction"] = masked_sum(correction, mask=mask)
        ref = None if experience.ref_logprobs is None else rows_like(experience.ref_logprobs, indices, mask)
        advantages = rows_like(experience.advantages, indices, mask)
        each = mini_batch.tokens / max(mini_batch.sequences, 1)
        loss = self._algorithm.loss(Tokens(logprobs, old, advantages, mask, weights, ref, each))
        total = loss.total
        if config.entropy_coef:
            total = total - config.entropy_coef * masked_sum(weights * entropy, mask=mask)
        if config.kl_in == "loss" and ref is not None:
            assert config.kl_estimator != "k1"
            kl = kl_loss(logprobs, old_logprobs=old, ref_logprobs=ref, estimator=config.kl_estimator)
            total = total + mini_batch.kl_coef * masked_sum(weights * kl, mask=mask)
            stats["kl"] = masked_sum(kl.detach(), mask=mask)
        stats["entropy"] = masked_sum(entropy.detach(), mask=mask)
        return LossSum(total, loss.count, {**loss.stats, **stats}), current

    def kept(self, experience: Experience) -> Tensor:
        """[N, T] bool, the response tokens that ppo.sampler_correction does not leave out."""
        sequences = experience.sequences
        correction = self._correction(experience.old_logprobs, sequences)
        return sequences.response_mask if correction is None else sequences.response_mask & (correction > 0)

    def _correction(self, old: Tensor, sequences: Sequences) -> Tensor | None:
        """[n, t] weights of tokens for who sampled them, by log-probs of the actor then; none: ppo has no such."""
        config = self._config
        if config.sampler_correction == "none":
            return None
        return correction_weights(
            old, sampler_logprobs=sequences.drawn_logprobs, mask=sequences.response_mask,
            how=config.sampler_correction, clip=config.sampler_correction_clip, low=config.sampler_correction_low,
        )  # fmt: skip


def rows_like(tensor: Tensor, indices: list[int | None], mask: Tensor) -> Tensor:
    """Rows of tensor [N, T], cut to the width of mask."""
    index = torch.tensor([0 if i is None else i for i in indices], device=tensor.device)
    return tensor[index, : mask.shape[1]]
