"""Online DPO: two completions of a prompt, judged by the reward, are a pair of DPO.

Source: Guo et al. 2024 (arXiv 2402.04792), section 3; DPO, Rafailov et al. 2023 (arXiv 2305.18290), eq. 7.

    loss = -log sigmoid(beta ((log p(w) - log ref(w)) - (log p(l) - log ref(l))))

Pairs of equal scores are left out. Deviation: the judge is any reward of step 3; an LLM's
preference is that of a judge of mode pairwise.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hybrid_rlhf.configs.algorithms import OnlineDPOConfig
from hybrid_rlhf.functional.advantages import differs_in_group, group_mean, group_size
from hybrid_rlhf.functional.losses import LossSum, policy_sum
from hybrid_rlhf.functional.masking import keep, row_sums
from hybrid_rlhf.rl.algorithms.algorithm import Algorithm, per_token
from hybrid_rlhf.rl.types import Batch, Rollout


class OnlineDPO(Algorithm):
    """Two neighbouring completions are a pair: advantage 1 for the better one, -1 for the worse one."""

    config: OnlineDPOConfig

    together = 2

    @property
    def score_clip(self) -> float | None:
        """See Algorithm."""
        return self.config.score_clip

    def select(self, scores: Tensor, *, penalties: Tensor, groups: Tensor) -> Tensor:
        """Return the complete pairs whose penalized scores differ, [N] bool."""
        return differs_in_group(scores - penalties, groups=groups) & (group_size(groups) == 2)

    def advantages(self, rewards: Tensor, rollout: Rollout) -> Tensor:
        """Return 1 for the better completion of each pair and -1 for the worse, at every response token, [N, T]."""
        outcomes = row_sums(rewards)
        return per_token(torch.sign(outcomes - group_mean(outcomes, groups=rollout.groups)), rollout)

    def loss(self, logprobs: Tensor, batch: Batch, *, weights: Tensor, tokens_per_completion: float) -> LossSum:
        """Return the DPO loss of the micro-batch's pairs, scaled like a sum over tokens."""
        rollout = batch.rollout
        mask = batch.rollout.response_mask
        assert rollout.ref_logprobs is not None and rollout.old_logprobs is not None
        log_ratio = keep(logprobs, mask) - keep(rollout.ref_logprobs, mask)
        margin = (keep(batch.advantages, mask) * log_ratio).sum(dim=1).view(-1, 2).sum(dim=1)
        there = mask.any(dim=1).view(-1, 2).all(dim=1)
        # A pair is two completions: its loss counts for both.
        pairs = torch.where(there, -logsigmoid(self.config.beta * margin), 0.0) * 2 * tokens_per_completion
        change = logprobs.detach() - rollout.old_logprobs
        counted = policy_sum(torch.zeros_like(log_ratio), log_ratio=change, mask=mask)
        return LossSum(pairs.sum(), counted.count, counted.stats)
