"""IPO: regression of the margin to a finite value, so that deterministic preferences do not drive it to infinity.

Source: Azar et al. 2023 (arXiv 2310.12036), eq. 17.

    loss = (margin - 1 / (2 beta))^2

Deviation: log-ratios are means over the tokens of a completion, as the authors recommend and TRL does.
"""

from __future__ import annotations

from torch import Tensor

from hybrid_rlhf.supervised.preference.pair_loss import PairLoss, PairSide


class IPO(PairLoss):
    """Squared distance of the margin to its target."""

    def losses(self, chosen: PairSide, rejected: PairSide) -> Tensor:
        """Return (margin - 1 / (2 beta))^2 for each pair, with log-ratios per token, [P]."""
        margin = chosen.log_ratio / chosen.tokens - rejected.log_ratio / rejected.tokens
        return (margin - 1 / (2 * self.config.beta)).square()
