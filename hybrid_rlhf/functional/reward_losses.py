"""Losses on scores beyond pairs: ranked lists, and answers or steps that are good or bad by themselves.

Sums with their counts, as in losses.py; pairs have their loss there.

Shapes: N scores.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hybrid_rlhf.functional.losses import LossSum
from hybrid_rlhf.functional.masking import at_least_float32, masked_sum


def listwise_reward_loss(scores: Tensor, *, worse: Tensor, lists: int) -> LossSum:
    """Plackett-Luce: each answer is chosen from itself and all that are worse; summed over answers.

    Source: the K-wise likelihood of Zhu et al. 2023 (arXiv 2301.11270, section 4), divided by lists as there; of two
    answers it is Bradley-Terry. Deviation: lists may have ties. Answers of equal rank are not chosen from each other.

    Args:
        scores: [N] of all answers of some lists.
        worse: [N, N] bool, whether in i's list answer j is ranked below i.
        lists: how many there are, what the sum is to be divided by.

    Raises:
        ValueError: worse is not [N, N].
    """
    if worse.shape != (len(scores), len(scores)):
        raise ValueError(f"worse is [N, N] for scores [N]: {tuple(worse.shape)} for {tuple(scores.shape)}")
    scores = at_least_float32(scores)
    among = worse | torch.eye(len(scores), dtype=torch.bool, device=scores.device)
    log_chance = scores - torch.where(among, scores, -torch.inf).logsumexp(dim=1)
    count = torch.tensor(float(lists), device=scores.device)
    return LossSum(-masked_sum(log_chance, mask=worse.any(dim=1)), count)


def labelled_reward_loss(scores: Tensor, *, labels: Tensor) -> LossSum:
    """-y log sigmoid(score) - (1 - y) log sigmoid(-score), summed over what has a label.

    Source: binary cross-entropy, of steps as in Lightman et al. 2023 (arXiv 2305.20050, appendix E) and Uesato et al.
    2022 (arXiv 2211.14275, section 2.4).

    Args:
        scores: [N].
        labels: [N] in [0, 1], 1 is good.

    Returns:
        stats: accuracy, where 0 passes for bad and a label of 0.5 for good; good, labels that are; chosen_score and
        rejected_score, the scores of good and bad ones.

    Raises:
        ValueError: labels have another shape.
    """
    if labels.shape != scores.shape:
        raise ValueError(f"labels have the shape of scores: {tuple(labels.shape)} for {tuple(scores.shape)}")
    scores = at_least_float32(scores)
    losses = -labels * logsigmoid(scores) - (1 - labels) * logsigmoid(-scores)
    good, told = labels >= 0.5, scores.detach()
    stats = {
        "accuracy": ((told > 0) == good).float().sum(),
        "good": good.float().sum(),
        "chosen_score": masked_sum(told, mask=good),
        "rejected_score": masked_sum(told, mask=~good),
    }
    return LossSum(losses.sum(), torch.full_like(told, 1.0).sum().float(), stats)
