"""IPO: the lead is pulled to a finite value, so that a certain preference does not pull for ever.

Source: Azar et al. 2023 (arXiv 2310.12036), eq. 17.

    loss = (lead - 1 / (2 beta))^2

Deviation: log-ratios are means over an answer's tokens, as its authors advise and TRL does.
"""

from __future__ import annotations

from torch import Tensor

from hybrid_rlhf.algorithms.preference.pairs import Answers, PairLoss


class IPO(PairLoss):
    """Squared distance of the lead to its target."""

    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        """See PairLoss."""
        lead = chosen.log_ratio / chosen.tokens - rejected.log_ratio / rejected.tokens
        return (lead - 1 / (2 * self.config.beta)).square()
