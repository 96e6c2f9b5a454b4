"""Attention of packed rows, separately for each row.

Position ids restart at each row, by which transformers' flash attention separates rows. With any other kernel,
attention is computed here: on a GPU in bfloat16 and float16 by one call of a varlen kernel; elsewhere, and for
soft-capped scores, queries, keys and values are padded for attention only, in groups of rows with similar lengths, so
that little of it is padding.

`scaled_dot_product_attention` needs rows of one length, so rows of different lengths need padding or several calls, and
on Hopper torch may pass each new shape to cuDNN, which then builds a plan for it (0.4 to 0.5 s, FunASR issue 3704). A
varlen kernel takes the boundaries as a tensor: one call, no padding, no plan.

Rows that continue a prefix attend to its keys too, of which each row gets a copy: the keys of a prefix have one index
for each of these rows, so that rows of several prefixes share a call.

Under sequence parallelism (sequence.py), ranks exchange parts of the tokens of all heads for all tokens of a part of
the heads, and back.

Source of the kernels: torch.nn.attention.varlen (from torch 2.11 on; keys are repeated where it has no grouped
queries), else the flash-attn package (arXiv 2307.08691). Both are FlashAttention-2 kernels: bfloat16 and float16 on
CUDA from compute capability 8.0 on, head sizes that are multiples of 8 up to 256. In a row with more keys than queries,
the causal mask is aligned to the last key. Queries, keys and values have one head size.

Shapes: N real tokens of all rows, M keys of all, B rows, A heads, K KV heads, D head size, L tokens of the longest row
of a group.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hybrid_rlhf.functional.operations import with_gradient
from hybrid_rlhf.models.packing.rows import VarlenKeys, groups_of, is_packed, take
from hybrid_rlhf.runtime.world import World

_LARGEST_HEAD = 256


VarlenAttention = Callable[..., Tensor]
"""A varlen kernel, with the signature of `_torch_varlen`."""


def varlen_attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> VarlenAttention | None:
    """The kernel for a device, dtype and head size; None without a kernel."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    if head_dim % 8 or head_dim > _LARGEST_HEAD or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    if _torch_has_varlen() and torch.backends.cuda.is_flash_attention_available():
        return _torch_varlen
    return _flash_attn_varlen if importlib.util.find_spec("flash_attn") is not None else None


