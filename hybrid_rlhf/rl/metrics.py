"""Metrics of rollouts, evaluations and speed, under TRL's names where it has them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hybrid_rlhf.functional.advantages import differs_in_group, group_size
from hybrid_rlhf.functional.masking import masked_sum, masked_var, spread
from hybrid_rlhf.generation.batching.requests import DecodeWork
from hybrid_rlhf.rl.roles import Roles
from hybrid_rlhf.rl.types import Batch, Rollout, SampledTokens
from hybrid_rlhf.runtime.observability.profiling import decode_roofline, model_flops_utilisation
from hybrid_rlhf.runtime.observability.timers import peak_memory_gib
from hybrid_rlhf.runtime.world import World

_RATIO_PERCENTILES = (5, 50, 95)


def rollout_metrics(batch: Batch, world: World) -> dict[str, float]:
    """Metrics of a rollout under TRL's names; KL and entropy are sums over a completion, in nats. Every rank calls."""
    rollout = batch.rollout
    mask = rollout.response_mask
    old_logprobs = rollout.old_logprobs
    assert old_logprobs is not None and rollout.groups is not None
    # where the actor has not read the rollout, only rows that an update has read have log-probs of training
    is_read = rollout.learned
    if is_read is None or rollout.entropy is not None:
        is_read = torch.ones_like(rollout.stopped)
    difference = torch.where(mask, (rollout.sampled_logprobs - old_logprobs).abs(), 0.0)
    log_ratio = masked_sum(old_logprobs - rollout.drawn_logprobs, mask=mask, dim=1)
    columns = {
        "kl": rollout.kl,
        "teacher_kl": rollout.teacher_kl,
        "clipped": batch.clipped,
        "entropy": masked_sum(-old_logprobs, mask=mask, dim=1),
        "reward": batch.rewards.sum(dim=1),
        "scores": rollout.penalized_scores,
        "truncated": ~rollout.stopped,
        "difference": difference.sum(dim=1),
        "largest": difference.amax(dim=1),
        "log_ratio": log_ratio,
        "groups": rollout.groups,
        "is_read": is_read,
        "has_score": rollout.has_score,
    }
    index = rollout.numbered(world)
    known = {name: column.float() for name, column in columns.items() if column is not None}
    whole = dict(zip(known, index.gather(torch.stack(list(known.values()), dim=1)).T.contiguous(), strict=True))
    explained = _explained_variance(batch, world)
    tokens = index.responses.sum().clamp(min=1)
    is_read = whole["is_read"].bool()
    is_read |= not is_read.any()
    return {
        **({} if "kl" not in whole else {"objective/kl": float(whole["kl"].mean())}),
        **({} if "teacher_kl" not in whole else {"teacher/kl": float(whole["teacher_kl"].sum() / tokens)}),
        **({} if explained is None else {"val/explained_variance": explained}),
        "objective/entropy": float(whole["entropy"].mean()),
        **score_metrics(whole["scores"], whole["has_score"].bool(), whole["groups"], is_rewarded=rollout.is_rewarded),
        **({} if "clipped" not in whole else {"objective/score_clipfrac": float(whole["clipped"].mean())}),
        "objective/rlhf_reward": float(whole["reward"].mean()),
        "completions/mean_length": float(index.responses.float().mean()),
        "completions/clipped_ratio": float(whole["truncated"].mean()),
        "rollout/logprob_abs_diff_mean": float(whole["difference"].sum() / index.responses[is_read].sum().clamp(min=1)),
        "rollout/logprob_abs_diff_max": float(whole["largest"].max()),
        **{
            f"rollout/log_ratio_p{percent:02}": float(whole["log_ratio"][is_read].quantile(percent / 100))
            for percent in _RATIO_PERCENTILES
        },
    }


def _explained_variance(batch: Batch, world: World) -> float | None:
    """1 - var(returns - values) / var(returns), 1 for a perfect critic, 0 for a constant one; None without it."""
    values = batch.rollout.old_values
    if values is None or batch.returns is None:
        return None
    mask = batch.rollout.response_mask
    variance = masked_var(batch.returns, mask=mask, total=world.total)
    unexplained = masked_var(batch.returns - values, mask=mask, total=world.total)
    return float(1 - unexplained / variance.clamp(min=1e-8))


def episode_metrics(rollout: Rollout, world: World) -> dict[str, float]:
    """Turns, rewards and truncation, means over episodes; {} without an environment. Every rank calls."""
    if rollout.turn_rewards is None:
        return {}
    index = rollout.numbered(world)
    mask = rollout.response_mask
    begins = mask[:, 1:] & ~mask[:, :-1]  # the template has at least one token between two turns
    first = torch.zeros(len(mask)).index_fill(0, rollout.episodes()[0], 1.0)
    columns = [begins.sum(dim=1), rollout.turn_rewards.sum(dim=1), ~rollout.stopped, first]
    whole = index.gather(torch.stack([column.float() for column in columns], dim=1))
    turns, rewards, truncated, first = whole.T.contiguous()
    metrics = {
        "environment/truncated": float(truncated.mean()),
        "environment/turns": float(turns.sum() / first.sum()),
        "environment/reward": float(rewards[first.bool()].mean()),
    }
    return metrics if rollout.samples is None else {**metrics, "environment/sequences": len(first) / float(first.sum())}


