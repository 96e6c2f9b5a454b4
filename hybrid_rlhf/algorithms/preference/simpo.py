"""SimPO: log-probs a token are the reward, without a reference, and must lead by a margin.

Source: Meng et al. 2024 (arXiv 2405.14734), eq. 6.

    loss = -log sigmoid(beta / |w| log p(w) - beta / |l| log p(l) - target_margin)
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from hybrid_rlhf.algorithms.preference.pairs import Answers, PairLoss


class SimPO(PairLoss):
    """Logistic in the lead of mean log-probs."""

    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        """See PairLoss."""
        return -logsigmoid(self.rewards(chosen) - self.rewards(rejected) - self.config.target_margin)

    def rewards(self, answers: Answers) -> Tensor:
        """See PairLoss."""
        return self.config.beta * answers.mean_logprobs
