"""From scores to advantages: KL-shaped rewards, the algorithm's advantages and returns, whitening.

Rewards are InstructGPT's: the score at the last response token, less a KL penalty per token (arXiv 2203.02155, section
3.5). Every rank computes the same.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hybrid_rlhf.configs.algorithms import OnlineDPOConfig, PPOConfig
from hybrid_rlhf.configs.sections.algorithm import ClippedConfig, PolicyGradientConfig
from hybrid_rlhf.functional.advantages import shaped_rewards
from hybrid_rlhf.functional.divergences import KL_ESTIMATORS
from hybrid_rlhf.functional.masking import masked_mean, masked_whiten
from hybrid_rlhf.rl.algorithms import Algorithm
from hybrid_rlhf.rl.algorithms.algorithm import per_token
from hybrid_rlhf.rl.batch import Batch, Rollout
from hybrid_rlhf.rl.rollouts.collector import NothingToLearn
from hybrid_rlhf.rl.rollouts.score_scaling import ScoreScaling


def estimate_advantages(rollout: Rollout, algorithm: Algorithm, *, scaling: ScoreScaling, kl_coef: float) -> Batch:
    """What the updates learn from.

    Args:
        rollout: with scores, and the log-probs and values of the roles.
        algorithm: turns rewards into advantages.
        scaling: of the scores; running statistics take these scores in.
        kl_coef: of the KL penalty where it is in the reward.

    Raises:
        NothingToLearn: on every rank, when truncated completions are masked and all are truncated.
    """
    config, mask = algorithm.config, rollout.response_mask
    assert rollout.scores is not None and rollout.penalties is not None and rollout.old_logprobs is not None
    kl = torch.zeros_like(rollout.old_logprobs)
    if rollout.ref_logprobs is not None and config.kl is not None and config.kl.where == "reward":
        kl = KL_ESTIMATORS[config.kl.estimator](rollout.old_logprobs, ref_logprobs=rollout.ref_logprobs)
    scores = scaling(rollout.scores) - rollout.penalties
    score_clip = config.score_clip if isinstance(config, ClippedConfig | OnlineDPOConfig) else None
    turn_rewards = rollout.turn_rewards
    rewards = shaped_rewards(
        scores=scores,
        kl=kl,
        mask=mask,
        kl_coef=kl_coef,
        score_clip=score_clip,
        earned=None if turn_rewards is None else scaling.scale_rewards(turn_rewards),
    )
    if isinstance(config, PPOConfig) and config.whiten_rewards:
        rewards = masked_whiten(rewards, mask=mask, shift_mean=False, unbiased=config.whiten_unbiased)
    rollout = _with_scaled_greedy_scores(rollout, scaling, score_clip=score_clip)
    advantages, returns = _advantages(rewards, rollout, algorithm), algorithm.returns(rewards, rollout)
    if isinstance(config, ClippedConfig) and config.whiten_advantages:
        advantages = masked_whiten(
            advantages, mask=mask, shift_mean=config.whiten_shift_mean, unbiased=config.whiten_unbiased
        )
    metrics = {**scaling.metrics(), **rollout.metrics}
    if rollout.ref_logprobs is not None:
        metrics["objective/kl_coef"] = kl_coef
    clipped = None if score_clip is None else scores.abs() > score_clip
    batch = Batch(rollout, rewards, advantages, returns, clipped, metrics)
    masks = isinstance(config, PolicyGradientConfig) and config.mask_truncated
    return _without_truncated(batch) if masks else batch


def _advantages(rewards: Tensor, rollout: Rollout, algorithm: Algorithm) -> Tensor:
    """[N, T] the algorithm's advantages; where it compares completions, all sequences of an episode have that of the
    first, so that an episode counts once.
    """
    first, member = rollout.episodes()
    if algorithm.config.fewest_completions == 1 or len(first) == len(member):
        return algorithm.advantages(rewards, rollout)
    chosen = rollout.rows(first.tolist())
    compared = algorithm.advantages(rewards[first, : chosen.input_ids.shape[1]], chosen)
    return per_token(masked_mean(compared, mask=chosen.response_mask, dim=1)[member], rollout)


def _with_scaled_greedy_scores(rollout: Rollout, scaling: ScoreScaling, *, score_clip: float | None) -> Rollout:
    """Greedy scores scaled, penalized and clipped like the scores of the completions that they are a baseline of."""
    if rollout.greedy_scores is None or rollout.greedy_penalties is None:
        return rollout
    scores = scaling.scaled(rollout.greedy_scores) - rollout.greedy_penalties
    return replace(rollout, greedy_scores=scores if score_clip is None else scores.clamp(-score_clip, score_clip))


def _without_truncated(batch: Batch) -> Batch:
    """The completions that ended by themselves (DAPO, arXiv 2503.14476, section 3.4)."""
    kept = batch.rollout.stopped.nonzero().flatten().tolist()
    if not kept:
        raise NothingToLearn(
            "none of its completions ended by itself, see algorithm.mask_truncated", dict(batch.metrics)
        )
    return batch.rows(kept)
