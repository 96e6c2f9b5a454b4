"""Losses of reward models on ranked lists, and on labelled completions or steps.

They are sums with their counts, as in losses.py, which has the loss of pairs.

Shapes: N scores.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hybrid_rlhf.functional.losses import LossSum
from hybrid_rlhf.functional.masking import at_least_float32, masked_sum


def listwise_reward_loss(scores: Tensor, *, worse: Tensor, lists: int) -> LossSum:
    """Plackett-Luce: -log probability of choosing each completion among itself and those ranked below it, summed.

    Source: the K-wise likelihood of Zhu et al. 2023 (arXiv 2301.11270, section 4), divided by the number of lists; for
    two completions it is Bradley-Terry. Deviation: lists may have ties, whose completions are not compared.

    Args:
        scores: [N], scores of all completions of some lists.
        worse: [N, N] bool, true if completion j is in i's list and ranked below i.
        lists: number of lists, the count of the sum.

    Raises:
        ValueError: when worse is not [N, N].
    """
    if worse.shape != (len(scores), len(scores)):
        raise ValueError(f"worse must be [N, N] for scores [N], got {tuple(worse.shape)} for {tuple(scores.shape)}")
    scores = at_least_float32(scores)
    among = worse | torch.eye(len(scores), dtype=torch.bool, device=scores.device)
    log_chance = scores - torch.where(among, scores, -torch.inf).logsumexp(dim=1)
    count = torch.full((), float(lists), device=scores.device)
    return LossSum(-masked_sum(log_chance, mask=worse.any(dim=1)), count)


def labelled_reward_loss(scores: Tensor, *, labels: Tensor) -> LossSum:
    """-y log sigmoid(score) - (1 - y) log sigmoid(-score), summed over labels.

    Source: binary cross-entropy, for steps as in Lightman et al. 2023 (arXiv 2305.20050, appendix E) and Uesato et al.
    2022 (arXiv 2211.14275, section 2.4).

    Args:
        scores: [N].
        labels: [N], in [0, 1]; 1 is good.

    Returns:
        the loss, with stats: accuracy, where a score of 0 predicts bad and a label of 0.5 counts as good; good, the
            number of good labels; chosen_score and rejected_score, sums of the scores with good and bad labels.

    Raises:
        ValueError: when labels and scores differ in shape.
    """
    if labels.shape != scores.shape:
        raise ValueError(f"labels must have the shape of scores, got {tuple(labels.shape)} for {tuple(scores.shape)}")
    scores = at_least_float32(scores)
    losses = -labels * logsigmoid(scores) - (1 - labels) * logsigmoid(-scores)
    good = labels >= 0.5
    values = scores.detach()
    stats = {
        "accuracy": ((values > 0) == good).float().sum(),
        "good": good.float().sum(),
        "chosen_score": masked_sum(values, mask=good),
        "rejected_score": masked_sum(values, mask=~good),
    }
    return LossSum(losses.sum(), torch.full_like(values, 1.0).sum().float(), stats)
