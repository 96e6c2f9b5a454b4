"""RAFT, rejection sampling with fine-tuning: supervised learning on the best completions of each prompt, step by step.

Source: Dong et al. 2023 (arXiv 2304.06767), algorithm 1; the rejection sampling of Llama 2 (arXiv 2307.09288, section
3.2.3). It learns from the best of n completions; algorithm.selected_per_prompt selects more than one per prompt,
algorithm.select_above drops those that score no higher than it.

    loss = -mean_t log p_t

Deviations: each rollout is sampled by the actor after the last step. A prompt whose completions have equal scores is
skipped, as none of them is the best, and all may be wrong.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_rlhf.configs.algorithms import RAFTConfig
from hybrid_rlhf.functional.advantages import differs_in_group, rank_in_group
from hybrid_rlhf.functional.losses import LossSum, policy_sum
from hybrid_rlhf.functional.masking import keep
from hybrid_rlhf.rl.algorithms.algorithm import Algorithm, per_token
from hybrid_rlhf.rl.types import Batch, Rollout


class RAFT(Algorithm):
    """Negative log-likelihood of the best completions."""

    config: RAFTConfig

    @property
    def why_none_is_selected(self) -> str:
        """See Algorithm."""
        least = self.config.select_above
        above = "" if least is None else f", or none is above algorithm.select_above {least}"
        return super().why_none_is_selected + above

    def select(self, scores: Tensor, *, penalties: Tensor, groups: Tensor) -> Tensor:
        """Return the best selected_per_prompt completions of prompts whose scores differ, [N] bool."""
        ranked = scores - penalties
        least = self.config.select_above
        best = rank_in_group(ranked, groups=groups) < self.config.selected_per_prompt
        if least is not None:
            best &= ranked > least
        return best & differs_in_group(scores, groups=groups)

    def advantages(self, rewards: Tensor, rollout: Rollout) -> Tensor:
        """Return 1 at every response token: all selected completions have the same weight, [N, T]."""
        return per_token(torch.ones_like(rewards.sum(dim=1)), rollout)

    def loss(self, logprobs: Tensor, batch: Batch, *, weights: Tensor, tokens_per_completion: float) -> LossSum:
        """Return the negative log-likelihood, summed over the tokens of a micro-batch."""
        mask = batch.rollout.response_mask
        old_logprobs = batch.rollout.old_logprobs
        assert old_logprobs is not None
        logprobs = keep(logprobs, mask)
        return policy_sum(-logprobs, log_ratio=logprobs.detach() - old_logprobs, mask=mask, weights=weights)
