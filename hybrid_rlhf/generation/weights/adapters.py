"""Where the factors of an adapter go among the inference weights.

The loader says which rows of a fused product each training weight becomes, and in which order. These choices select
rows, so they select the same ones of the factor [N, r] that an adapter multiplies last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import Tensor

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.generation.model.adapters import LowRankChange
from hybrid_rlhf.generation.weights.loader import INPUT_PRODUCTS
from hybrid_rlhf.generation.weights.picks import Pick
from hybrid_rlhf.models.pretrained.adapters import LowRank

ADAPTED = ("qkv", "o", "up", "down", *INPUT_PRODUCTS)
"""Products of a layer that take adapters; those of latent attention, recurrent layers and experts do not."""
Place = tuple[int, str]
"""Layer, and product in it."""


def adapter_changes(
    adapters: Mapping[str, Mapping[str, LowRank]],
    parameters: Mapping[str, Tensor],
    targets: Mapping[str, Sequence[tuple[str, int, Pick]]],
) -> dict[Place, list[LowRankChange]]:
    """The changes of each product on a single rank.

    Args:
        adapters: what each adds to training weights; their numbers are 1 and after, in this order.
        parameters: the training weights.
        targets: of the loader.

    Raises:
        UserError: when an adapter changes a weight whose product takes none.
    """
    changed = {name for adapter in adapters.values() for name in adapter}
    keys = {key for name in changed for key, _, _ in targets[name]}
    rows: dict[str, dict[int, int]] = defaultdict(dict)
    for name, places in targets.items():
        for key, part, pick in places:
            if key in keys and name in parameters:
                rows[key][part] = len(pick(parameters[name]))
    found: dict[Place, list[LowRankChange]] = defaultdict(list)
    for number, (adapter, changes) in enumerate(adapters.items(), start=1):
        for name, change in changes.items():
            for key, part, pick in targets[name]:
                layer, _, role = key.removesuffix(".weight").partition(".")
                if role not in ADAPTED:
                    raise UserError(
                        f"adapters are for products of attention and dense MLPs, {adapter} changes {name}: merge it "
                        "into the model (hybrid-rlhf export --adapter) and serve that"
                    )
                weight = parameters[name]
                up = pick(change.up.t() if change.transposed else change.up).to(weight)
                first = sum(size for before, size in rows[key].items() if before < part)
                found[int(layer), role].append(LowRankChange(number, first, up, change.down.to(weight)))
    return dict(found)
