"""Metrics of rollouts, evaluations and speed, under TRL's names where it has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hybrid_rlhf.functional.advantages import differs_in_group, group_mean, group_size
from hybrid_rlhf.functional.masking import masked_sum, masked_var, spread
from hybrid_rlhf.generation.batching.requests import DecodeWork
from hybrid_rlhf.rl.roles import Roles
from hybrid_rlhf.rl.types import DEPTHS, Batch, Rollout, SampledTokens, TrainedTokens
from hybrid_rlhf.runtime.observability.profiling import decode_roofline, model_flops_utilisation
from hybrid_rlhf.runtime.observability.timers import peak_memory_gib
from hybrid_rlhf.runtime.world import World

_RATIO_PERCENTILES = (5, 50, 95)


def rollout_metrics(batch: Batch, world: World) -> dict[str, float]:
    """Metrics of a rollout under TRL's names; KL and entropy are sums over a completion, in nats. Every rank calls."""
    rollout = batch.rollout
    mask = rollout.response_mask
    old_logprobs = rollout.old_logprobs
    assert old_logprobs is not None
    # where the actor has not read the rollout, only rows that an update has read have log-probs of training
    is_read = rollout.learned
    if is_read is None or rollout.entropy is not None:
        is_read = torch.ones_like(rollout.stopped)
    log_ratio = masked_sum(old_logprobs - rollout.drawn_logprobs, mask=mask, dim=1)
    columns = {
        "kl": rollout.kl,
        "teacher_kl": rollout.teacher_kl,
        "clipped": batch.clipped,
        "entropy": masked_sum(-old_logprobs, mask=mask, dim=1),
        "reward": batch.rewards.sum(dim=1),
        "scores": rollout.penalized_scores,
        "truncated": ~rollout.stopped,
        **rollout.sampler_differences(old_logprobs),
        "largest": torch.where(mask, (rollout.sampled_logprobs - old_logprobs).abs(), 0.0).amax(dim=1),
        "log_ratio": log_ratio,
        "groups": rollout.groups,
        "is_read": is_read,
        "has_score": rollout.has_score,
    }
    index = rollout.numbered(world)
    known = {name: column.float() for name, column in columns.items() if column is not None}
    whole = dict(zip(known, index.gather(torch.stack(list(known.values()), dim=1)).T.contiguous(), strict=True))
    tokens = index.responses.sum().clamp(min=1)
    is_read = whole["is_read"].bool()
    is_read |= not is_read.any()

    def mean(name: str) -> Tensor | None:
        return whole[name].mean() if name in whole else None

    metrics = {
        "objective/kl": mean("kl"),
        "teacher/kl": whole["teacher_kl"].sum() / tokens if "teacher_kl" in whole else None,
        "val/explained_variance": _explained_variance(batch, world),
        "objective/entropy": mean("entropy"),
        **score_metrics(whole["scores"], whole["has_score"].bool(), whole["groups"], is_rewarded=rollout.is_rewarded),
        "objective/score_clipfrac": mean("clipped"),
        "objective/rlhf_reward": mean("reward"),
        "completions/mean_length": index.responses.float().mean(),
        "completions/clipped_ratio": mean("truncated"),
        **difference_metrics({name: float(column[is_read].sum()) for name, column in whole.items()}),
        "rollout/logprob_abs_diff_max": whole["largest"].max(),
        **{
            f"rollout/log_ratio_p{percent:02}": whole["log_ratio"][is_read].quantile(percent / 100)
            for percent in _RATIO_PERCENTILES
        },
    }
    return _known(metrics)


_LEAST_COMPARED = 64
"""Fewest tokens of a depth whose mean difference is reported: of fewer, the rounding of single tokens weighs much."""


def difference_metrics(totals: Mapping[str, float]) -> dict[str, float]:
    """Mean difference of sampler and training from sums of `Rollout.sampler_differences`: of all tokens, and of each
    depth that has enough; {} if nothing was compared."""
    if "compared_first" not in totals:
        return {}
    parts = {name: (totals[f"difference_{name}"], totals[f"compared_{name}"]) for name in DEPTHS}
    difference, compared = map(sum, zip(*parts.values(), strict=True))
    return {
        "rollout/logprob_abs_diff_mean": difference / max(compared, 1),
        **{
            f"rollout/logprob_abs_diff_at_{name}": of_depth / tokens
            for name, (of_depth, tokens) in parts.items()
            if tokens >= _LEAST_COMPARED
        },
    }


def _known(metrics: Mapping[str, Tensor | float | None]) -> dict[str, float]:
    """The metrics that are not None, as numbers."""
    return {name: float(value) for name, value in metrics.items() if value is not None}


def _explained_variance(batch: Batch, world: World) -> Tensor | None:
    """1 - var(returns - values) / var(returns), 1 for a perfect critic, 0 for a constant one; None without it."""
    values = batch.rollout.old_values
    if values is None or batch.returns is None:
        return None
    mask = batch.rollout.response_mask
    variance = masked_var(batch.returns, mask=mask, total=world.total)
    unexplained = masked_var(batch.returns - values, mask=mask, total=world.total)
    return 1 - unexplained / variance.clamp(min=1e-8)


