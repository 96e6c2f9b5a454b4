"""Online DPO: two completions of a prompt, judged by the reward, are a pair of DPO.

Source: Guo et al. 2024 (arXiv 2402.04792), section 3; DPO, Rafailov et al. 2023 (arXiv 2305.18290), eq. 7.

    loss = -log sigmoid(beta ((log p(w) - log ref(w)) - (log p(l) - log ref(l))))

Pairs of equal scores are left out. Deviation: the judge is any reward of step 3, not an LLM's preference.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hybrid_rlhf.algorithms.on_policy.algorithm import Estimate, Judged, OnPolicyAlgorithm, Tokens
from hybrid_rlhf.functional.groups import differs_in_group, group_mean, group_size
from hybrid_rlhf.functional.losses import LossSum, policy_sum
from hybrid_rlhf.functional.masking import keep


class OnlineDPO(OnPolicyAlgorithm):
    """A pair's neighbours, the better with advantage 1, the worse with -1."""

    together = 2

    def select(self, scores: Tensor, *, penalties: Tensor, groups: Tensor) -> Tensor:
        """See OnPolicyAlgorithm: pairs whose scores differ; one that lost its other is none."""
        return differs_in_group(scores - penalties, groups=groups) & (group_size(groups) == 2)

    def estimate(self, judged: Judged) -> Estimate:
        """See OnPolicyAlgorithm."""
        outcomes = judged.outcomes
        return Estimate(judged.spread(torch.sign(outcomes - group_mean(outcomes, groups=judged.groups))))

    def loss(self, tokens: Tokens) -> LossSum:
        """See OnPolicyAlgorithm."""
        assert tokens.ref_logprobs is not None
        mask = tokens.mask
        log_ratio = keep(tokens.logprobs, mask) - keep(tokens.ref_logprobs, mask)
        lead = (keep(tokens.advantages, mask) * log_ratio).sum(dim=1).view(-1, 2).sum(dim=1)
        there = mask.any(dim=1).view(-1, 2).all(dim=1)
        # A pair is two completions: its loss stands for both.
        pairs = torch.where(there, -logsigmoid(self.config.beta * lead), 0.0) * 2 * tokens.tokens_per_completion
        change = tokens.logprobs.detach() - tokens.old_logprobs
        counted = policy_sum(torch.zeros_like(log_ratio), log_ratio=change, mask=mask)
        return LossSum(pairs.sum(), counted.count, counted.stats)
