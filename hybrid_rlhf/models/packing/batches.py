"""A batch as a packed row, for models whose layers keep its rows apart.

The rows are packed on the host, where a rollout is: on a GPU, each index of unknown size would wait for the device.

Shapes: B rows, T time, N real tokens of all rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rlhf.functional.masking import position_ids
from hybrid_rlhf.models.families import PACKING_FAMILIES, has_mixers
from hybrid_rlhf.models.packing.attention import PACKED_ATTENTION, head_size, rows_world, varlen_attention
from hybrid_rlhf.models.packing.mixers import separate_rows
from hybrid_rlhf.models.packing.prefixes import SharedRows
from hybrid_rlhf.models.packing.rows import NO_PREFIX, ends, places, rows_of

_MIN_LENGTH_RATIO = 0.75
"""Smallest ratio of a group's shortest row to its longest."""
_MOST_GROUPS = 4
_MIN_SAVING = {"cpu": 2**12, "cuda": 2**22}
"""Number of attention scores per head that a further group must save, as it costs another attention call."""
_LAYER_KINDS = ("full_attention", "chunked_attention", "linear_attention", "conv")
"""Kinds of layers for which transformers makes separate masks, in models with mixers."""


_SAVED = "saved_rows"
"""Attribute of a model: result of `saved_rows`."""


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


def shares_prefixes(lm: PreTrainedModel) -> bool:
    """Return True if the common tokens of rows that begin alike pass through a model once."""
    return why_separate(lm) is None


def why_separate(lm: PreTrainedModel) -> str | None:
    """The reason why a model computes rows that begin alike in full; None if their common tokens are computed once."""
    if lm.config._attn_implementation != PACKED_ATTENTION:
        return f"{lm.config._attn_implementation} attention takes whole rows"
    if has_mixers(lm.config):
        return "it has layers, such as recurrent ones, that take whole rows"
    return None if rows_world(lm) is None else "several ranks compute its rows together"


def saved_rows(lm: PreTrainedModel) -> list[int]:
    """Tokens of the prefixes that the last forward did not compute again, one number for each time."""
    return vars(lm).get(_SAVED, [])


def pads(lm: PreTrainedModel) -> bool:
    """Return True if some layers compute padding: all layers with padded rows, mixers in any case."""
    return not packs(lm) or has_mixers(lm.config)


@dataclass(frozen=True)
class PackedBatch:
    """Rows [B, T] as one row of real tokens, on the host."""

    arguments: dict[str, Any]
    """Arguments of the backbone: tokens and positions [1, M], and the boundaries of rows."""
    order: Tensor | None
    """Index [N] of each real token of [B, T] in the packed row, once for each row that has it; None for the same
    order."""

    @property
    def tokens(self) -> int:
        """M: number of tokens that pass through the model."""
        return self.arguments["input_ids"].shape[1]  # type: ignore[no-any-return]

    @property
    def counts(self) -> Tensor | None:
        """[M] number of rows that have each token; None if each token is of one row."""
        return None if self.order is None else self.order.bincount(minlength=self.tokens)

    def packed(self, values: Tensor) -> Tensor:
        """Values [M, ...] of the packed row from those [N, ...] of [B, T], equal in all rows that share a token."""
        if self.order is None:
            return values
        return values.new_empty(self.tokens, *values.shape[1:]).index_copy_(0, self.order, values)


