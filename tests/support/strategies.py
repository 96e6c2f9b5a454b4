"""Ragged batches for hypothesis: values with masks that have gaps."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor


@st.composite
def masked_batch(draw: st.DrawFn, *, tensors: int = 1) -> tuple[list[Tensor], Tensor]:
    """Tensors [B, T] float64 and a mask [B, T] with any gaps."""
    rows, steps = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    mask = torch.tensor(
        draw(st.lists(st.lists(st.booleans(), min_size=steps, max_size=steps), min_size=rows, max_size=rows))
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return [torch.randn(rows, steps, generator=generator, dtype=torch.float64) for _ in range(tensors)], mask


def poisoned(values: Tensor, mask: Tensor) -> Tensor:
    """Values with NaN and infinity wherever the mask is off."""
    bad = torch.where(torch.arange(values.numel()).view(values.shape) % 2 == 0, torch.nan, torch.inf).to(values)
    return torch.where(mask.bool(), values, bad)
