"""Replaces a model's products, RMS norms and rotary positions with those of `functional/operations.py`, on a CPU in
float32.

Norms and rotary positions need fewer passes over memory and fewer parallel regions than transformers' modules, which
saves 2 to 3% of a layer (docs/benchmarks/training.md). Other dtypes and devices use transformers' code. A module keeps
its weights, names and base classes; only the modules of this model change, not transformers' classes.
"""

from __future__ import annotations

import functools
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_rlhf.functional.operations import linear, rms_norm, rotate

RMS_NORMS = frozenset({"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "Phi3RMSNorm"})
"""Norms of the form x / rms(x) * weight; Gemma's add 1 to the weight."""
ROTARY_ATTENTIONS = frozenset({"LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention"})
"""Attention modules that rotate all dimensions of a head, in two halves."""
_ROTARY = "apply_rotary_pos_emb"
"""Name of the rotary function that transformers calls in the forward of attention."""


class BackendLinear(nn.Linear):
    """torch's linear layer, computed by functional/operations.py."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name is torch's
        """Return input @ weight.T + bias."""
        return linear(input, self.weight, self.bias)


def fuse_layers(model: nn.Module) -> None:
    """Replace norms and attention of known families with the faster form; a test compares each with transformers'."""
    for module in model.modules():
        kind: Any = type(module)
        if kind.__name__ in RMS_NORMS:
            module.__class__ = _norm(kind)
        elif kind.__name__ in ROTARY_ATTENTIONS and _rotates(kind):
            module.__class__ = _attention(kind)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys [B, A, T, D] by cos and sin [B, T, D]; with transformers' signature."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return rotate(q, cos, sin), rotate(k, cos, sin)


@functools.cache
def _norm(kind: Any) -> Any:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if _fits(hidden_states) and self.weight.dtype == torch.float32:
            return rms_norm(hidden_states, self.weight, eps=self.variance_epsilon)
        return kind.forward(self, hidden_states)  # type: ignore[no-any-return]

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


@functools.cache
def _attention(kind: Any) -> Any:
    """A class whose forward has the same code, with the name of transformers' rotary function bound to ours."""
    original: Any = kind.forward
    theirs = original.__globals__[_ROTARY]

    def either(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        whole = q.shape[-1] == k.shape[-1] == cos.shape[-1]
        rotation = rotary if whole and all(map(_fits, (q, k, cos, sin))) else theirs
        return rotation(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)

    forward = FunctionType(
        original.__code__, {**original.__globals__, _ROTARY: either}, original.__name__, original.__defaults__
    )
    forward.__kwdefaults__ = original.__kwdefaults__
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _rotates(kind: type[nn.Module]) -> bool:
    """Return True if a module's forward is a plain function that calls transformers' rotary function."""
    forward: Any = kind.forward
    return isinstance(forward, FunctionType) and not forward.__closure__ and _ROTARY in forward.__code__.co_names


def _fits(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32
