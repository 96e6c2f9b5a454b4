"""Losses of the routers of mixtures of experts in training: load balancing and router z.

Without them training may send more and more tokens to few experts. They are off unless a setting or the model's config
enables them, like the loss of transformers (`output_router_logits`): coefficients in published configs are those of
pretraining and may be far too large (0.9 in gpt-oss), and balance works against the reward in RL.

Source: the load-balancing loss of Switch Transformers (arXiv 2101.03961, eq. 4 to 6), for several experts per token as
in transformers' `load_balancing_loss_func`: E sum_e f_e p_e, which is the number of experts per token where all are
used equally; the router z-loss of ST-MoE (arXiv 2202.08906, eq. 5): mean of logsumexp(logits)^2.

Deviation: f and p are means over the real tokens of one sequence, prompt included, as in DeepSeek-V3 (arXiv 2412.19437,
eq. 17 to 20), and the loss is a mean over layers and sequences, with the sequence weights of the main loss. A product
of two means over a micro-batch, as in transformers, would depend on how an update is divided into micro-batches and
ranks. transformers also takes both means over all layers together, so that layers with opposite imbalances look
balanced. As in transformers, a token's experts are those with the largest logits; a router with a correction may choose
others.

Shapes: B sequences, N real tokens of all, E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.functional.losses import LossSum
from hybrid_rlhf.models.families import WITHOUT_ROUTER_LOSSES
from hybrid_rlhf.models.routers.modules import router_modules

ROUTER_METRICS = ("router_aux_loss", "router_z_loss", "router_max_share")
ROUTER_TOTAL = "router_loss"
"""Stat of a loss: the sum that router losses add to it."""
_AUX_COEFS = ("router_aux_loss_coef", "aux_loss_coef")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "top_k_experts")


@dataclass(frozen=True)
class RouterLosses:
    """Router losses and metrics of each sequence of a batch."""

    total: Tensor
    """[B], both losses times their coefficients, with gradient."""
    stats: dict[str, Tensor]
    """Values of ROUTER_METRICS, [B]; router_max_share is the share of a sequence's tokens in a layer's busiest
    expert."""

    def added_to(self, loss: LossSum, weights: Tensor) -> LossSum:
        """A loss plus the router losses; weights [B] are the share of each sequence in the loss's count."""
        total = (weights * self.total).sum()
        stats = {name: (weights * value).sum() for name, value in self.stats.items()}
        return LossSum(loss.total + total, loss.count, {**loss.stats, **stats, ROUTER_TOTAL: total.detach()})


@dataclass(frozen=True)
class RouterLoss:
    """Computes the losses of a model's routers from their logits."""

    aux_coef: float
    z_coef: float
    per_token: int
    """Experts per token."""

    def __call__(self, logits: Sequence[Tensor], sequences: Tensor, lengths: Tensor) -> RouterLosses:
        """Losses of tokens with the logits [N, E] of each layer, the sequence [N] of each, and the lengths [B] of the
        sequences."""
        sizes = lengths[:, None].clamp(min=1)

        def mean(values: Tensor) -> Tensor:
            """[B, ...] means over the tokens of each sequence."""
            return values.new_zeros(len(sizes), values.shape[1]).index_add_(0, sequences, values) / sizes

        layers = []
        for layer in logits:
            scores = layer.float()
            shares = mean(torch.zeros_like(scores).scatter_(1, scores.topk(self.per_token, dim=1)[1], 1.0))
            aux = scores.shape[1] * (shares * mean(scores.softmax(dim=1))).sum(dim=1)
            z = mean(scores.logsumexp(dim=1, keepdim=True).square())[:, 0]
            layers.append(torch.stack([aux, z, shares.amax(dim=1)]))
        means = torch.stack(layers).mean(dim=0)
        stats = dict(zip(ROUTER_METRICS, means.detach(), strict=True))
        return RouterLosses(self.aux_coef * means[0] + self.z_coef * means[1], stats)


def router_loss(lm: PreTrainedModel, config: ModelConfig) -> RouterLoss | None:
    """The router losses of a trained model; None if no coefficient is above 0.

    Raises:
        UserError: for a coefficient, if transformers records no router logits of the model.
    """
    text = lm.config.get_text_config()
    coefficients = {
        "router_aux_loss_coef": config.router_aux_loss_coef,
        "router_z_loss_coef": config.router_z_loss_coef,
    }
    per_token = next((count for name in _EXPERTS_PER_TOKEN if (count := getattr(text, name, None))), None)
    if per_token is None or text.model_type in WITHOUT_ROUTER_LOSSES or not router_modules(lm):
        for name, value in coefficients.items():
            if value is not None:
                raise UserError(
                    f"model.{name} needs a mixture of experts with routers that transformers records, got {value} for "
                    f"a {text.model_type}: leave it out"
                )
        return None
    stored = (0.0, 0.0)
    if getattr(text, "output_router_logits", False):
        stored_aux = next((value for name in _AUX_COEFS if (value := getattr(text, name, 0.0))), 0.0)
        stored = stored_aux, getattr(text, "router_z_loss_coef", None) or 0.0
    aux, z = (default if value is None else value for value, default in zip(coefficients.values(), stored, strict=True))
    return RouterLoss(aux, z, per_token) if aux or z else None
