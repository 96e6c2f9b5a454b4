"""What rollouts and evaluations are logged as; the names are TRL's where it has them."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_rlhf.algorithms.experience import Experience
from hybrid_rlhf.algorithms.rollout import Scored
from hybrid_rlhf.functional.masking import masked_mean, masked_sum


def rollout_metrics(experience: Experience) -> dict[str, float]:
    """What a rollout says of itself, under TRL's names; KL and entropy are sums over a completion, in nats."""
    sequences = experience.sequences
    mask = sequences.response_mask
    difference = torch.where(mask, (sequences.sampled_logprobs - experience.old_logprobs).abs(), 0.0)
    return {
        "objective/kl": float(experience.kl.mean()),
        "objective/entropy": float(masked_sum(-experience.old_logprobs, mask=mask, dim=1).mean()),
        "objective/scores": float(experience.scores.mean()),
        "objective/scores_std": float(experience.scores.std(correction=0)),
        "objective/rlhf_reward": float(experience.rewards.sum(dim=1).mean()),
        "val/explained_variance": experience.explained_variance,
        "completions/mean_length": float(mask.sum(dim=1).float().mean()),
        "completions/clipped_ratio": float((~sequences.stopped).float().mean()),
        "rollout/logprob_abs_diff_mean": float(masked_mean(difference, mask=mask)),
        "rollout/logprob_abs_diff_max": float(difference.max()),
    }


def evaluation_metrics(scored: Scored, *, prefix: str) -> dict[str, float]:
    """What answers to held-out prompts are worth; KL and length a completion."""
    sequences, kl = scored.sequences, completion_kl(scored)
    return {
        f"{prefix}/scores": float(scored.penalised.mean()),
        f"{prefix}/scores_std": float(scored.penalised.std(correction=0)),
        f"{prefix}/kl": float(kl.mean()),
        f"{prefix}/mean_length": float(sequences.response_mask.sum(dim=1).float().mean()),
        f"{prefix}/clipped_ratio": float((~sequences.stopped).float().mean()),
        **{f"{prefix}/{name}": value for name, value in scored.rated.metrics.items()},
    }


def completion_kl(scored: Scored) -> Tensor:
    """[N] KL to the reference of each completion, in nats (k1)."""
    return masked_sum(scored.old_logprobs - scored.ref_logprobs, mask=scored.sequences.response_mask, dim=1)
