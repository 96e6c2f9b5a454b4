"""DPO: the chosen completion's log-ratio to the reference should exceed the rejected one's.

Source: Rafailov et al. 2023 (arXiv 2305.18290), eq. 7.

    loss = -log sigmoid(beta (log p(w) / ref(w) - log p(l) / ref(l)))
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from hybrid_rlhf.supervised.preference.pair_loss import PairLoss, PairSide


class DPO(PairLoss):
    """Logistic loss of the margin, the difference of log-ratios."""

    def losses(self, chosen: PairSide, rejected: PairSide) -> Tensor:
        """Return -log sigmoid(beta margin) for each pair, [P]."""
        return -logsigmoid(self.config.beta * (chosen.log_ratio - rejected.log_ratio))
