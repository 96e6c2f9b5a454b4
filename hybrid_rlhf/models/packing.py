"""Packing: the rows of a batch pass through the model as one row of real tokens, with attention within each row.

Why: completions end early, so a padded batch is half padding, and everything except attention costs as much for padding
as for text. Position ids restart at each row, by which transformers' flash attention separates rows. With any other
kernel, attention is computed here: on a GPU in bfloat16 and float16 by one call of a varlen kernel (varlen.py);
elsewhere, and for soft-capped scores, queries, keys and values are padded for attention only, in groups of rows with
similar lengths, so that little of it is padding.

The boundaries of the rows reach the layers in place of a mask: transformers passes a 4D mask on unchanged, also when
activation checkpointing runs a layer again in backward.

Shapes: B rows, T time, N real tokens of all rows, L of the longest, A heads, K KV heads, D head size.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hybrid_rlhf.functional.masking import position_ids
from hybrid_rlhf.models.families import PACKING_FAMILIES
from hybrid_rlhf.models.varlen import boundaries, head_size, varlen_attention

PACKED_ATTENTION = "hybrid_rlhf_packed"
"""Name of our function among transformers' attention implementations."""
_MIN_LENGTH_RATIO = 0.75
"""Shortest row of a group, as a share of its longest."""
_MOST_GROUPS = 4
_GROUP = 2**32
"""Factor of the group in the values of a mask; the rest is the row."""
_MIN_SAVING = {"cpu": 2**12, "cuda": 2**22}
"""Attention scores per head that another group must save, since it costs another attention call."""


def use_packing(lm: PreTrainedModel) -> None:
    """Let a model use packed rows if its family and kernel support them; others use padded rows."""
    if lm.config.model_type in PACKING_FAMILIES and lm.config._attn_implementation in ("sdpa", "eager"):
        lm.set_attn_implementation(PACKED_ATTENTION)
        vars(lm)["has_own_scores"] = _has_own_scores(lm)  # read for every batch


def packs(lm: PreTrainedModel) -> bool:
    """Whether a model uses packed rows."""
    kernel = lm.config._attn_implementation
    return lm.config.model_type in PACKING_FAMILIES and (kernel == PACKED_ATTENTION or kernel.startswith("flash"))


@dataclass(frozen=True)
class PackedBatch:
    """Rows [B, T] as one row of real tokens."""

    arguments: dict[str, Any]
    """Arguments of the backbone: tokens and positions [1, N], and the boundaries of rows."""
    order: Tensor | None
    """Index [N] of each real token of [B, T] in the packed row; none: the same order."""

    def unpacked(self, states: Tensor) -> Tensor:
        """States [N, H] of the packed row in the order of [B, T]."""
        return states if self.order is None else states.index_select(0, self.order)

    def packed(self, values: Tensor) -> Tensor:
        """The inverse of `unpacked`."""
        return values if self.order is None else torch.empty_like(values).index_copy_(0, self.order, values)


def pack(lm: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor) -> PackedBatch:
    """Remove padding from rows [B, T], wherever it is."""
    real = attention_mask.bool()
    if lm.config._attn_implementation != PACKED_ATTENTION:
        return PackedBatch({"input_ids": input_ids[real][None], "position_ids": position_ids(real)[real][None]}, None)
    ends = _ends(lm, real)
    if ends is not None:
        positions = position_ids(real)[real][None]
        return PackedBatch(
            {"input_ids": input_ids[real][None], "position_ids": positions, "attention_mask": ends}, None
        )
    sizes = real.sum(dim=1).tolist()
    rows = sorted(range(len(sizes)), key=lambda row: -sizes[row])
    longest_first = [sizes[row] for row in rows]
    groups = _groups(longest_first, min_saving=_MIN_SAVING[real.device.type])
    order = None
    if len(groups) > 1:
        sizes = longest_first
        place = torch.empty_like(real, dtype=torch.long)
        place[rows] = real[rows].flatten().cumsum(dim=0).view(real.shape) - 1
        order = place[real]
        input_ids, real = input_ids[rows], real[rows]
    mask = places(sizes, groups, device=real.device)
    arguments = {"input_ids": input_ids[real][None], "position_ids": position_ids(real)[real][None]}
    return PackedBatch({**arguments, "attention_mask": mask}, order)


