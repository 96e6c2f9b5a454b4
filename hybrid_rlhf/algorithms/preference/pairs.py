"""What the losses on pairs of answers share: log-probs in, one loss a pair out.

Log-probs of an answer are sums over its tokens, the end of the turn included; the prompt's count nowhere. A loss is
divided once by the pairs of the whole update. With loss.sft_coef each pair adds the negative log-likelihood a token of
its better answer (RPO, arXiv 2404.19733, eq. 2).

Shapes: P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rlhf.configs.preference import PreferenceLossConfig
from hybrid_rlhf.functional.losses import LossSum


@dataclass(frozen=True)
class Answers:
    """One side of the pairs."""

    logprobs: Tensor
    """[P] under the actor, with gradient."""
    ref_logprobs: Tensor
    """[P] under the reference; 0 where there is none."""
    tokens: Tensor
    """[P] of each answer, at least 1."""

    @property
    def log_ratio(self) -> Tensor:
        """[P] actor over reference: the implicit reward, before beta (DPO)."""
        return self.logprobs - self.ref_logprobs

    @property
    def mean_logprobs(self) -> Tensor:
        """[P] log-prob a token."""
        return self.logprobs / self.tokens


class PairLoss:
    """A loss on pairs; an algorithm says which."""

    def __init__(self, config: PreferenceLossConfig) -> None:
        self.config = config

    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        """[P] of each pair."""
        raise NotImplementedError

    def rewards(self, answers: Answers) -> Tensor:
        """[P] the implicit reward of answers: what accuracy and margin are told in."""
        return self.config.beta * answers.log_ratio

    def __call__(self, chosen: Answers, rejected: Answers) -> LossSum:
        """The sum over pairs, with stats: accuracy, margin, chosen_reward, rejected_reward, sft."""
        losses = self.losses(chosen, rejected)
        sft = -chosen.mean_logprobs
        if self.config.sft_coef:
            losses = losses + self.config.sft_coef * sft
        better, worse = self.rewards(chosen).detach(), self.rewards(rejected).detach()
        stats = {
            "accuracy": (better > worse).float().sum(),
            "margin": (better - worse).sum(),
            "chosen_reward": better.sum(),
            "rejected_reward": worse.sum(),
            "sft": sft.detach().sum(),
        }
        return LossSum(losses.sum(), torch.full_like(losses, 1.0).sum().detach(), stats)