def pack(
    lm: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    routes: Tensor | None = None,
    *,
    keys: Tensor | None = None,
    device: torch.device | None = None,
) -> PackedBatch:
    """Remove padding from rows [B, T], at any position, and all but one copy of prefixes (prefixes.py); tokens with
    other `routes` [B, T, E, k] or other `keys` [B, T], in place of the ids, do not belong to one. `device` is that of
    the model; None: that of the ids."""
    device = device or input_ids.device
    input_ids, real = input_ids.cpu(), attention_mask.bool().cpu()
    order = None
    shared = (
        SharedRows.of(input_ids if keys is None else keys, real, routes)
        if len(real) > 1 and shares_prefixes(lm)
        else None
    )
    vars(lm)[_SAVED] = [] if shared is None else shared.saved
    if shared is not None:
        arguments = {
            "input_ids": input_ids[real][shared.first][None],
            "position_ids": shared.positions[None],
            "attention_mask": _mask_of_shared(lm, shared, device),
        }
        return PackedBatch(arguments, shared.order)
    if _needs_groups(lm, device):
        sizes = real.sum(dim=1).tolist()
        rows = sorted(range(len(sizes)), key=lambda row: -sizes[row])
        if len(like_lengths([sizes[row] for row in rows], device)) > 1:
            place = torch.empty_like(real, dtype=torch.long)
            place[rows] = real[rows].flatten().cumsum(dim=0).view(real.shape) - 1
            order = place[real]
            input_ids = input_ids[rows]
            real = real[rows]
    return PackedBatch(pack_parts(lm, input_ids, real, [len(real)], device=device), order)


def _mask_of_shared(lm: PreTrainedModel, shared: SharedRows, device: torch.device) -> Tensor:
    if not _needs_groups(lm, device):
        return ends(torch.tensor(shared.lengths), shared.prefixes)
    lengths = [math.sqrt(scores) for scores in shared.scores]
    roots = shared.prefixes.count(NO_PREFIX)
    sizes = [*like_lengths(lengths[:roots], device), *like_lengths(lengths[roots:], device)]
    return places(shared.lengths, sizes, prefixes=shared.prefixes)


def pack_parts(
    lm: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, parts: Sequence[int], *, device: torch.device
) -> dict[str, Any]:
    """Arguments of the backbone, on the host, for rows [B, T] that keep their order in the packed row.

    Args:
        lm: the model.
        input_ids: [B, T] int64, on the host.
        attention_mask: [B, T], true on real tokens, on the host.
        parts: number of rows of each part. The rows of a part are in descending order of length; rows of different
            parts share an attention call only if all rows do.
        device: device of the model.
    """
    real = attention_mask.bool()
    mask = None
    if _needs_groups(lm, device):
        sizes = real.sum(dim=1).tolist()
        groups = like_lengths(sorted(sizes, reverse=True), device)
        if len(groups) > 1:
            groups = []
            start = 0
            for part in parts:
                groups += like_lengths(sizes[start : start + part], device) if part else []
                start += part
        mask = places(sizes, groups)
    elif lm.config._attn_implementation == PACKED_ATTENTION:
        mask = ends(real.sum(dim=1))
    arguments = {"input_ids": input_ids[real][None], "position_ids": position_ids(real)[real][None]}
    return arguments if mask is None else {**arguments, "attention_mask": layer_masks(lm, mask)}


def _needs_groups(lm: PreTrainedModel, device: torch.device) -> bool:
    """Return True if attention of packed rows takes groups of rows with similar lengths, not rows of any lengths."""
    return lm.config._attn_implementation == PACKED_ATTENTION and not has_varlen_kernel(lm, device)


def layer_masks(lm: PreTrainedModel, mask: Tensor) -> Tensor | dict[str, Tensor]:
    """The boundaries of rows in the form that a model takes: with mixers one mask for each kind of layer, since
    transformers passes no 4D mask to recurrent layers."""
    kinds = vars(lm).get("mask_kinds")
    if kinds is None:
        return mask
    rows_of(mask)  # which mixers read
    return dict.fromkeys(kinds, mask)


def has_varlen_kernel(lm: PreTrainedModel, device: torch.device) -> bool:
    """Return True if a varlen kernel computes a model's attention."""
    config = lm.config.get_text_config()
    if vars(lm)["has_own_scores"] or config.is_heterogeneous:  # the latter has heads of several sizes
        return False
    return varlen_attention(device, lm.dtype, head_size(config)) is not None


def like_lengths(lengths: Sequence[float], device: torch.device) -> list[int]:
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