def _ends(lm: PreTrainedModel, real: Tensor) -> Tensor | None:
    """Boundaries of rows [B, T] for a varlen kernel: int32 [1, 1, 1, B + 1], with the longest length; or none."""
    config = lm.config.get_text_config()
    if vars(lm)["has_own_scores"] or config.is_heterogeneous:  # the latter has heads of several sizes
        return None
    if varlen_attention(real.device, lm.dtype, head_size(config)) is None:
        return None
    sizes = real.sum(dim=1)
    mask: Any = boundaries(sizes)[None, None, None]
    mask.longest = int(sizes.max())
    return mask  # type: ignore[no-any-return]


def _groups(lengths: Sequence[int], *, min_saving: int) -> list[int]:
    """Sizes of groups of rows, longest row first, that share one attention call; a new group must save scores."""
    groups: list[int] = []
    start = 0
    for row in range(1, len(lengths)):
        saving = (len(lengths) - row) * (lengths[start] ** 2 - lengths[row] ** 2)
        if (
            lengths[row] <= _MIN_LENGTH_RATIO * lengths[start]
            and saving >= min_saving
            and len(groups) < _MOST_GROUPS - 1
        ):
            groups.append(row - start)
            start = row
    return [*groups, len(lengths) - start]


@dataclass(frozen=True)
class _Group:
    """Rows of one attention call, padded to the longest of them."""

    rows: int
    longest: int
    places: Tensor
    """Index [n] of each token in the padded rows [rows * longest]."""
    tokens: Tensor
    """Token [rows * longest] at each padded index; at padding the last of its row, so that a NaN stays in its row."""
    padding: Tensor
    """Padded indices without a token."""

    @staticmethod
    def of(lengths: Sequence[int], *, device: torch.device) -> _Group:
        """A group of rows with these lengths, in the order of the packed row."""
        sizes, longest = torch.tensor(lengths), max(lengths)
        time = torch.arange(longest)
        real = time < sizes[:, None]
        tokens = (sizes.cumsum(0) - sizes)[:, None] + torch.minimum(time, sizes[:, None] - 1)
        tokens.clamp_(min=0)  # for an empty first row
        flat = real.flatten()
        return _Group(
            len(lengths),
            longest,
            flat.nonzero().squeeze(1).to(device),
            tokens.flatten().to(device),
            (~flat).nonzero().squeeze(1).to(device),
        )

    def pad(self, x: Tensor) -> Tensor:
        """Tokens [n, A, D] to padded rows [rows, A, longest, D]."""
        padded = _Pad.apply(x, self) if len(self.padding) else x
        return padded.unflatten(0, (self.rows, self.longest)).transpose(1, 2)

    def unpad(self, x: Tensor) -> Tensor:
        """The inverse of `pad`."""
        flat = x.transpose(1, 2).flatten(0, 1)
        return _Unpad.apply(flat, self) if len(self.padding) else flat  # type: ignore[no-any-return]


def places(lengths: Sequence[int], sizes: Sequence[int], *, device: torch.device) -> Tensor:
    """The row of each token and the group of each row, as a mask of attention: int64 [1, 1, 1, N], with the groups as
    an attribute.

    Args:
        lengths: of the rows, in the order of the packed row.
        sizes: rows of each group.
        device: of the tokens.
    """
    groups, start = [], 0
    for size in sizes:
        groups.append(_Group.of(lengths[start : start + size], device=device))
        start += size
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    group_of_row = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    mask: Any = (group_of_row[rows] * _GROUP + rows).to(device)[None, None, None]
    mask.groups = groups
    return mask  # type: ignore[no-any-return]


def _groups_of(mask: Tensor) -> list[_Group]:
    """The groups of `places`. ZeRO-3 passes a copy without the attribute to layers that take the mask by position."""
    known: list[_Group] | None = getattr(mask, "groups", None)
    return _decoded(tuple(mask.flatten().tolist()), mask.device) if known is None else known


