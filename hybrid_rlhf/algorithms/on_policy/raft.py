"""RAFT, rejection sampling with fine-tuning: supervised learning on the best completions of each prompt, step by step.

Source: Dong et al. 2023 (arXiv 2304.06767), algorithm 1; the rejection sampling of Llama 2 (arXiv 2307.09288,
section 3.2.3). The best of n is learned from; with ppo.selected_per_prompt the best few.

    loss = -mean_t log p_t

Deviation: the actor that samples is the one that the last step left, so it iterates with every rollout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_rlhf.algorithms.on_policy.algorithm import Estimate, Judged, OnPolicyAlgorithm, Tokens
from hybrid_rlhf.functional.groups import rank_in_group
from hybrid_rlhf.functional.losses import LossSum, policy_sum
from hybrid_rlhf.functional.masking import keep


class RAFT(OnPolicyAlgorithm):
    """Negative log-likelihood of the best."""

    def select(self, scores: Tensor, *, penalties: Tensor, groups: Tensor) -> Tensor:
        """See OnPolicyAlgorithm."""
        best = rank_in_group(scores - penalties, groups=groups) < self.config.selected_per_prompt
        return best & super().select(scores, penalties=penalties, groups=groups)

    def estimate(self, judged: Judged) -> Estimate:
        """See OnPolicyAlgorithm: all that is left counts alike."""
        return Estimate(judged.spread(torch.ones_like(judged.outcomes)))

    def loss(self, tokens: Tokens) -> LossSum:
        """See OnPolicyAlgorithm."""
        logprobs = keep(tokens.logprobs, tokens.mask)
        log_ratio = logprobs.detach() - tokens.old_logprobs
        return policy_sum(-logprobs, log_ratio=log_ratio, mask=tokens.mask, weights=tokens.weights)