def score_metrics(scores: Tensor, has_score: Tensor, groups: Tensor, *, is_rewarded: bool) -> dict[str, float]:
    """Mean and standard deviation of the scores [N] of completions that have one, and with a reward the share of groups
    whose scores are all equal."""
    known = has_score | ~has_score.any()
    scores, groups = scores[known], groups[known]
    metrics = {"objective/scores": float(scores.mean()), "objective/scores_std": spread(scores)}
    return {**metrics, **(_equal_groups(scores, groups) if is_rewarded else {})}


def _equal_groups(scores: Tensor, groups: Tensor) -> dict[str, float]:
    """The share of groups whose scores are all equal, and so have no advantages; {} if no group has several
    completions."""
    sizes = group_size(groups)
    weights = (sizes > 1) / sizes  # 1 in each group of several
    if not weights.any():
        return {}
    equal = ~differs_in_group(scores, groups=groups)
    return {"rollout/frac_reward_zero_std": float((equal * weights).sum() / weights.sum())}


def staleness_metrics(ages: Tensor, responses: Tensor) -> dict[str, float]:
    """Age of the tokens of a rollout, from `Rollout.staleness` [N, 4] and the response tokens [N] of all its rows."""
    updates, largest, stale, carried = ages.unbind(dim=1)
    tokens = responses.sum().clamp(min=1)
    return {
        "rollout/stale_updates": float(updates.sum() / tokens),
        "rollout/stale_updates_max": float(largest.max()),
        "rollout/stale_tokens_ratio": float(stale.sum() / tokens),
        "rollout/carried_ratio": float(carried.mean()),
    }


def evaluation_metrics(rollout: Rollout, world: World, *, prefix: str) -> dict[str, float]:
    """Metrics of completions of held-out prompts; KL and length per completion, KL to a teacher per token. Every rank
    calls."""
    index = rollout.numbered(world)
    has_score = index.gather(rollout.has_score)
    scores = index.gather(rollout.penalized_scores)[has_score | ~has_score.any()]
    kl = None if rollout.kl is None else index.gather(rollout.kl)
    teacher_kl = None if rollout.teacher_kl is None else index.gather(rollout.teacher_kl)
    tokens = index.responses.sum().clamp(min=1)
    stopped = index.gather(rollout.stopped)
    return {
        f"{prefix}/scores": float(scores.mean()),
        f"{prefix}/scores_std": spread(scores),
        **({} if kl is None else {f"{prefix}/kl": float(kl.mean())}),
        **({} if teacher_kl is None else {f"{prefix}/teacher_kl": float(teacher_kl.sum() / tokens)}),
        f"{prefix}/mean_length": float(index.responses.float().mean()),
        f"{prefix}/clipped_ratio": float((~stopped).float().mean()),
        **{f"{prefix}/{name}": value for name, value in rollout.metrics.items()},
    }


def speed_metrics(
    roles: Roles,
    sampled: SampledTokens,
    trained_tokens: float,
    operations: float,
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
        operations: floating-point operations of the updates, as there.
        seconds: time of generation, training, other timed parts, and the whole step.
        work: bytes read and steps made by decoding on the first rank that samples.
        hidden: seconds of generation during the training of earlier steps.
    """
    generation = seconds.get("generation", 0.0) + hidden  # 0 if a checkpoint had the completions
    device = roles.world.device
    on_gpu = device.type == "cuda"
    parts = {name: taken for name, taken in seconds.items() if name != "step"}
    metrics: dict[str, float] = {}
    if generation:
        metrics["perf/generation_tokens_per_second"] = sum(sampled.completions) / generation
    if generation and on_gpu:
        metrics |= decode_roofline(read_bytes=work.bytes, seconds=generation, device=device)
    metrics["perf/train_tokens_per_second"] = trained_tokens / seconds["training"]
    metrics["perf/tokens_per_second"] = sampled.total / seconds["step"]
    if on_gpu:
        metrics |= model_flops_utilisation(
            operations=operations,
            seconds=seconds["training"],
            ranks=len({rank for role in roles.learners.values() for rank in role.world.members}),
            device=device,
        )
    return {
        **metrics,
        **{f"time/{name}_seconds": taken for name, taken in parts.items()},
        **({"time/hidden_generation_seconds": hidden} if hidden else {}),
        "time/other_seconds": seconds["step"] - sum(parts.values()),
        "time/step_seconds": seconds["step"],
        "memory/peak_gib": peak_memory_gib(device),
    }
