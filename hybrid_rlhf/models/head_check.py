"""The proof, once a model is loaded, that log-probs from its last hidden states are those of its own logits.

Why: the head runs apart from the model (policy.py), by a table of what families do there (families.py). A family that
does something else would be trained on another distribution than it samples from, and nothing would say so.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.functional.logprobs import token_logprobs
from hybrid_rlhf.models.policy import Policy

_PROBE_TOKENS = 16
_FLOAT32_TOLERANCE = 2e-3
"""Nats that the worst of the probe's log-probs may be off."""
_LOW_PRECISION_TOLERANCE = 0.25
"""Nats that they may be off on average, where a model rounds its logits to bfloat16 or float16."""


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
    vocabulary = lm.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (1, _PROBE_TOKENS), generator=torch.Generator().manual_seed(0)).to(lm.device)
    real = torch.ones_like(ids, dtype=torch.bool)
    found = Policy(lm)(ids, real, real)[0][:, 1:]
    expected = token_logprobs(lm(input_ids=ids, use_cache=False).logits[:, :-1], labels=ids[:, 1:])
    difference = (found - expected).abs()
    exact = lm.dtype == torch.float32
    measured = float(difference.max() if exact else difference.mean())
    tolerance = _FLOAT32_TOLERANCE if exact else _LOW_PRECISION_TOLERANCE
    if not measured <= tolerance:  # NaN is past it
        raise UserError(
            f"log-probs must agree with the logits of {name} to {tolerance} nats, they are {measured:.3g} off: {report}"
        )
