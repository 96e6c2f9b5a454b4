"""The actor's loss on a micro-batch: the algorithm's own, an entropy bonus, the KL where it is a term of the loss.

All terms are sums over response tokens, weighed alike, divided once by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rlhf.algorithms.experience import Experience
from hybrid_rlhf.algorithms.on_policy import OnPolicyAlgorithm, Tokens
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.functional.aggregation import correction_weights, length_weights
from hybrid_rlhf.functional.divergences import KL_ESTIMATORS
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
        old = current if config.updates_once else rows_like(experience.old_logprobs, indices, mask)
        weights = length_weights(
            mask, normalisation=config.loss_normalisation, tokens=mini_batch.tokens, sequences=mini_batch.sequences,
            max_tokens=self._max_tokens,
        )  # fmt: skip
        stats: dict[str, Tensor] = {}
        if config.sampler_correction != "none":
            correction = correction_weights(
                old, sampler_logprobs=batch.drawn_logprobs, mask=mask, how=config.sampler_correction,
                clip=config.sampler_correction_clip,
            )  # fmt: skip
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
            kl = KL_ESTIMATORS[config.kl_estimator](logprobs, ref_logprobs=ref)
            total = total + mini_batch.kl_coef * masked_sum(weights * kl, mask=mask)
            stats["kl"] = masked_sum(kl.detach(), mask=mask)
        stats["entropy"] = masked_sum(entropy.detach(), mask=mask)
        return LossSum(total, loss.count, {**loss.stats, **stats}), current


def rows_like(tensor: Tensor, indices: list[int | None], mask: Tensor) -> Tensor:
    """Rows of tensor [N, T], cut to the width of mask."""
    index = torch.tensor([0 if i is None else i for i in indices], device=tensor.device)
    return tensor[index, : mask.shape[1]]
