"""The tensors of inference weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hybrid_rlhf.generation.model.decoder import Decoder


def weight_tensors(decoder: Decoder) -> dict[str, torch.Tensor]:
    """All tensors of a decoder's inference weights by their places."""
    return dict(_tensors(decoder._weights, ""))


def _tensors(item: Any, place: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(item, torch.Tensor):
        yield place, item.to_dense() if item.is_mkldnn else item
    elif isinstance(item, Sequence) and not isinstance(item, str):
        for index, part in enumerate(item):
            yield from _tensors(part, f"{place}.{index}")
    elif isinstance(item, dict):
        for name, part in item.items():
            yield from _tensors(part, f"{place}.{name}")
    elif type(item).__module__.startswith("hybrid_rlhf.generation.model"):
        yield from _tensors(vars(item), place)
