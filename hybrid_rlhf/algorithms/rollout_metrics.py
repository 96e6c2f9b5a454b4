"""What rollouts and evaluations are logged as; the names are TRL's where it has them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hybrid_rlhf.algorithms.experience import Experience
from hybrid_rlhf.algorithms.roles import Roles
from hybrid_rlhf.algorithms.scoring import Scored
from hybrid_rlhf.functional.masking import masked_mean, masked_sum
from hybrid_rlhf.runtime.profiling import decode_roofline, model_flops_utilisation
from hybrid_rlhf.runtime.timers import peak_memory_gib


def rollout_metrics(experience: Experience) -> dict[str, float]:
    """What a rollout says of itself, under TRL's names; KL and entropy are sums over a completion, in nats."""
    sequences = experience.sequences
    mask = sequences.response_mask
    difference = torch.where(mask, (sequences.sampled_logprobs - experience.old_logprobs).abs(), 0.0)
    kl, explained, clipped = experience.kl, experience.explained_variance, experience.clipped
    return {
        **({} if kl is None else {"objective/kl": float(kl.mean())}),
        **({} if explained is None else {"val/explained_variance": explained}),
        "objective/entropy": float(masked_sum(-experience.old_logprobs, mask=mask, dim=1).mean()),
        "objective/scores": float(experience.scores.mean()),
        "objective/scores_std": float(experience.scores.std(correction=0)),
        **({} if clipped is None else {"objective/score_clipfrac": float(clipped.float().mean())}),
        "objective/rlhf_reward": float(experience.rewards.sum(dim=1).mean()),
        "completions/mean_length": float(mask.sum(dim=1).float().mean()),
        "completions/clipped_ratio": float((~sequences.stopped).float().mean()),
        "rollout/logprob_abs_diff_mean": float(masked_mean(difference, mask=mask)),
        "rollout/logprob_abs_diff_max": float(difference.max()),
    }


def evaluation_metrics(scored: Scored, *, prefix: str) -> dict[str, float]:
    """What answers to held-out prompts are worth; KL and length a completion."""
    sequences, scores, kl = scored.sequences, scored.rated.penalised, scored.kl
    return {
        f"{prefix}/scores": float(scores.mean()),
        f"{prefix}/scores_std": float(scores.std(correction=0)),
        **({} if kl is None else {f"{prefix}/kl": float(kl.mean())}),
        f"{prefix}/mean_length": float(sequences.response_mask.sum(dim=1).float().mean()),
        f"{prefix}/clipped_ratio": float((~sequences.stopped).float().mean()),
        **{f"{prefix}/{name}": value for name, value in scored.rated.metrics.items()},
    }


def speed_metrics(
    roles: Roles,
    sampled_tokens: tuple[float, float],
    trained_tokens: float,
    seconds: Mapping[str, float],
    *,
    hidden: float = 0.0,
) -> dict[str, float]:
    """Where the time of a step went.

    Args:
        roles: that took part.
        sampled_tokens: of all completions, and of these with their prompts.
        trained_tokens: see UpdateReport.
        seconds: of generation, training, whatever else was timed, and of the whole step.
        hidden: seconds of generation beside the training of earlier steps.
    """
    generation = seconds.get("generation", 0.0) + hidden  # none where a checkpoint had the completions
    actor, parts = roles.actor, {name: taken for name, taken in seconds.items() if name != "step"}
    generating = {} if not generation else {
        "perf/generation_tokens_per_second": sampled_tokens[0] / generation,
        **decode_roofline(read_bytes=actor.decode_bytes, seconds=generation, device=actor.device),
    }  # fmt: skip
    return {
        **generating,
        "perf/train_tokens_per_second": trained_tokens / seconds["training"],
        "perf/tokens_per_second": sampled_tokens[1] / seconds["step"],
        **model_flops_utilisation(
            parameters=sum(role.parameters for role in roles.learners.values()), tokens=trained_tokens,
            seconds=seconds["training"], ranks=actor.world.size, device=actor.device,
        ),
        **{f"time/{name}_seconds": taken for name, taken in parts.items()},
        **({"time/hidden_generation_seconds": hidden} if hidden else {}),
        "time/other_seconds": seconds["step"] - sum(parts.values()),
        "time/step_seconds": seconds["step"],
        "memory/peak_gib": peak_memory_gib(actor.device),
    }  # fmt: skip
