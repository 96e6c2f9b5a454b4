"""ORPO: supervised fine-tuning on the better answer, and its odds against the worse; without a reference.

Source: Hong et al. 2024 (arXiv 2403.07691), eq. 6 and 7.

    loss = sft_coef * -log p(w) / |w| + beta * -log sigmoid(log odds(w) - log odds(l)),
    odds = p / (1 - p) of the geometric mean p of an answer's token probabilities

Deviation: the log-likelihood is a mean over the answer's tokens alone, not over those of the prompt too.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hybrid_rlhf.algorithms.preference.pairs import Answers, PairLoss


class ORPO(PairLoss):
    """Logistic in the log odds ratio."""

    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        """See PairLoss."""
        return -self.config.beta * logsigmoid(_log_odds(chosen) - _log_odds(rejected))

    def rewards(self, answers: Answers) -> Tensor:
        """See PairLoss."""
        return self.config.beta * answers.mean_logprobs


def _log_odds(answers: Answers) -> Tensor:
    # An answer that is certain has no finite odds.
    mean = answers.mean_logprobs.clamp(max=-1e-6)
    return mean - torch.log(-torch.expm1(mean))
