"""Base class of RL algorithms: the parts that differ between algorithms.

The trainer samples, scores, computes log-probs and updates. An algorithm chooses the completions to learn from, turns
rewards into advantages, and has a loss. It sees tensors only.

Shapes: N completions of a rollout on this rank, which has all completions of its prompts, B of a micro-batch, T time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from hybrid_rlhf.configs.sections.algorithm import (
    AlgorithmConfig,
    ClippedConfig,
    CorrectionConfig,
    EntropyConfig,
    PolicyGradientConfig,
    SurrogateConfig,
)
from hybrid_rlhf.functional.advantages import differs_in_group
from hybrid_rlhf.functional.losses import LossSum, clipped_surrogate, probability_surrogate
from hybrid_rlhf.functional.masking import keep, last_index, masked_whiten
from hybrid_rlhf.rl.types import Batch, Rollout


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

    @property
    def learns_truncated(self) -> bool:
        """True if completions that reached the length limit are learned from (DAPO, arXiv 2503.14476, section 3.4)."""
        return not (isinstance(self.config, PolicyGradientConfig) and self.config.mask_truncated)

    @property
    def score_clip(self) -> float | None:
        """Scaled scores are clipped to [-score_clip, score_clip]; None: not clipped."""
        return self.config.score_clip if isinstance(self.config, ClippedConfig) else None

    @property
    def value_clip(self) -> float:
        """Largest change of a value from the one before the updates, in the critic's loss; 0: any."""
        return 0.0

    @property
    def why_none_is_selected(self) -> str:
        """What is true of a rollout of which `select` takes nothing."""
        return "the scores of each prompt are equal"

    def select(self, scores: Tensor, *, penalties: Tensor, groups: Tensor) -> Tensor:
        """Return which completions to train on, [N] bool, from scores [N], penalties [N] and groups [N]."""
        if self.config.dynamic_sampling is not None:
            return differs_in_group(scores, groups=groups)
        return torch.ones_like(scores, dtype=torch.bool)

    def advantages(self, rewards: Tensor, rollout: Rollout) -> Tensor:
        """Return the advantage of each token, [N, T], from rewards [N, T]: scores at the end, KL penalties per
        token. Every rank calls; `Rollout.total` sums over all ranks."""
        raise NotImplementedError

    def shaped(self, rewards: Tensor, *, mask: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the rewards [N, T] from which advantages and returns follow; `total` sums over all ranks."""
        return rewards

    def whitened(self, advantages: Tensor, rollout: Rollout, *, total: Callable[[Tensor], Tensor]) -> Tensor:
        """Return advantages [N, T] with mean 0 and variance 1 over tokens, or over completions, of which an episode is
        one, where the settings ask for it; `total` sums over all ranks."""
        config = self.config
        if not isinstance(config, ClippedConfig) or not config.whiten_advantages:
            return advantages
        whiten = partial(
            masked_whiten, shift_mean=config.whiten_shift_mean, unbiased=config.whiten_unbiased, total=total
        )
        mask = rollout.response_mask
        if not self.whitens_completions:
            return whiten(advantages, mask=mask)
        first, member = rollout.episodes()
        of_rows = advantages.gather(1, last_index(mask)[:, None])[:, 0]
        return per_token(whiten(of_rows[first], mask=mask.any(dim=1)[first])[member], rollout)

    def returns(self, rewards: Tensor, rollout: Rollout) -> Tensor | None:
        """Return the targets of the critic, [N, T]; None without a critic."""
        return None

    def loss(self, logprobs: Tensor, batch: Batch, *, weights: Tensor, tokens_per_completion: float) -> LossSum:
        """The actor's loss on a micro-batch, summed over its tokens.

        Args:
            logprobs: [B, T] of the current actor, with gradient.
            batch: the micro-batch; what `READ_BY_LOSSES` names (rl/sharing.py) is on the device of the log-probs.
            weights: [B, T] or [B, 1], weight of each token's loss, relative to a mean over the mini-batch's tokens.
            tokens_per_completion: mean over the mini-batch; turns a mean over tokens into one over completions.
        """
        assert isinstance(config := self.config, SurrogateConfig)
        rollout = batch.rollout
        common: dict[str, Any] = {
            "advantages": batch.advantages,
            "mask": rollout.response_mask,
            "clip_low": config.clip[0],
            "clip_high": config.clip[1],
            "weights": weights,
        }
        if config.clip_of == "probability":
            assert rollout.old_logprobs is not None
            return probability_surrogate(logprobs, old_logprobs=rollout.old_logprobs, **common)
        return clipped_surrogate(self.log_ratios(logprobs, rollout), dual_clip=config.dual_clip, **common)

    def log_ratios(self, logprobs: Tensor, rollout: Rollout) -> Tensor:
        """Return the log-ratio that the clipped surrogate has at each response token, [B, T]."""
        return log_ratios(logprobs, rollout)

    def extra_tokens(self, rollout: Rollout) -> Tensor | None:
        """Return the response tokens [N, T] bool over which `extra_loss` is a mean; None without such a term."""
        return None

    def extra_loss(
        self, logprobs: Tensor, rollout: Rollout, *, weights: Tensor | None, tokens: float, counted: float
    ) -> Tensor:
        """A further term of the loss on a micro-batch, whose mean is over the `extra_tokens` of the mini-batch.

        Args:
            logprobs: [B, T] of the current actor, with gradient.
            rollout: the micro-batch.
            weights: [B, T] of algorithm.correction; None without.
            tokens: response tokens of the mini-batch, by which the caller divides the whole loss.
            counted: `extra_tokens` of the mini-batch, at least 1.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""


def groups_of(rollout: Rollout) -> Tensor:
    """Index of each completion's prompt, [N] int64: `rollout.groups`, under the name that custom algorithms import."""
    return rollout.groups


def log_ratios(logprobs: Tensor, rollout: Rollout) -> Tensor:
    """Log-ratio of each response token under the actor to the actor that sampled, [B, T]; 0 elsewhere."""
    assert rollout.old_logprobs is not None
    return keep(logprobs, rollout.response_mask) - keep(rollout.old_logprobs, rollout.response_mask)


def per_token(advantages: Tensor, rollout: Rollout) -> Tensor:
    """The advantage [N] of a whole completion at each of its response tokens, [N, T]."""
    mask = rollout.response_mask
    return keep(advantages[:, None].expand(mask.shape), mask)
