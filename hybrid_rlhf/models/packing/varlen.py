"""Causal attention of sequences with different lengths in one kernel, forward and backward.

`scaled_dot_product_attention` needs rows of one length, so sequences of different lengths need padding or several
calls, and on Hopper torch may pass each new shape to cuDNN, which then builds a plan for it (0.4 to 0.5 s, FunASR issue
3704). A varlen kernel takes the boundaries as a tensor: one call, no padding, no plan.

Source: torch.nn.attention.varlen (torch 2.13: grouped queries, windows, backward), else the flash-attn package
(arXiv 2307.08691). Both are FlashAttention-2 kernels: bfloat16 and float16 on CUDA from compute capability 8.0 on, head
sizes that are multiples of 8 up to 256. In a sequence with more keys than queries, the causal mask is aligned to the
last key. Queries, keys and values have one head size.

Shapes: N tokens of all sequences, M keys of all, B sequences, A heads, K KV heads, D head size.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

_LARGEST_HEAD = 256


class VarlenAttention(Protocol):
    """A varlen kernel."""

    def __call__(
        self,
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


def varlen_attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> VarlenAttention | None:
    """The kernel for a device, dtype and head size; None without a kernel."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    if head_dim % 8 or head_dim > _LARGEST_HEAD or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    if _torch_has_varlen() and torch.backends.cuda.is_flash_attention_available():
        return _torch_varlen
    return _flash_attn_varlen if importlib.util.find_spec("flash_attn") is not None else None


def boundaries(lengths: Tensor) -> Tensor:
    """Boundaries int32 [B + 1] of sequences with lengths [B]."""
    return torch.nn.functional.pad(lengths.cumsum(dim=0), (1, 0)).to(torch.int32)


def head_size(config: object) -> int:
    """The head size of queries and keys of a Hugging Face text config. Latent attention (DeepSeek) calls it
    `qk_head_dim`; its `head_dim` is the size of the rotated part."""
    size = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None)
    return int(size or config.hidden_size // config.num_attention_heads)  # type: ignore[attr-defined]


@cache
def _torch_has_varlen() -> bool:
    """Return True if torch's kernel supports scales, windows and grouped queries, which torch 2.10's does not."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return False
    function = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    return {"scale", "window_size", "enable_gqa"} <= set(inspect.signature(function).parameters)


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
    from torch.nn.attention.varlen import varlen_attn

    mixed = varlen_attn(
        query,
        key,
        value,
        *ends,
        *longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
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
