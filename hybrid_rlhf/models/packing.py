"""Padding removed: the rows of a batch pass through the model as one row of real tokens, their attention kept apart.

Why: responses end early, so a padded batch is half padding, and everything but attention costs as much for padding as
for text. Position ids begin again at each row. A varlen kernel (flash attention) keeps rows apart by them; any other
gets an attention function of ours, which spreads queries, keys and values over padded rows for the attention alone.

It reaches the layers in place of a mask: a 4D mask is handed through by transformers as it is, also when activation
checkpointing runs a layer again in backward.

Shapes: B rows, T time, N real tokens of all rows, L of the longest, A heads, K KV heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hybrid_rlhf.functional.masking import position_ids

PACKED_ATTENTION = "hybrid_rlhf_packed"
"""Name of our function among transformers' attention implementations."""
PACKING_FAMILIES = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "opt", "gpt2", "gpt_neox"}
)
"""Model types whose layers see nothing of their neighbours but through attention, each held by a test."""


def use_packing(lm: PreTrainedModel) -> None:
    """Let a model take packed rows, where its family and kernel can; others go on with padded ones."""
    kernel = lm.config._attn_implementation
    if lm.config.model_type in PACKING_FAMILIES and (kernel == "sdpa" or _softcap(lm) is not None):
        lm.set_attn_implementation(PACKED_ATTENTION)


def packs(lm: PreTrainedModel) -> bool:
    """Whether a model takes packed rows."""
    kernel = lm.config._attn_implementation
    return lm.config.model_type in PACKING_FAMILIES and (kernel == PACKED_ATTENTION or kernel.startswith("flash"))


def packed_arguments(lm: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Any]:
    """What the backbone is called with for rows [B, T]: [1, N] tokens and positions, and who attends to whom."""
    real = attention_mask.bool()
    arguments = {"input_ids": input_ids[real][None], "position_ids": position_ids(real)[real][None]}
    if lm.config._attn_implementation == PACKED_ATTENTION:
        arguments["attention_mask"] = _places(real)
    return arguments


def _places(real: Tensor) -> Tensor:
    """Where each token lies among padded rows: int64 [1, 1, B, L], of which the first N entries count."""
    lengths = real.sum(dim=1)
    longest = int(lengths.max())
    inside = torch.arange(longest, device=real.device) < lengths[:, None]
    places = torch.zeros(inside.numel(), dtype=torch.long, device=real.device)
    found = inside.flatten().nonzero().squeeze(1)
    places[: len(found)] = found
    return places.view(1, 1, len(real), longest)


class _Spread(torch.autograd.Function):
    """[N, ...] to [B * L, ...] by place, zero elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, total: int) -> Tensor:
        ctx.save_for_backward(places)
        return x.new_zeros(total, *x.shape[1:]).index_copy_(0, places, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class _Collect(torch.autograd.Function):
    """The way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.total = len(x)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        places = ctx.saved_tensors[0]
        return grad.new_zeros(ctx.total, *grad.shape[1:]).index_copy_(0, places, grad.contiguous()), None


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Attention of packed rows; of padded ones, as in generation through the module, as transformers computes it.

    Args:
        module: the layer's attention.
        query: [1, A, N, D].
        key: [1, K, N, D].
        value: as key.
        attention_mask: the places of the tokens (see `_places`); anything else is a mask for padded rows.
        scaling: scores are multiplied by it; none: 1 / sqrt(D).
        sliding_window: tokens that a query sees, itself included; none: all before it.
        softcap: scores s become softcap * tanh(s / softcap).
        other: what transformers also hands to attention functions.

    Returns:
        [1, N, A, D], and no weights.
    """
    if attention_mask is None or attention_mask.dtype != torch.int64:
        if softcap is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **other)  # type: ignore[no-any-return]
        mixed = _attend(query, key, value, attention_mask, scaling, softcap)
        return mixed.transpose(1, 2).contiguous(), None
    rows, longest = attention_mask.shape[2:]
    places = attention_mask.flatten()[: query.shape[2]]
    query, key, value = (
        _Spread.apply(x[0].transpose(0, 1), places, rows * longest).unflatten(0, (rows, longest)).transpose(1, 2)
        for x in (query, key, value)
    )
    window = None
    if sliding_window is not None and sliding_window < longest:
        distance = torch.arange(longest, device=query.device)[:, None] - torch.arange(longest, device=query.device)
        window = (distance >= 0) & (distance < sliding_window)
    mixed = _attend(query, key, value, window, scaling, softcap)
    return _Collect.apply(mixed.transpose(1, 2).flatten(0, 1), places)[None], None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, softcap: float | None
) -> Tensor:
    """[B, A, L, D]; causal without a mask."""
    gqa = query.shape[1] != key.shape[1]
    if softcap is None:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=gqa
        )
    if gqa:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril(
            scores.shape[3] - scores.shape[2]
        )
    # Not -inf: a padded query sees nothing, and NaN would spread.
    weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=-1, dtype=torch.float32)
    return weights.to(value.dtype) @ value


def _softcap(lm: PreTrainedModel) -> float | None:
    return getattr(lm.config, "attn_logit_softcapping", None)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
