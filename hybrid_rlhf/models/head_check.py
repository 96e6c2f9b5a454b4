"""Checks, when a model is loaded, that log-probs computed from its last hidden states agree with its logits.

The head runs separately from the model (policy.py), with the conventions that families/head.py reads from the config.
Without the check, a family with another convention would be trained on another distribution than it samples from.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.functional.logprobs import agreement, token_logprobs
from hybrid_rlhf.models.families.vision import banned_ids
from hybrid_rlhf.models.policy import Policy
from hybrid_rlhf.models.structure import backbone_of

PROBE_TOKENS = 20
"""More tokens than a block of the KV cache has."""
_PREFIX_TOKENS = 10
"""Number of tokens of the padded row that checks padding, or packing."""
_LOW_PRECISION_TOLERANCE = 0.25
"""Mean difference of the probe's log-probs in nats, for a model that rounds its logits to bfloat16 or float16."""


@functools.cache
def probe_tokens(vocab_size: int, count: int = PROBE_TOKENS) -> tuple[int, ...]:
    """The prompt with which heads and inference weights are checked."""
    return tuple(torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(0)).tolist())


@torch.no_grad()
def module_logprobs(lm: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """Log-probs [P - 1] of all tokens except the first, by the forward of a Hugging Face model without the tokens that
    stand for images."""
    ids = torch.tensor([tokens], device=lm.device)
    logits = lm(input_ids=ids, use_cache=False).logits[:, :-1]
    logits[..., list(banned_ids(lm.config))] = -torch.inf
    return token_logprobs(logits, labels=ids[:, 1:])[0]


@torch.no_grad()
def require_own_logits(lm: PreTrainedModel) -> None:
    """Check a model with full weights, on its device, on a few tokens.

    Raises:
        UserError: when log-probs differ by more than the tolerance, or the model has no backbone below a head.
    """
    name = type(lm).__name__
    report = "use another model, and report this one"
    if backbone_of(lm) is lm:
        raise UserError(f"log-probs need the hidden states below the head, {name} has no backbone: {report}")
    tokens = probe_tokens(lm.config.get_text_config().vocab_size)
    expected = module_logprobs(lm, tokens)
    ids = torch.tensor([tokens, tokens], device=lm.device)
    real = torch.ones_like(ids, dtype=torch.bool)
    real[1, _PREFIX_TOKENS:] = False  # a padded prefix of the same row: a causal model has the same log-probs
    whole, prefix = Policy(lm)(ids.where(real, 0), real, real)[0]
    logprobs = torch.cat([whole[1:], prefix[1:_PREFIX_TOKENS]])
    expected = torch.cat([expected, expected[: _PREFIX_TOKENS - 1]])
    result = agreement(logprobs, expected=expected, dtype=lm.dtype, low_precision=_LOW_PRECISION_TOLERANCE)
    if not result.holds:
        raise UserError(
            f"log-probs of padded rows must agree with the logits of {name} to {result.tolerance} nats, they differ "
            f"by {result.measured:.3g}: {report}"
        )
