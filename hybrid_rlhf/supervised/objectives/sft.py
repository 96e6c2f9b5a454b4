"""Step 1: supervised fine-tuning. Loss on assistant tokens only, divided by their number over the whole update.

Source: Ouyang et al. 2022 (arXiv 2203.02155), section 3.5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from hybrid_rlhf.data.collation import TokenBatch, collate_tokens
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.functional.losses import LossSum, sft_loss
from hybrid_rlhf.models.routers.losses import ROUTER_TOTAL
from hybrid_rlhf.supervised.trainer import Objective


class SFTObjective(Objective[TokenBatch]):
    """Negative log-likelihood of the assistant's tokens."""

    name = "sft"
    collator = staticmethod(collate_tokens)
    by_probability = False
    """True for the loss of DFT."""

    def masks(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """See Objective."""
        return batch.attention_mask, batch.loss_mask

    def count(self, batch: TokenBatch) -> int:
        """Number of tokens with loss."""
        return int(batch.loss_mask.sum())

    def loss(self, engine: ModelEngine, batch: TokenBatch) -> LossSum:
        """Return the negative log-likelihood, summed over the tokens with loss."""
        logprobs, _ = engine(batch.input_ids, batch.attention_mask, batch.loss_mask, images=batch.images)
        batch = batch.for_loss(self._device)
        loss = sft_loss(logprobs, mask=batch.loss_mask, by_probability=self.by_probability)
        return engine.with_router_losses(loss, batch.loss_mask.sum(dim=1))

    def metrics(self, means: Mapping[str, float], prefix: str) -> dict[str, float]:
        """Mean loss, and perplexity without router losses."""
        loss = means["loss"]
        nll = means.get("nll", loss - means.get(ROUTER_TOTAL, 0.0))
        return {f"{prefix}/loss": loss, f"{prefix}/perplexity": math.exp(min(nll, 700.0))}
