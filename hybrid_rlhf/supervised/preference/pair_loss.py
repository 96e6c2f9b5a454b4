"""Base of the losses on pairs of completions: log-probs in, one loss per pair out.

Log-probs are sums over the tokens of a completion, including its end of turn, without the prompt. The loss is divided
once by the pairs of the whole update. With algorithm.sft_coef each pair adds the negative log-likelihood per
token of its chosen completion (RPO, arXiv 2404.19733, eq. 2).

Shapes: P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rlhf.configs.preference import PreferenceLossConfig
from hybrid_rlhf.functional.losses import LossSum


@dataclass(frozen=True)
class PairSide:
    """The chosen or the rejected completions of the pairs."""

    logprobs: Tensor
    """[P] log-probs under the actor, with gradient."""
    ref_logprobs: Tensor
    """[P] log-probs under the reference; 0 without one."""
    tokens: Tensor
    """[P] number of tokens, at least 1."""

    @property
    def log_ratio(self) -> Tensor:
        """[P] log-ratio of actor to reference: the implicit reward, before beta (DPO)."""
        return self.logprobs - self.ref_logprobs

    @property
    def mean_logprobs(self) -> Tensor:
        """[P] mean log-prob per token."""
        return self.logprobs / self.tokens


class PairLoss:
    """Base class of a loss on pairs."""

    def __init__(self, config: PreferenceLossConfig) -> None:
        self.config = config

    def losses(self, chosen: PairSide, rejected: PairSide) -> Tensor:
        """[P] loss of each pair."""
        raise NotImplementedError

    def rewards(self, side: PairSide) -> Tensor:
        """[P] implicit rewards of completions, from which accuracy and margin are computed."""
        return self.config.beta * side.log_ratio

    def __call__(self, chosen: PairSide, rejected: PairSide) -> LossSum:
        """The loss summed over pairs, with the stats accuracy, margin, chosen_reward, rejected_reward and sft."""
        losses = self.losses(chosen, rejected)
        sft = -chosen.mean_logprobs
        if self.config.sft_coef:
            losses = losses + self.config.sft_coef * sft
        chosen_rewards, rejected_rewards = self.rewards(chosen).detach(), self.rewards(rejected).detach()
        stats = {
            "accuracy": (chosen_rewards > rejected_rewards).float().sum(),
            "margin": (chosen_rewards - rejected_rewards).sum(),
            "chosen_reward": chosen_rewards.sum(),
            "rejected_reward": rejected_rewards.sum(),
            "sft": sft.detach().sum(),
        }
        return LossSum(losses.sum(), torch.full_like(losses, 1.0).sum().detach(), stats)
