"""Metrics of rollouts, evaluations and speed, under TRL's names where it has them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hybrid_rlhf.functional.groups import differs_in_group, group_size
from hybrid_rlhf.functional.masking import masked_mean, masked_sum, spread
from hybrid_rlhf.generation.batching.requests import DecodeWork
from hybrid_rlhf.rl.batch import Batch, Rollout, SampledTokens
from hybrid_rlhf.rl.roles import Roles
from hybrid_rlhf.runtime.observability.profiling import decode_roofline, model_flops_utilisation
from hybrid_rlhf.runtime.observability.timers import peak_memory_gib


def rollout_metrics(batch: Batch) -> dict[str, float]:
    """Metrics of a rollout under TRL's names; KL and entropy are sums over a completion, in nats."""
    rollout = batch.rollout
    mask = rollout.response_mask
    old_logprobs = rollout.old_logprobs
    scores = rollout.penalized_scores
    assert old_logprobs is not None
    difference = torch.where(mask, (rollout.sampled_logprobs - old_logprobs).abs(), 0.0)
    kl = rollout.kl
    explained = batch.explained_variance
    clipped = batch.clipped
    return {
        **({} if kl is None else {"objective/kl": float(kl.mean())}),
        **({} if explained is None else {"val/explained_variance": explained}),
        "objective/entropy": float(masked_sum(-old_logprobs, mask=mask, dim=1).mean()),
        "objective/scores": float(scores.mean()),
        "objective/scores_std": spread(scores),
        **({} if clipped is None else {"objective/score_clipfrac": float(clipped.float().mean())}),
        "objective/rlhf_reward": float(batch.rewards.sum(dim=1).mean()),
        **_equal_groups(rollout, scores),
        "completions/mean_length": float(mask.sum(dim=1).float().mean()),
        "completions/clipped_ratio": float((~rollout.stopped).float().mean()),
        "rollout/logprob_abs_diff_mean": float(masked_mean(difference, mask=mask)),
        "rollout/logprob_abs_diff_max": float(difference.max()),
    }


def episode_metrics(rollout: Rollout) -> dict[str, float]:
    """Turns, rewards and truncation, means over episodes; {} without an environment."""
    if rollout.turn_rewards is None:
        return {}
    mask = rollout.response_mask
    begins = mask[:, 1:] & ~mask[:, :-1]  # the template has at least one token between two turns
    turns = begins.sum(dim=1).float()
    rewards = rollout.turn_rewards.sum(dim=1)
    whole = {"environment/truncated": float((~rollout.stopped).float().mean())}
    if rollout.samples is None:
        return {**whole, "environment/turns": float(turns.mean()), "environment/reward": float(rewards.mean())}
    first, _ = rollout.episodes()
    return {
        **whole,
        "environment/turns": float(turns.sum() / len(first)),
        "environment/reward": float(rewards[first].mean()),
        "environment/sequences": len(mask) / len(first),
    }


def _equal_groups(rollout: Rollout, scores: Tensor) -> dict[str, float]:
    """The share of groups whose scores are all equal, and so have no advantages; {} if no group has several
    completions."""
    if rollout.groups is None:
        return {}
    sizes = group_size(rollout.groups)
    weights = (sizes > 1) / sizes  # 1 in each group of several
    if not weights.any():
        return {}
    equal = ~differs_in_group(scores, groups=rollout.groups)
    return {"rollout/frac_reward_zero_std": float((equal * weights).sum() / weights.sum())}


def evaluation_metrics(rollout: Rollout, *, prefix: str) -> dict[str, float]:
    """Metrics of completions of held-out prompts; KL and length per completion."""
    scores = rollout.penalized_scores
    kl = rollout.kl
    return {
        f"{prefix}/scores": float(scores.mean()),
        f"{prefix}/scores_std": spread(scores),
        **({} if kl is None else {f"{prefix}/kl": float(kl.mean())}),
        f"{prefix}/mean_length": float(rollout.response_mask.sum(dim=1).float().mean()),
        f"{prefix}/clipped_ratio": float((~rollout.stopped).float().mean()),
        **{f"{prefix}/{name}": value for name, value in rollout.metrics.items()},
    }


def speed_metrics(
    roles: Roles,
    sampled: SampledTokens,
    trained_tokens: float,
    seconds: Mapping[str, float],
    *,
    work: DecodeWork,
    hidden: float = 0.0,
) -> dict[str, float]:
    """Speed and time of a step.

    Args:
        roles: the models.
        sampled: number of tokens of the completions.
        trained_tokens: tokens of the mini-batches of all updates, as in UpdateReport.
        seconds: time of generation, training, other timed parts, and the whole step.
        work: bytes read and steps made by decoding on the first rank that samples.
        hidden: seconds of generation during the training of earlier steps.
    """
    generation = seconds.get("generation", 0.0) + hidden  # 0 if a checkpoint had the completions
    device = roles.world.device
    parts = {name: taken for name, taken in seconds.items() if name != "step"}
    generating = (
        {}
        if not generation
        else {
            "perf/generation_tokens_per_second": sum(sampled.completions) / generation,
            **decode_roofline(read_bytes=work.bytes, seconds=generation, device=device),
        }
    )
    return {
        **generating,
        "perf/train_tokens_per_second": trained_tokens / seconds["training"],
        "perf/tokens_per_second": sampled.total / seconds["step"],
        **model_flops_utilisation(
            parameters=sum(role.parameters for role in roles.learners.values()),
            tokens=trained_tokens,
            seconds=seconds["training"],
            ranks=len({rank for role in roles.learners.values() for rank in role.world.members}),
            device=device,
        ),
        **{f"time/{name}_seconds": taken for name, taken in parts.items()},
        **({"time/hidden_generation_seconds": hidden} if hidden else {}),
        "time/other_seconds": seconds["step"] - sum(parts.values()),
        "time/step_seconds": seconds["step"],
        "memory/peak_gib": peak_memory_gib(device),
    }
