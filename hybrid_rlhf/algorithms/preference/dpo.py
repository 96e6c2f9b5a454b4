"""DPO: the better answer's log-ratio to the reference should lead.

Source: Rafailov et al. 2023 (arXiv 2305.18290), eq. 7.

    loss = -log sigmoid(beta (log p(w) / ref(w) - log p(l) / ref(l)))
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from hybrid_rlhf.algorithms.preference.pairs import Answers, PairLoss


class DPO(PairLoss):
    """Logistic in the lead."""

    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        """See PairLoss."""
        return -logsigmoid(self.config.beta * (chosen.log_ratio - rejected.log_ratio))
