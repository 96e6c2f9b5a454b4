"""Single operations: the largest tensor of a block, and attention over rows of many lengths in plain torch."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid_rlhf.models.packing import attention, batches

VARLEN_CALLS: list[int] = []
"""Sequences of each call of the kernel."""


class LargestTensor(TorchDispatchMode):
    """Records the most elements that any operation puts out."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def take_slow_varlen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Attention of packed rows takes the kernel below everywhere; the head sizes for which it is asked."""
    VARLEN_CALLS.clear()
    sizes: list[int] = []

    def found(device: torch.device, dtype: torch.dtype, head_dim: int) -> object:
        sizes.append(head_dim)
        return slow_varlen

    for module in (attention, batches):
        monkeypatch.setattr(module, "varlen_attention", found)
    return sizes


def slow_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """The contract of VarlenAttention, a sequence at a time."""
    assert all(end.dtype == torch.int32 and end[0] == 0 and end.dim() == 1 for end in ends)
    assert ends[0][-1] == len(query) and ends[1][-1] == len(key) == len(value) and len(ends[0]) == len(ends[1])
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert longest == tuple(int(end.diff().max()) for end in ends)
    VARLEN_CALLS.append(len(ends[0]) - 1)
    parts = []
    for (q_from, q_to), (k_from, k_to) in zip(*(pairwise(end.tolist()) for end in ends), strict=True):
        q, k, v = (x.transpose(0, 1) for x in (query[q_from:q_to], key[k_from:k_to], value[k_from:k_to]))
        place = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        distance = place - torch.arange(k.shape[1])
        seen = (distance >= 0) & (distance < (window or k.shape[1]))
        group = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale).transpose(0, 1)
        parts.append(mixed)
    return torch.cat(parts)
