"""ORPO: SFT on the chosen completion plus its odds ratio to the rejected one; without a reference.

Source: Hong et al. 2024 (arXiv 2403.07691), eq. 6 and 7.

    loss = sft_coef * -log p(w) / |w| + beta * -log sigmoid(log odds(w) - log odds(l)),
    odds = p / (1 - p), with p the geometric mean of a completion's token probabilities

Deviation: the log-likelihood is a mean over the tokens of the completion, not of prompt and completion.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hybrid_rlhf.supervised.preference.pair_loss import PairLoss, PairSide


class ORPO(PairLoss):
    """Logistic loss of the log odds ratio."""

    def losses(self, chosen: PairSide, rejected: PairSide) -> Tensor:
        """Return -beta log sigmoid(log odds(w) - log odds(l)) for each pair, [P]."""
        return -self.config.beta * logsigmoid(_log_odds(chosen) - _log_odds(rejected))

    def rewards(self, side: PairSide) -> Tensor:
        """Return beta times the mean log-prob per token, [P]."""
        return self.config.beta * side.mean_logprobs


def _log_odds(side: PairSide) -> Tensor:
    # A completion of probability 1 has infinite odds.
    mean = side.mean_logprobs.clamp(max=-1e-6)
    return mean - torch.log(-torch.expm1(mean))
