"""Hinge: pairs that lead by enough teach nothing more.

Source: SLiC-HF, Zhao et al. 2023 (arXiv 2305.10425), eq. 1, in the form of RSO, Liu et al. 2023 (arXiv 2309.06657),
eq. 7: on log-ratios to the reference.

    loss = max(0, 1 - beta lead)
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import relu

from hybrid_rlhf.algorithms.preference.pairs import Answers, PairLoss


class Hinge(PairLoss):
    """Linear up to a lead of 1 / beta."""

    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        """See PairLoss."""
        return relu(1 - self.config.beta * (chosen.log_ratio - rejected.log_ratio))
