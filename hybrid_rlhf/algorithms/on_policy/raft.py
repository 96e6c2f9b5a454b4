"""RAFT, rejection sampling with fine-tuning: supervised learning on the best completions of each prompt, step by step.

Source: Dong et al. 2023 (arXiv 2304.06767), algorithm 1; the rejection sampling of Llama 2 (arXiv 2307.09288,
section 3.2.3). The best of n is learned from; with ppo.selected_per_prompt the best few; with ppo.select_above those
of them that score above it.

    loss = -mean_t log p_t

Deviations: the actor that samples is the one that the last step left, so it iterates with every rollout. A prompt whose
completions all score alike is skipped: none of them is the best, and all may be wrong.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_rlhf.algorithms.on_policy.algorithm import Estimate, Judged, OnPolicyAlgorithm, Tokens
from hybrid_rlhf.functional.groups import differs_in_group, rank_in_group
from hybrid_rlhf.functional.losses import LossSum, policy_sum
from hybrid_rlhf.functional.masking import keep


class RAFT(OnPolicyAlgorithm):
    """Negative log-likelihood of the best."""

    def select(self, scores: Tensor, *, penalties: Tensor, groups: Tensor) -> Tensor:
        """See OnPolicyAlgorithm."""
        ranked, least = scores - penalties, self.config.select_above
        best = rank_in_group(ranked, groups=groups) < self.config.selected_per_prompt
        if least is not None:
            best &= ranked > least
        return best & differs_in_group(scores, groups=groups)

    def estimate(self, judged: Judged) -> Estimate:
        """See OnPolicyAlgorithm: all that is left counts alike."""
        return Estimate(judged.spread(torch.ones_like(judged.outcomes)))

    def loss(self, tokens: Tokens) -> LossSum:
        """See OnPolicyAlgorithm."""
        logprobs = keep(tokens.logprobs, tokens.mask)
        log_ratio = logprobs.detach() - tokens.old_logprobs
        return policy_sum(-logprobs, log_ratio=log_ratio, mask=tokens.mask, weights=tokens.weights)
