"""cDPO: DPO with labels that are wrong with a known probability.

Source: Mitchell 2023, "A note on DPO with noisy preferences and relationship to IPO", eq. 3.

    loss = -(1 - eps) log sigmoid(beta margin) - eps log sigmoid(-beta margin)
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from hybrid_rlhf.configs.preference import CDPOConfig
from hybrid_rlhf.supervised.preference.pair_loss import PairLoss, PairSide


class ConservativeDPO(PairLoss):
    """Logistic loss of the margin, with smoothed labels."""

    config: CDPOConfig

    def losses(self, chosen: PairSide, rejected: PairSide) -> Tensor:
        """Return -(1 - eps) log sigmoid(beta margin) - eps log sigmoid(-beta margin) for each pair, [P]."""
        smoothing = self.config.label_smoothing
        margin = self.config.beta * (chosen.log_ratio - rejected.log_ratio)
        return -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)
