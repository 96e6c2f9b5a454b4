"""Metrics of rollouts, evaluations and speed, under TRL's names where it has them, and warnings that follow from them.

A critic that explains less than a constant adds noise to every advantage, and a policy whose completions all reach the
length limit learns from unfinished ones. `Diagnostics` reports both in one line with the fix, once per occurrence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from hybrid_rlhf.functional.masking import masked_mean, masked_sum
from hybrid_rlhf.generation.batching.requests import DecodeWork
from hybrid_rlhf.rl.batch import Batch, Rollout
from hybrid_rlhf.rl.roles import Roles
from hybrid_rlhf.runtime.observability.logs import LOGGER_NAME
from hybrid_rlhf.runtime.observability.profiling import decode_roofline, model_flops_utilisation
from hybrid_rlhf.runtime.observability.timers import peak_memory_gib

logger = logging.getLogger(LOGGER_NAME)
Metrics = Mapping[str, float]


def rollout_metrics(batch: Batch) -> dict[str, float]:
    """Metrics of a rollout under TRL's names; KL and entropy are sums over a completion, in nats."""
    rollout = batch.rollout
    mask, old_logprobs, scores = rollout.response_mask, rollout.old_logprobs, rollout.penalized_scores
    assert old_logprobs is not None
    difference = torch.where(mask, (rollout.sampled_logprobs - old_logprobs).abs(), 0.0)
    kl, explained, clipped = rollout.kl, batch.explained_variance, batch.clipped
    return {
        **({} if kl is None else {"objective/kl": float(kl.mean())}),
        **({} if explained is None else {"val/explained_variance": explained}),
        "objective/entropy": float(masked_sum(-old_logprobs, mask=mask, dim=1).mean()),
        "objective/scores": float(scores.mean()),
        "objective/scores_std": float(scores.std(correction=0)),
        **({} if clipped is None else {"objective/score_clipfrac": float(clipped.float().mean())}),
        "objective/rlhf_reward": float(batch.rewards.sum(dim=1).mean()),
        "completions/mean_length": float(mask.sum(dim=1).float().mean()),
        "completions/clipped_ratio": float((~rollout.stopped).float().mean()),
        "rollout/logprob_abs_diff_mean": float(masked_mean(difference, mask=mask)),
        "rollout/logprob_abs_diff_max": float(difference.max()),
    }


def evaluation_metrics(rollout: Rollout, *, prefix: str) -> dict[str, float]:
    """Metrics of completions of held-out prompts; KL and length per completion."""
    scores, kl = rollout.penalized_scores, rollout.kl
    return {
        f"{prefix}/scores": float(scores.mean()),
        f"{prefix}/scores_std": float(scores.std(correction=0)),
        **({} if kl is None else {f"{prefix}/kl": float(kl.mean())}),
        f"{prefix}/mean_length": float(rollout.response_mask.sum(dim=1).float().mean()),
        f"{prefix}/clipped_ratio": float((~rollout.stopped).float().mean()),
        **{f"{prefix}/{name}": value for name, value in rollout.metrics.items()},
    }


def speed_metrics(
    roles: Roles,
    sampled_tokens: tuple[float, float],
    trained_tokens: float,
    seconds: Mapping[str, float],
    *,
    work: DecodeWork,
    hidden: float = 0.0,
) -> dict[str, float]:
    """Speed and time of a step.

    Args:
        roles: the models.
        sampled_tokens: tokens of all completions, and of these with their prompts.
        trained_tokens: see UpdateReport.
        seconds: of generation, training, other timed parts, and the whole step.
        work: what decoding did on the first rank that samples.
        hidden: seconds of generation during the training of earlier steps.
    """
    generation = seconds.get("generation", 0.0) + hidden  # none where a checkpoint had the completions
    device, parts = roles.world.device, {name: taken for name, taken in seconds.items() if name != "step"}
    generating = (
        {}
        if not generation
        else {
            "perf/generation_tokens_per_second": sampled_tokens[0] / generation,
            **decode_roofline(read_bytes=work.bytes, seconds=generation, device=device),
            **(draft_metrics(work) if work.drafted or roles.sampler.drafter is not None else {}),
        }
    )
    return {
        **generating,
        "perf/train_tokens_per_second": trained_tokens / seconds["training"],
        "perf/tokens_per_second": sampled_tokens[1] / seconds["step"],
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


def draft_metrics(work: DecodeWork) -> dict[str, float]:
    """How much speculative decoding saved in a rollout, on this rank.

    `rollout/draft_acceptance_rate` is the part of the draft tokens that were kept, `rollout/tokens_per_decode_step` the
    tokens that a row kept per step, steps without drafts included: 1 where drafts save nothing.
    """
    return {
        "rollout/draft_acceptance_rate": work.accepted / max(work.drafted, 1),
        "rollout/tokens_per_decode_step": work.tokens / max(work.row_steps, 1),
    }


@dataclass(frozen=True)
class Diagnostic:
    """A metric that indicates a fault if it stays out of range."""

    metric: str
    wrong: Callable[[float], bool]
    rollouts: int
    """Rollouts in a row after which it is reported; once, until it is back in range."""
    advice: Callable[[Metrics], str]


def _critic_advice(metrics: Metrics) -> str:
    return (
        "the critic predicts returns worse than a constant: raise critic.optimizer.lr "
        f"({metrics.get('critic/lr', 0.0):.3g}) or critic.head_lr, train it alone first (critic.warmup_steps "
        f"10), or bring scores, whose standard deviation is {metrics.get('objective/scores_std', 0.0):.3g}, to 1 "
        "(algorithm.score_scaling running)"
    )


def _length_advice(metrics: Metrics) -> str:
    return (
        "almost no completion ends by itself: raise rollout.sampling.max_new_tokens if completions need more, or "
        "algorithm.penalties.missing_eos above the standard deviation of the scores, "
        f"{metrics.get('objective/scores_std', 0.0):.3g}; algorithm.penalties.length helps too"
    )


DIAGNOSTICS = (
    Diagnostic("val/explained_variance", lambda value: value < 0, 10, _critic_advice),
    Diagnostic("completions/clipped_ratio", lambda value: value > 0.9, 5, _length_advice),
)


class Diagnostics:
    """Counts rollouts with a metric out of range."""

    def __init__(self, *, enabled: bool) -> None:
        """Take whether this rank logs."""
        self._enabled = enabled
        self._counts = dict.fromkeys((diagnostic.metric for diagnostic in DIAGNOSTICS), 0)

    def watch(self, step: int, metrics: Metrics) -> None:
        """Take the metrics of a step, and warn of what has been out of range for too long."""
        for diagnostic in DIAGNOSTICS:
            value = metrics.get(diagnostic.metric)
            if value is None:
                continue
            self._counts[diagnostic.metric] = self._counts[diagnostic.metric] + 1 if diagnostic.wrong(value) else 0
            if self._enabled and self._counts[diagnostic.metric] == diagnostic.rollouts:
                logger.warning(
                    "step %d: %s is %.3g, out of range for %d rollouts in a row: %s",
                    step,
                    diagnostic.metric,
                    value,
                    diagnostic.rollouts,
                    diagnostic.advice(metrics),
                )
