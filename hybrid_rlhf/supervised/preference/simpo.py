"""SimPO: mean log-probs per token are the reward, without a reference, and must differ by a target margin.

Source: Meng et al. 2024 (arXiv 2405.14734), eq. 6.

    loss = -log sigmoid(beta / |w| log p(w) - beta / |l| log p(l) - target_margin)
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from hybrid_rlhf.configs.preference import SimPOConfig
from hybrid_rlhf.supervised.preference.pair_loss import PairLoss, PairSide


class SimPO(PairLoss):
    """Logistic loss of the difference of mean log-probs."""

    config: SimPOConfig

    def losses(self, chosen: PairSide, rejected: PairSide) -> Tensor:
        """Return -log sigmoid of the difference of rewards less the target margin, for each pair, [P]."""
        return -logsigmoid(self.rewards(chosen) - self.rewards(rejected) - self.config.target_margin)

    def rewards(self, side: PairSide) -> Tensor:
        """Return beta times the mean log-prob per token, [P]."""
        return self.config.beta * side.mean_logprobs
