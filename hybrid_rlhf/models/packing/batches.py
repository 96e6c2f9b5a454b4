"""A batch as a packed row, for models whose layers keep its rows apart.

Shapes: B rows, T time, N real tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rlhf.functional.masking import position_ids
from hybrid_rlhf.models.families import PACKING_FAMILIES, has_mixers
from hybrid_rlhf.models.packing.attention import PACKED_ATTENTION, head_size, varlen_attention
from hybrid_rlhf.models.packing.mixers import separate_rows
from hybrid_rlhf.models.packing.rows import ends, places

_MIN_LENGTH_RATIO = 0.75
"""Smallest ratio of a group's shortest row to its longest."""
_MOST_GROUPS = 4
_MIN_SAVING = {"cpu": 2**12, "cuda": 2**22}
"""Number of attention scores per head that a further group must save, as it costs another attention call."""
_LAYER_KINDS = ("full_attention", "chunked_attention", "linear_attention", "conv")
"""Kinds of layers for which transformers makes separate masks, in models with mixers."""


def use_packing(lm: PreTrainedModel) -> None:
    """Enable packed rows for a model if its family and kernel support them; otherwise it uses padded rows."""
    if lm.config.model_type in PACKING_FAMILIES and lm.config._attn_implementation in ("sdpa", "eager"):
        lm.set_attn_implementation(PACKED_ATTENTION)
        vars(lm)["has_own_scores"] = _has_own_scores(lm)  # read for every batch
        if has_mixers(lm.config):
            vars(lm)["mask_kinds"] = _LAYER_KINDS  # read for every batch
            separate_rows(lm)


def packs(lm: PreTrainedModel) -> bool:
    """Return True if a model uses packed rows."""
    return why_padded(lm) is None


def why_padded(lm: PreTrainedModel) -> str | None:
    """The reason why the rows of a model are padded; None if they are packed."""
    kernel = lm.config._attn_implementation
    if lm.config.model_type not in PACKING_FAMILIES:
        return f"model type {lm.config.model_type} is not known to compute packed rows as padded ones"
    if kernel.startswith("flash"):
        return f"{kernel} gives its recurrent layers no mask" if has_mixers(lm.config) else None
    return None if kernel == PACKED_ATTENTION else f"{kernel} attention does not separate packed rows"


def pads(lm: PreTrainedModel) -> bool:
    """Return True if some layers compute padding: all layers with padded rows, mixers in any case."""
    return not packs(lm) or has_mixers(lm.config)


@dataclass(frozen=True)
class PackedBatch:
    """Rows [B, T] as one row of real tokens."""

    arguments: dict[str, Any]
    """Arguments of the backbone: tokens and positions [1, N], and the boundaries of rows."""
    order: Tensor | None
    """Index [N] of each real token of [B, T] in the packed row; None for the same order."""

    def unpacked(self, states: Tensor) -> Tensor:
        """States [N, H] of the packed row in the order of [B, T]."""
        return states if self.order is None else states.index_select(0, self.order)

    def packed(self, values: Tensor) -> Tensor:
        """The inverse of `unpacked`."""
        return values if self.order is None else torch.empty_like(values).index_copy_(0, self.order, values)


def pack(lm: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor) -> PackedBatch:
    """Remove padding from rows [B, T], at any position."""
    real = attention_mask.bool()
    if (arguments := _in_order(lm, input_ids, real)) is not None:
        return PackedBatch(arguments, None)
    sizes = real.sum(dim=1).tolist()
    rows = sorted(range(len(sizes)), key=lambda row: -sizes[row])
    longest_first = [sizes[row] for row in rows]
    groups = like_lengths(longest_first, real.device)
    order = None
    if len(groups) > 1:
        sizes = longest_first
        place = torch.empty_like(real, dtype=torch.long)
        place[rows] = real[rows].flatten().cumsum(dim=0).view(real.shape) - 1
        order = place[real]
        input_ids = input_ids[rows]
        real = real[rows]
    return PackedBatch(_arguments(lm, input_ids, real, places(sizes, groups, device=real.device)), order)


def pack_parts(lm: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, parts: Sequence[int]) -> dict[str, Any]:
    """Arguments of the backbone for rows [B, T] that keep their order in the packed row.

    Args:
        lm: the model.
        input_ids: [B, T] int64.
        attention_mask: [B, T], true on real tokens.
        parts: number of rows of each part. The rows of a part are in descending order of length; rows of different
            parts share an attention call only if all rows do.
    """
    real = attention_mask.bool()
    if (arguments := _in_order(lm, input_ids, real)) is not None:
        return arguments
    sizes = real.sum(dim=1).tolist()
    groups = like_lengths(sorted(sizes, reverse=True), real.device)
    if len(groups) > 1:
        groups = []
        start = 0
        for part in parts:
            groups += like_lengths(sizes[start : start + part], real.device) if part else []
            start += part
    return _arguments(lm, input_ids, real, places(sizes, groups, device=real.device))


def _in_order(lm: PreTrainedModel, input_ids: Tensor, real: Tensor) -> dict[str, Any] | None:
    """Arguments of the backbone for a kernel that takes rows of any lengths; None for one that needs groups of rows."""
    if lm.config._attn_implementation != PACKED_ATTENTION:
        return _arguments(lm, input_ids, real, None)
    return _arguments(lm, input_ids, real, ends(real.sum(dim=1))) if has_varlen_kernel(lm, real.device) else None


def layer_masks(lm: PreTrainedModel, mask: Tensor) -> Tensor | dict[str, Tensor]:
    """The boundaries of rows in the form that a model takes: with mixers one mask for each kind of layer, since
    transformers passes no 4D mask to recurrent layers."""
    kinds = vars(lm).get("mask_kinds")
    return mask if kinds is None else dict.fromkeys(kinds, mask)


def _arguments(lm: PreTrainedModel, input_ids: Tensor, real: Tensor, mask: Tensor | None) -> dict[str, Any]:
    """Arguments of the backbone for the real tokens of rows [B, T] with these boundaries, if it needs them."""
    arguments = {"input_ids": input_ids[real][None], "position_ids": position_ids(real)[real][None]}
    return arguments if mask is None else {**arguments, "attention_mask": layer_masks(lm, mask)}


def has_varlen_kernel(lm: PreTrainedModel, device: torch.device) -> bool:
    """Return True if a varlen kernel computes a model's attention."""
    config = lm.config.get_text_config()
    if vars(lm)["has_own_scores"] or config.is_heterogeneous:  # the latter has heads of several sizes
        return False
    return varlen_attention(device, lm.dtype, head_size(config)) is not None


def like_lengths(lengths: Sequence[int], device: torch.device) -> list[int]:
    """Sizes of groups of rows, longest row first, that share one attention call; each further group must save
    scores."""
    min_saving = _MIN_SAVING[device.type]
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


def _has_own_scores(lm: PreTrainedModel) -> bool:
    """Return True if attention transforms its scores more than a varlen kernel does: soft caps, sinks."""
    capped = getattr(lm.config.get_text_config(), "attn_logit_softcapping", None) is not None
    return capped or any(name.endswith(".sinks") for name, _ in lm.named_parameters())
