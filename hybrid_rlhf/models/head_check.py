"""The proof, once a model is loaded, that log-probs from its last hidden states are those of its own logits.

Why: the head runs apart from the model (policy.py), by a table of what families do there (families.py). A family that
does something else would be trained on another distribution than it samples from, and nothing would say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.functional.logprobs import token_logprobs
from hybrid_rlhf.models.policy import Policy

PROBE_TOKENS = 24
FLOAT32_TOLERANCE = 2e-3
"""Nats that the worst of a probe's log-probs may be off."""
_LOW_PRECISION_TOLERANCE = 0.25
"""Nats that they may be off on average, where a model rounds its logits to bfloat16 or float16."""
_STEPS = 2.0
"""Of a dtype at the logits' magnitude. Tiny models that compute the same in two orders are 0.2 to 0.9 of one off."""


@dataclass(frozen=True)
class Agreement:
    """How far log-probs of a probe are from what they should be, in nats."""

    measured: float
    """Of the worst in float32, the mean in lower precision."""
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether it is within the tolerance; NaN is not."""
        return self.measured <= self.tolerance


def agreement(
    found: Tensor, expected: Tensor, dtype: torch.dtype, *, low_precision: float, magnitude: float = 0.0
) -> Agreement:
    """How far log-probs are from what they should be.

    Args:
        found: [P - 1].
        expected: likewise.
        dtype: that they were computed in.
        low_precision: nats that they may be off on average where that is not float32, at least.
        magnitude: of the logits; there they may also be off by two of the dtype's steps at it.
    """
    difference = (found - expected.to(found)).abs()
    if dtype == torch.float32:
        return Agreement(float(difference.max()), FLOAT32_TOLERANCE)
    return Agreement(float(difference.mean()), max(low_precision, _STEPS * torch.finfo(dtype).eps * magnitude))


def probe_tokens(vocab_size: int) -> list[int]:
    """The prompt that heads and layouts are checked with."""
    return torch.randint(vocab_size, (PROBE_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()


@torch.no_grad()
def module_logprobs(lm: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """Log-probs [P - 1] of all tokens but the first under a Hugging Face model."""
    ids = torch.tensor([tokens], device=lm.device)
    return token_logprobs(lm(input_ids=ids, use_cache=False).logits[:, :-1], labels=ids[:, 1:])[0]


@torch.no_grad()
def require_own_logits(lm: PreTrainedModel) -> None:
    """Compare on a few tokens; weights are whole, and where they will be.

    Raises:
        UserError: when log-probs differ past the tolerance, or the model has no hidden states under a head.
    """
    name, report = type(lm).__name__, "take another model, and report this one"
    if lm.base_model is lm:
        raise UserError(
            f"log-probs need the hidden states under the head, {name} has no model of its own there: {report}"
        )
    tokens = probe_tokens(lm.config.get_text_config().vocab_size)
    ids = torch.tensor([tokens], device=lm.device)
    real = torch.ones_like(ids, dtype=torch.bool)
    found = Policy(lm)(ids, real, real)[0][0, 1:]
    told = agreement(found, module_logprobs(lm, tokens), lm.dtype, low_precision=_LOW_PRECISION_TOLERANCE)
    if not told.holds:
        raise UserError(
            f"log-probs must agree with the logits of {name} to {told.tolerance} nats, they are {told.measured:.3g} "
            f"off: {report}"
        )