def head_size(config: object) -> int:
    """The head size of queries and keys of a Hugging Face text config. Latent attention (DeepSeek) calls it
    `qk_head_dim`; its `head_dim` is the size of the rotated part."""
    size = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None)
    return int(size or config.hidden_size // config.num_attention_heads)  # type: ignore[attr-defined]


@cache
def _torch_has_varlen() -> bool:
    """Return True if torch's kernel supports scales and windows, which torch 2.10's does not."""
    return {"scale", "window_size"} <= _varlen_parameters()


@cache
def _varlen_parameters() -> set[str]:
    """Names of the parameters of torch's kernel; empty if torch has none."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return set()
    return set(inspect.signature(importlib.import_module("torch.nn.attention.varlen").varlen_attn).parameters)


def _torch_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Causal attention within each sequence.

    Args:
        query: [N, A, D].
        key: [M, K, D].
        value: [M, K, D].
        ends: boundaries of the sequences, int32 [B + 1] from 0, in the queries and in the keys.
        longest: length of the longest sequence, in queries and in keys.
        scale: factor of the scores; None: 1 / sqrt(D).
        window: number of tokens that a query attends to, itself included; None: all tokens before it.

    Returns:
        [N, A, D].
    """
    from torch.nn.attention.varlen import varlen_attn

    grouped: dict[str, Any] = {}
    if "enable_gqa" in _varlen_parameters():
        grouped["enable_gqa"] = query.shape[1] != key.shape[1]
    else:
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    window_size = (-1 if window is None else window - 1, 0)
    mixed = varlen_attn(query, key, value, *ends, *longest, scale=scale, window_size=window_size, **grouped)
    assert isinstance(mixed, Tensor)  # log-sum-exps are returned only on request
    return mixed


def _flash_attn_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    mixed: Tensor = importlib.import_module("flash_attn").flash_attn_varlen_func(
        query,
        key,
        value,
        *ends,
        *longest,
        softmax_scale=scale,
        causal=True,
        window_size=(-1 if window is None else window - 1, 0),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return mixed


_SEQUENCE = "sequence_world"
"""Attribute of the modules of a model under sequence parallelism: the ranks of the group."""
_TENSOR = "tensor_world"
"""Attribute of a model under tensor parallelism: the ranks of the group."""


def set_sequence_world(lm: nn.Module, world: World) -> None:
    """Set the ranks that compute the rows of a model together (sequence.py)."""
    for module in lm.modules():
        vars(module)[_SEQUENCE] = world


def set_tensor_world(lm: nn.Module, world: World) -> None:
    """Set the ranks that hold parts of a model's weights and compute its rows together."""
    vars(lm)[_TENSOR] = world


def tensor_world(lm: nn.Module) -> World | None:
    """The ranks that hold parts of a model's weights and compute its rows together; None without tensor parallelism."""
    world: World | None = vars(lm).get(_TENSOR)
    return world


def rows_world(module: nn.Module) -> World | None:
    """The ranks that compute the rows of a model, or of one of its modules under sequence parallelism, together; None
    without sequence and tensor parallelism."""
    world: World | None = vars(module).get(_SEQUENCE) or tensor_world(module)
    return world


def _heads_of_all_tokens(x: Tensor, world: World) -> Tensor:
    """[1, A / S, N, D], this rank's heads of all tokens, from [1, A, C, D], all heads of this rank's tokens.

    S are the ranks of the group, C = N / S the tokens of a rank. Fewer heads than ranks, as grouped keys and values may
    have, are repeated: each rank gets the one of its queries.
    """
    heads = x.shape[1]
    x = x.repeat_interleave(math.lcm(heads, world.size) // heads, dim=1) if heads % world.size else x
    return _tokens_of_all_heads(x, world)


def _tokens_of_all_heads(x: Tensor, world: World) -> Tensor:
    """The inverse: [1, C, A, D] from [1, N, A / S, D]; the same exchange, as is the gradient."""
    parts = with_gradient(x[0].unflatten(0, (world.size, -1)), world.all_to_all, world.all_to_all)
    return parts.transpose(0, 1).flatten(1, 2)[None]


PACKED_ATTENTION = "hybrid_rlhf_packed"
"""Name of this module's function among transformers' attention implementations."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of packed rows; padded rows (generation through the module) are computed as by transformers.

    Args:
        module: the layer's attention.
        query: [1, A, N, D].
        key: [1, K, N, D].
        value: [1, K, N, D].
        attention_mask: the boundaries of the rows (see `ends`), or the row of each token (see `places`);
            anything else is a mask of padded rows.
        scaling: factor of the scores; None: 1 / sqrt(D).
        sliding_window: number of tokens that a query attends to, itself included; None: all tokens before it.
        softcap: scores s become softcap * tanh(s / softcap).
        s_aux: [A], a score per head that takes part in the softmax but has no value (attention sinks of gpt-oss).
        options: further arguments that transformers passes to attention functions.

    Returns:
        [1, N, A, D], and None in place of attention weights.
    """
    if attention_mask is None or not is_packed(attention_mask):
        if softcap is None and s_aux is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)  # type: ignore[no-any-return]
        mixed = _attend(query, key, value, attention_mask, scaling, softcap, s_aux)
        return mixed.transpose(1, 2).contiguous(), None
    world = rows_world(module)
    if world is not None:
        query, key, value = (_heads_of_all_tokens(x, world) for x in (query, key, value))
        s_aux = None if s_aux is None else s_aux.chunk(world.size)[world.rank]
    mixed = _attend_rows(query, key, value, attention_mask, scaling, sliding_window, softcap, s_aux)
    return mixed if world is None else _tokens_of_all_heads(mixed, world), None


def _attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """[1, N, A, D] of packed rows."""
    if attention_mask.dtype == torch.int32:
        return _attend_varlen(query, key, value, attention_mask, scaling, sliding_window)
    groups = groups_of(attention_mask)
    counts = [len(group.places) for group in groups]
    whole = [x[0].transpose(0, 1) for x in (query, key, value)]
    outputs = []
    for tokens, group in zip(zip(*(x.split(counts) for x in whole), strict=True), groups, strict=True):
        if group.keys is None:
            padded = [group.pad(x) for x in tokens]
        else:
            padded = [group.pad(tokens[0]), *(take(x, group.keys) for x in whole[1:])]
        q, k, v = (x.transpose(1, 2) for x in padded)
        mixed = _attend(q, k, v, group.mask(sliding_window, q), scaling, softcap, s_aux)
        outputs.append(group.unpad(mixed.transpose(1, 2)))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None]


def _attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    """[1, N, A, D] of queries [1, A, N, D], with the mask of `ends`; D of the output is that of the values.

    The kernel takes one head size. Latent attention (DeepSeek) has smaller values, which are padded with zeros; the
    additional outputs are cut off.
    """
    attend = varlen_attention(query.device, query.dtype, query.shape[-1])
    assert attend is not None, f"rows were packed for a varlen kernel, which has no {query.dtype}"
    ends = mask[0, 0, 0]
    longest = getattr(mask, "longest", None) or int(ends.diff().max())
    size = value.shape[-1]
    if size < query.shape[-1]:
        value = nn.functional.pad(value, (0, query.shape[-1] - size))
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if (keys := VarlenKeys.of(mask)) is None:
        return attend(q, k, v, (ends, ends), (longest, longest), scale=scaling, window=window)[None, ..., :size]
    k, v = (take(x, keys.tokens) for x in (k, v))
    both = (ends, keys.ends), (longest, keys.longest)
    return attend(q, k, v, *both, scale=scaling, window=window)[None, ..., :size]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[B, A, L, D] of padded rows; causal without a mask, which is true, or 0 and not -inf, where queries attend."""
    gqa = query.shape[1] != key.shape[1]
    if softcap is None and sinks is None:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=gqa
        )
    if gqa:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril(
            scores.shape[3] - scores.shape[2]
        )
    elif mask.is_floating_point():
        mask = mask == 0
    # Not -inf: a padded query attends to no key, and its NaN would spread.
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores)], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
