"""What an on-policy algorithm adds to the loop that all of them share.

The loop samples, scores, reads log-probs and updates; an algorithm says which completions it learns from, what they
were worth, and the loss that follows. It sees tensors only.

Shapes: N completions of a rollout over all ranks, B of a micro-batch, T time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hybrid_rlhf.configs.on_policy import AlgorithmConfig
from hybrid_rlhf.functional.groups import differs_in_group
from hybrid_rlhf.functional.losses import LossSum, ppo_policy_loss
from hybrid_rlhf.functional.masking import keep


@dataclass(frozen=True)
class Judged:
    """What the completions of a rollout were given."""

    rewards: Tensor
    """[N, T] float32, shaped: scores at the end, a penalty of the KL on each token where it is in the reward."""
    mask: Tensor
    """[N, T] bool, true on response tokens."""
    groups: Tensor
    """[N] int64, the prompt of each."""
    values: Tensor | None = None
    """[N, T] float32 of the critic, where there is one."""
    greedy_scores: Tensor | None = None
    """[N] float32, of the greedy completion of each one's prompt, where the algorithm asks for it."""

    @property
    def outcomes(self) -> Tensor:
        """[N] all that a completion was given."""
        return self.rewards.sum(dim=1)

    def spread(self, advantages: Tensor) -> Tensor:
        """[N, T] an advantage [N] of a whole completion, on each of its tokens."""
        return keep(advantages[:, None].expand_as(self.rewards), self.mask)


@dataclass(frozen=True)
class Estimate:
    """What followed from the rewards."""

    advantages: Tensor
    """[N, T]."""
    returns: Tensor | None = None
    """[N, T] targets of the critic, where there is one."""


@dataclass(frozen=True)
class Tokens:
    """A micro-batch under the current actor."""

    logprobs: Tensor
    """[B, T], with gradient."""
    old_logprobs: Tensor
    """[B, T], of the actor that sampled."""
    advantages: Tensor
    """[B, T]."""
    mask: Tensor
    """[B, T] bool."""
    weights: Tensor
    """[B, T] or [B, 1], of each token's loss, relative to a mean over the mini-batch's tokens."""
    ref_logprobs: Tensor | None
    """[B, T], where there is a reference."""
    tokens_per_completion: float
    """Response tokens of the mini-batch over its completions: what turns a mean over tokens into one over these."""


class OnPolicyAlgorithm:
    """Learns from all completions alike, by the clipped surrogate of PPO; an algorithm overrides what it does else."""

    wants_greedy: ClassVar[bool] = False
    """Whether each prompt gets one more completion, greedy, that is scored and not learned from."""
    together: ClassVar[int] = 1
    """Completions, neighbours in a rollout, that pass through the actor in one micro-batch."""

    def __init__(self, config: AlgorithmConfig, *, value_lam: float = 1.0) -> None:
        """Args: the keys of `ppo`, and the lambda of the returns that a critic learns."""
        self.config, self.value_lam = config, value_lam

    def select(self, scores: Tensor, *, penalties: Tensor, groups: Tensor) -> Tensor:
        """[N] bool, the completions to learn from, by their scores [N], what is subtracted [N] and prompts [N]."""
        if self.config.dynamic_sampling:
            return differs_in_group(scores, groups=groups)
        return torch.ones_like(scores, dtype=torch.bool)

    def estimate(self, judged: Judged) -> Estimate:
        """What each token was worth beyond expectation."""
        raise NotImplementedError

    def loss(self, tokens: Tokens) -> LossSum:
        """The actor's loss on a micro-batch, summed over its tokens."""
        config = self.config
        return ppo_policy_loss(
            tokens.logprobs, old_logprobs=tokens.old_logprobs, advantages=tokens.advantages, mask=tokens.mask,
            clip_low=config.clip_low, clip_high=config.clip_high, dual_clip=config.dual_clip, weights=tokens.weights,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