def episode_metrics(rollout: Rollout, world: World) -> dict[str, float]:
    """Turns, rewards and truncation, means over episodes, and the share of observations that are cut; {} without an
    environment. Every rank calls."""
    if rollout.turn_rewards is None or rollout.cut_observations is None:
        return {}
    index = rollout.numbered(world)
    mask = rollout.response_mask
    begins = mask[:, 1:] & ~mask[:, :-1]  # the template has at least one token between two turns
    first = torch.zeros(len(mask)).index_fill(0, rollout.episodes()[0], 1.0)
    columns = [begins.sum(dim=1), rollout.turn_rewards.sum(dim=1), ~rollout.stopped, first, rollout.cut_observations]
    whole = index.gather(torch.stack([column.float() for column in columns], dim=1))
    turns, rewards, truncated, first, cut = whole.T.contiguous()
    metrics = {
        "environment/truncated": float(truncated.mean()),
        "environment/turns": float(turns.sum() / first.sum()),
        "environment/reward": float(rewards[first.bool()].mean()),
    }
    if rollout.samples is not None:  # of programs, whose texts are not cut
        return {**metrics, "environment/sequences": len(first) / float(first.sum())}
    observations = (turns - 1).clamp(min=0).sum().clamp(min=1)
    return {**metrics, "environment/observations_cut": float(cut.sum() / observations)}


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


def evaluation_metrics(
    rollout: Rollout, world: World, *, prefix: str, prompts: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Metrics of completions of held-out prompts, by `source` too; KL and length per completion, KL to a teacher per
    token. Every rank calls."""
    index = rollout.numbered(world)
    has_score = index.gather(rollout.has_score)
    assert rollout.scores is not None
    first = torch.zeros_like(rollout.has_score).index_fill(0, rollout.episodes()[0], True)
    counted = index.gather(first) & has_score
    by_source = _by_source(index.gather(rollout.scores)[counted], index.prompts[counted], prompts)
    scores = index.gather(rollout.penalized_scores)[has_score | ~has_score.any()]
    kl, teacher_kl = (None if of is None else index.gather(of) for of in (rollout.kl, rollout.teacher_kl))
    metrics = {
        "scores": scores.mean(),
        "scores_std": spread(scores),
        "kl": None if kl is None else kl.mean(),
        "teacher_kl": None if teacher_kl is None else teacher_kl.sum() / index.responses.sum().clamp(min=1),
        "mean_length": index.responses.float().mean(),
        "clipped_ratio": (~index.gather(rollout.stopped)).float().mean(),
        **rollout.metrics,
        **(by_source if rollout.is_rewarded else {}),
    }
    return {f"{prefix}/{name}": value for name, value in _known(metrics).items()}


def _by_source(scores: Tensor, groups: Tensor, prompts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """avg@k, the mean over prompts of the mean score of k completions, and where all scores are from 0 to 1 pass@k,
    the share of prompts with a completion that scores 1; of each source, with its largest group as k.

    Args:
        scores: [N], of completions, without penalties.
        groups: [N] int64, index of the prompt of each.
        prompts: rows with `source`.
    """
    sources = [prompts[place]["source"] for place in groups.tolist()]
    sizes = group_size(groups)
    means, passes = (group_mean(values, groups=groups) for values in (scores, (scores >= 1).float()))
    metrics = {}
    names = dict.fromkeys(sources)
    for name in names:
        mine = torch.tensor([source == name for source in sources])
        k, weights = int(sizes[mine].max()), 1 / sizes[mine]  # one for each prompt
        prefix = f"{name}/" if len(names) > 1 else ""
        metrics[f"{prefix}avg@{k}"] = float((weights * means[mine]).sum() / weights.sum())
        if 0 <= float(scores[mine].min()) and float(scores[mine].max()) <= 1:
            metrics[f"{prefix}pass@{k}"] = float((weights * (passes[mine] > 0)).sum() / weights.sum())
    return metrics


def speed_metrics(
    roles: Roles,
    sampled: SampledTokens,
    trained: TrainedTokens,
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
        trained: number of tokens of all updates.
        operations: floating-point operations of the updates, as in UpdateReport.
        seconds: time of generation, training, other timed parts, and the whole step.
        work: bytes, operations and steps of decoding on the first rank that samples.
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
        metrics |= decode_roofline(read_bytes=work.bytes, operations=work.operations, seconds=generation, device=device)
    metrics["perf/train_tokens_per_second"] = trained.computed / seconds["training"]
    metrics["perf/tokens_per_second"] = (sampled.total - trained.shared / trained.passes) / seconds["step"]
    if trained.shared:
        metrics["perf/shared_tokens_ratio"] = trained.shared / (trained.computed + trained.shared)
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
