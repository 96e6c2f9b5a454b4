"""Maps the low-rank factors of adapters to products of the inference weights.

The loader selects and orders the rows of each training weight in a fused product. The same selection applies to the
rows of the adapter's factor [N, r], which is multiplied last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.generation.model.adapters import LowRankChange
from hybrid_rlhf.generation.model.decoder import LAYER_PRODUCTS
from hybrid_rlhf.generation.weights.picks import Pick
from hybrid_rlhf.models.pretrained.adapters import LowRank

Place = tuple[int, str]
"""Index of a layer, and name of a product in it."""


@dataclass(frozen=True)
class NumberedAdapter:
    """An adapter and its number in a batch, from 1 on."""

    number: int
    factors: Mapping[str, LowRank]
    """Changes by the names of training weights."""


def adapter_changes(
    adapters: Mapping[str, NumberedAdapter],
    parameters: Mapping[str, Tensor],
    targets: Mapping[str, Sequence[tuple[str, int, Pick]]],
    *,
    device: torch.device | None = None,
) -> dict[Place, list[LowRankChange]]:
    """Return the low-rank changes of each product, for a single rank.

    Args:
        adapters: adapters by name.
        parameters: training weights by name.
        targets: `InferenceWeights.targets`.
        device: device of the changes; none: that of the weights.

    Raises:
        UserError: when an adapter changes a weight whose product does not support adapters.
    """
    changed = {name for adapter in adapters.values() for name in adapter.factors}
    keys = {key for name in changed for key, _, _ in targets.get(name, ())}
    rows: dict[str, dict[int, int]] = defaultdict(dict)
    for name, places in targets.items():
        for key, part, pick in places:
            if key in keys and name in parameters:
                rows[key][part] = len(pick(parameters[name]))
    changes_of: dict[Place, list[LowRankChange]] = defaultdict(list)
    for adapter_name, adapter in adapters.items():
        for name, change in adapter.factors.items():
            products = [(*_place(key), key, part, pick) for key, part, pick in targets.get(name, ())]
            if not products or any(role not in LAYER_PRODUCTS for _, role, *_ in products):
                raise UserError(
                    f"adapters are for products of attention and dense MLPs, {adapter_name} changes {name}: merge it "
                    "into the model (hybrid-rlhf export --adapter) and serve that"
                )
            for layer, role, key, part, pick in products:
                weight = parameters[name]
                first = sum(size for before, size in rows[key].items() if before < part)
                up = _picked(change, pick).to(weight).to(device)
                down = change.down.to(weight).to(device)
                changes_of[int(layer), role].append(LowRankChange(adapter.number, first, up, down))
    return dict(changes_of)


def _place(key: str) -> tuple[str, str]:
    layer, _, role = key.removesuffix(".weight").partition(".")
    return layer, role


def _picked(change: LowRank, pick: Pick) -> Tensor:
    """Apply a pick to the factor [N, r]; returns [n, r]. Parts are no wider than the weight, whose width picks may
    check."""
    parts = change.up.split(change.down.shape[1], dim=1)
    return torch.cat([pick(part.t() if change.transposed else part) for part in parts], dim=1)