@functools.lru_cache(maxsize=4)
def _decoded(codes: tuple[int, ...], device: torch.device) -> list[_Group]:
    """The groups of a mask's values; rows without a token are left out."""
    rows = Counter(codes)
    by_group = itertools.groupby(rows, key=lambda code: code // _GROUP)
    return [_Group.of([rows[code] for code in codes_of_group], device=device) for _, codes_of_group in by_group]


class _Pad(torch.autograd.Function):
    """[N, ...] to [B * L, ...]; padding holds the last token of its row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: _Group) -> Tensor:
        ctx.group = group
        return x.index_select(0, group.tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.group.places), None  # the gradient of padding is 0, see _Unpad


class _Unpad(torch.autograd.Function):
    """[B * L, ...] to [N, ...]; padding gets a gradient of 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: _Group) -> Tensor:
        ctx.group = group
        return x.index_select(0, group.places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.group.tokens).index_fill_(0, ctx.group.padding, 0.0), None


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
    **other: Any,
) -> tuple[Tensor, None]:
    """Attention of packed rows; padded rows (generation through the module) are computed as by transformers.

    Args:
        module: the layer's attention.
        query: [1, A, N, D].
        key: [1, K, N, D].
        value: as key.
        attention_mask: the boundaries of the rows (see `_ends`), or the padded indices of the tokens (see `places`);
            anything else is a mask of padded rows.
        scaling: scores are multiplied by it; none: 1 / sqrt(D).
        sliding_window: tokens that a query attends to, itself included; none: all before it.
        softcap: scores s become softcap * tanh(s / softcap).
        s_aux: [A], a score per head that takes part in the softmax but has no value (attention sinks of gpt-oss).
        other: further arguments of transformers to attention functions.

    Returns:
        [1, N, A, D], and None in place of attention weights.
    """
    if attention_mask is not None and attention_mask.dtype == torch.int32:
        return _attend_varlen(query, key, value, attention_mask, scaling, sliding_window), None
    if attention_mask is None or attention_mask.dtype != torch.int64:
        if softcap is None and s_aux is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **other)  # type: ignore[no-any-return]
        mixed = _attend(query, key, value, attention_mask, scaling, softcap, s_aux)
        return mixed.transpose(1, 2).contiguous(), None
    groups = _groups_of(attention_mask)
    counts = [len(group.places) for group in groups]
    parts = zip(*(x[0].transpose(0, 1).split(counts) for x in (query, key, value)), strict=True)
    outputs = []
    for tokens, group in zip(parts, groups, strict=True):
        q, k, v = (group.pad(x) for x in tokens)
        mixed = _attend(q, k, v, _window(group.longest, sliding_window, query.device), scaling, softcap, s_aux)
        outputs.append(group.unpad(mixed))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None


def _attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    """[1, N, A, D] of queries [1, A, N, D], with the mask of `_ends`."""
    attend = varlen_attention(query.device, query.dtype, query.shape[-1])
    assert attend is not None, f"rows were packed for a varlen kernel, which has no {query.dtype}"
    ends = mask.flatten()
    longest = getattr(mask, "longest", None) or int(ends.diff().max())  # see _groups_of
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(q, k, v, (ends, ends), (longest, longest), scale=scaling, window=window)[None]


def _window(length: int, size: int | None, device: torch.device) -> Tensor | None:
    """[L, L], true where a query attends to a key; none where a causal mask is enough."""
    if size is None or size >= length:
        return None
    place = torch.arange(length, device=device)
    distance = place[:, None] - place
    return (distance >= 0) & (distance < size)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[B, A, L, D] of padded rows; causal without a mask."""
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
    # Not -inf: a padded query attends to no key, and its NaN would spread.
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores)], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value


def _has_own_scores(lm: PreTrainedModel) -> bool:
    """Whether attention does more to its scores than a varlen kernel does: soft caps, sinks."""
    capped = getattr(lm.config, "attn_logit_softcapping", None) is not None
    return capped or any(name.endswith(".sinks") for name, _ in lm.named_parameters())


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
