"""Hinge: pairs with a sufficient margin have no loss.

Source: SLiC-HF, Zhao et al. 2023 (arXiv 2305.10425), eq. 1, in the form of RSO, Liu et al. 2023 (arXiv 2309.06657),
eq. 7, with log-ratios to the reference.

    loss = max(0, 1 - beta margin)
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import relu

from hybrid_rlhf.supervised.preference.pair_loss import PairLoss, PairSide


class Hinge(PairLoss):
    """Linear up to a margin of 1 / beta."""

    def losses(self, chosen: PairSide, rejected: PairSide) -> Tensor:
        """Return max(0, 1 - beta margin) for each pair, [P]."""
        return relu(1 - self.config.beta * (chosen.log_ratio - rejected.log_ratio))
