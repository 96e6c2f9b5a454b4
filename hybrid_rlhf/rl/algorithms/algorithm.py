"""Base class of RL algorithms: the parts that differ between algorithms.

The trainer samples, scores, computes log-probs and updates. An algorithm chooses the completions to learn from, turns
rewards into advantages, and has a loss. It sees tensors only.

Shapes: N completions of a rollout on this rank, which has all completions of its prompts, B of a micro-batch, T time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from hybrid_rlhf.configs.sections.algorithm import (
    AlgorithmConfig,
    CorrectionConfig,
    EntropyConfig,
    PolicyGradientConfig,
    SurrogateConfig,
)
from hybrid_rlhf.functional.advantages import differs_in_group
from hybrid_rlhf.functional.losses import LossSum, clipped_surrogate
from hybrid_rlhf.functional.masking import keep
from hybrid_rlhf.rl.batch import Batch, Rollout


class Algorithm:
    """Trains on all completions with PPO's clipped surrogate; subclasses override what differs."""

    wants_greedy: ClassVar[bool] = False
    """True if each prompt gets one more completion, greedy, which is scored and not learned from."""
    whitens_completions: ClassVar[bool] = False
    """True if all tokens of a completion have one advantage, which is whitened over completions and not over tokens."""
    together: ClassVar[int] = 1
    """Number of neighbouring completions of a rollout that pass through the actor in one micro-batch."""

    def __init__(self, config: AlgorithmConfig, *, value_lam: float = 1.0) -> None:
        """Take the algorithm's settings, and the lambda of GAE for the critic's targets."""
        self.config = config
        self.value_lam = value_lam
        self.component_weights: Mapping[str, float] = {}
        """Weights of the reward's components by name; the run sets them."""

    @property
    def correction(self) -> CorrectionConfig | None:
        """Settings of the loss's correction for the sampler; None without a correction."""
        return self.config.correction if isinstance(self.config, PolicyGradientConfig) else None

    @property
    def entropy(self) -> EntropyConfig | None:
        """Settings of entropy control; None without it."""
        return self.config.entropy if isinstance(self.config, PolicyGradientConfig) else None

    def select(self, scores: Tensor, *, penalties: Tensor, groups: Tensor) -> Tensor:
        """Return which completions to train on, [N] bool, from scores [N], penalties [N] and groups [N]."""
        if self.config.dynamic_sampling is not None:
            return differs_in_group(scores, groups=groups)
        return torch.ones_like(scores, dtype=torch.bool)

    def advantages(self, rewards: Tensor, rollout: Rollout) -> Tensor:
        """Return the advantage of each token, [N, T], from rewards [N, T]: scores at the end, KL penalties per
        token. Every rank calls; `Rollout.total` sums over all ranks."""
        raise NotImplementedError

    def returns(self, rewards: Tensor, rollout: Rollout) -> Tensor | None:
        """Return the targets of the critic, [N, T]; None without a critic."""
        return None

    def loss(self, logprobs: Tensor, batch: Batch, *, weights: Tensor, tokens_per_completion: float) -> LossSum:
        """The actor's loss on a micro-batch, summed over its tokens.

        Args:
            logprobs: [B, T] of the current actor, with gradient.
            batch: the micro-batch.
            weights: [B, T] or [B, 1], weight of each token's loss, relative to a mean over the mini-batch's tokens.
            tokens_per_completion: mean over the mini-batch; turns a mean over tokens into one over completions.
        """
        assert isinstance(config := self.config, SurrogateConfig)
        return clipped_surrogate(
            log_ratios(logprobs, batch.rollout),
            advantages=batch.advantages,
            mask=batch.rollout.response_mask,
            clip_low=config.clip[0],
            clip_high=config.clip[1],
            dual_clip=config.dual_clip,
            weights=weights,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""


def groups_of(rollout: Rollout) -> Tensor:
    """Index of each completion's prompt, [N] int64."""
    assert rollout.groups is not None
    return rollout.groups


def log_ratios(logprobs: Tensor, rollout: Rollout) -> Tensor:
    """Log-ratio of each response token under the actor to the actor that sampled, [B, T]; 0 elsewhere."""
    assert rollout.old_logprobs is not None
    return keep(logprobs, rollout.response_mask) - keep(rollout.old_logprobs, rollout.response_mask)


def per_token(advantages: Tensor, rollout: Rollout) -> Tensor:
    """The advantage [N] of a whole completion at each of its response tokens, [N, T]."""
    mask = rollout.response_mask
    return keep(advantages[:, None].expand(mask.shape), mask)
