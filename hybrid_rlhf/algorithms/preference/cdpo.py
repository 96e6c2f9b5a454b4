"""cDPO: DPO where a label is wrong with a known chance.

Source: Mitchell 2023, "A note on DPO with noisy preferences and relationship to IPO", eq. 3.

    loss = -(1 - eps) log sigmoid(beta lead) - eps log sigmoid(-beta lead)
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from hybrid_rlhf.algorithms.preference.pairs import Answers, PairLoss


class ConservativeDPO(PairLoss):
    """Logistic in the lead, with smoothed labels."""

    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        """See PairLoss."""
        smoothing = self.config.label_smoothing
        lead = self.config.beta * (chosen.log_ratio - rejected.log_ratio)
        return -(1 - smoothing) * logsigmoid(lead) - smoothing * logsigmoid(-lead)
