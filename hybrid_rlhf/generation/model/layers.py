"""Linear layers, norms and activations of the decoder, each in the form that is fastest on its device.

On a CPU weights are packed once into the format of a compiled product (cpu_kernels.py) or of oneDNN, which is about
twice as fast at the small batches of decoding, and norms are compiled kernels. On a GPU a weight may be a view of the
training weight.

Shapes: T tokens, N outputs, K inputs.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from hybrid_rlhf.functional.products import onednn_linear, wide_linear
from hybrid_rlhf.generation.architecture.model_description import ModelDescription
from hybrid_rlhf.generation.ops import choice, cpu_kernels
from hybrid_rlhf.runtime.world import World

PACKED_ROWS = 32
"""Batch size that oneDNN's packed weights are optimised for; others give the same result, slightly slower."""


class InferenceLinear:
    """x W^T + b."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, pack: bool, wide: bool = False) -> None:
        """Take a weight [N, K] and a bias [N].

        Args:
            weight: used as it is, unless packed.
            bias: or none.
            pack: copy the weight into the format of the fastest product for few rows.
            wide: accumulate and return float32 for weights in bfloat16 or float16; packed, these are a float32 copy.
        """
        self._wide = wide and weight.dtype in (torch.bfloat16, torch.float16)
        if self._wide and pack:
            weight, bias = weight.float(), None if bias is None else bias.float()
        self.bias = bias
        self.outputs, self.inputs = weight.shape
        self.packed = pack
        self._by_kernel = pack and weight.dtype == torch.float32 and cpu_kernels.multiplies_float32()
        if self._by_kernel:
            self.weight = cpu_kernels.pack(weight)
        else:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS) if pack else weight

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] to [T, N], float32 if wide."""
        if self._by_kernel:
            return cpu_kernels.linear(x.float() if self._wide else x, self.weight, self.outputs, self.bias)
        if self.packed:
            return onednn_linear(x.float() if self._wide else x, self.weight, self.bias)
        if self._wide:
            return wide_linear(x, self.weight, self.bias)
        return functional.linear(x, self.weight, self.bias)


class Norm:
    """RMS or layer norm over the last dimension."""

    def __init__(self, weight: Tensor, bias: Tensor | None, architecture: ModelDescription) -> None:
        self._shape, self._eps = weight.shape, architecture.norm_eps
        self._rms = architecture.norm == "rms"
        self._in_float32 = architecture.norm_in_float32 and weight.dtype != torch.float32
        self._given, self._offset = weight, architecture.norm_offset
        self._weight, self._bias = weight, bias
        if self._offset:
            self._weight = weight.float() + self._offset if self._rms else weight + self._offset
        self._kernels = choice.kernels_for(weight.device, weight.dtype) if self._rms else _fusing_kernels(weight)
        self._how: dict[str, Any] = {"in_float32": self._in_float32}
        if not self._rms:
            self._how |= {"center": True, "bias": bias}

    @property
    def _fuses(self) -> bool:
        """Whether kernels norm what they have added, and all heads at once."""
        return self._kernels not in (None, cpu_kernels)

    @property
    def _fuses_rms(self) -> bool:
        """Whether kernels of other things norm too."""
        return self._rms and self._fuses

    def refresh(self) -> None:
        """Recompute what is derived from the weight, after it was updated in place."""
        if self._offset:
            self._weight.copy_(self._given.to(self._weight.dtype) + self._offset)

    def __call__(self, x: Tensor) -> Tensor:
        """Same shape and dtype as x."""
        if self._kernels is not None:
            normed: Tensor = self._kernels.norm(x, self._weight, self._eps, **self._how)
            return normed
        if not self._rms:
            return functional.layer_norm(x, self._shape, self._weight, self._bias, self._eps)
        if self._in_float32:
            return functional.rms_norm(x.float(), self._shape, self._weight, self._eps).to(x.dtype)
        return functional.rms_norm(x, self._shape, self._weight, self._eps)

    def after_adding(
        self, x: Tensor, delta: Tensor, delta_norm: Norm | None = None, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """x + scale * delta, and its norm; `delta_norm`: of delta before it is added."""
        fused: dict[str, Any] = {}
        if delta_norm is not None and self._rms and self.fuses_with(delta_norm):
            fused["delta_weight"] = delta_norm._weight
        elif delta_norm is not None:
            delta = delta_norm(delta)
        if scale != 1.0 and self._fuses:
            fused["scale"] = scale
        elif scale != 1.0:
            delta = delta * scale
        if self._kernels is not None:
            added, normed = self._kernels.add_norm(x, delta, self._weight, self._eps, **self._how, **fused)
            return added, normed
        x = x + delta
        return x, self(x)

    def after_summing(self, experts: Unsummed, x: Tensor) -> tuple[Tensor, Tensor]:
        """x + the sum over experts, and its norm."""
        if self._fuses_rms:
            return experts.added_and_normed(x, self._weight, self._eps, in_float32=self._in_float32)
        x = experts.added_to(x)
        return x, self(x)

    def added_to(self, x: Tensor, delta: Tensor) -> Tensor:
        """x + the norm of delta."""
        if not self._fuses_rms:
            return x + self(delta)
        assert self._kernels is not None
        added: Tensor = self._kernels.add_normed(x, delta, self._weight, self._eps, in_float32=self._in_float32)
        return added

    def write_latents(
        self, down: Tensor, queries: Norm | None, table: tuple[Tensor, Tensor] | None, places: Tensor, keys: Tensor
    ) -> Tensor:
        """Norm latents and those of queries, and write to the cache, by one kernel; this is the norm of latents."""
        assert self._kernels is not None
        weights = (None if queries is None else queries._weight, self._weight)
        hidden: Tensor = self._kernels.write_latents(
            down, *weights, table, places, keys, eps=self._eps, in_float32=self._in_float32
        )
        return hidden

    def fuses_with(self, other: Norm) -> bool:
        """Whether one kernel computes both."""
        alike = (self._eps, self._rms, self._in_float32) == (other._eps, other._rms, other._in_float32)
        return self._fuses and other._fuses and alike

    def of_heads(self, qkv: Tensor, keys: Norm | None, values: Norm | None, *, kv_heads: int) -> None:
        """Norm queries, keys and values in place by one kernel; this is the norm of queries."""
        assert self._kernels is not None
        others = [None if norm is None else norm._weight for norm in (keys, values)]
        biases = None if self._bias is None else (self._bias, self._bias if keys is None else keys._bias)
        how = {"eps": self._eps, "in_float32": self._in_float32, "center": not self._rms, "biases": biases}
        self._kernels.norm_heads(qkv, self._weight, *others, kv_heads=kv_heads, **how)


class Unsummed(Protocol):
    """What experts add to the residual stream, before it is summed: the sum is one kernel with what follows."""

    def summed(self) -> Tensor:
        """[T, H]."""

    def added_to(self, x: Tensor) -> Tensor:
        """x [T, H] and the sum."""

    def added_and_normed(self, x: Tensor, weight: Tensor, eps: float, *, in_float32: bool) -> tuple[Tensor, Tensor]:
        """x [T, H] and the sum, and the RMS norm of both."""


class ResidualStream:
    """Hidden states [T, H] that layers add to. What is added waits for the norm behind it, with which it is one kernel,
    also when that is the first norm of the next layer."""

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self._waiting: tuple[Tensor | Unsummed, Norm | None, float] | None = None

    def add(self, delta: Tensor | Unsummed, norm: Norm | None = None, scale: float = 1.0) -> None:
        """Add scale * norm(delta)."""
        self._x = self.value
        if not isinstance(delta, Tensor) and (norm is not None or scale != 1.0):
            delta = delta.summed()
        self._waiting = (delta, norm, scale)

    @property
    def value(self) -> Tensor:
        """[T, H], with all that was added."""
        if self._waiting is not None:
            delta, norm, scale = self._waiting
            self._waiting = None
            if not isinstance(delta, Tensor):
                self._x = delta.added_to(self._x)
            elif norm is not None and scale == 1.0:
                self._x = norm.added_to(self._x, delta)
            else:
                self._x = torch.add(self._x, delta if norm is None else norm(delta), alpha=scale)
        return self._x

    def normed(self, norm: Norm | None) -> Tensor:
        """[T, H], the norm of the value; none: the value."""
        if norm is None or self._waiting is None:
            return self.value if norm is None else norm(self.value)
        delta, delta_norm, scale = self._waiting
        self._waiting = None
        if isinstance(delta, Tensor):
            self._x, normed = norm.after_adding(self._x, delta, delta_norm, scale)
        else:
            self._x, normed = norm.after_summing(delta, self._x)
        return normed


def _fusing_kernels(weight: Tensor) -> ModuleType | None:
    """Triton's kernels, which have what compiled ones lack: layer norms and norms of all heads; none on a CPU."""
    kernels = choice.kernels_for(weight.device, weight.dtype)
    return None if kernels is cpu_kernels else kernels


class HeadNorm:
    """RMS or layer norm of each head, with weights of its own."""

    def __init__(self, weight: Tensor, architecture: ModelDescription) -> None:
        """Args: weights [heads, D], and the model."""
        self._weight, self._eps, self._rms = weight, architecture.norm_eps, architecture.norm == "rms"
        self._kernels = _fusing_kernels(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, heads, D]."""
        normalise = functional.rms_norm if self._rms else functional.layer_norm
        normed = normalise(x.float(), x.shape[-1:], eps=self._eps)
        return (self._weight.float() * normed).to(x.dtype)

    def with_keys(self, qkv: Tensor, keys: HeadNorm, *, kv_heads: int) -> bool:
        """As `SplitNorm.with_keys`."""
        if self._kernels is not None:
            how = {"eps": self._eps, "in_float32": True, "center": not self._rms}
            self._kernels.norm_heads(qkv, self._weight, keys._weight, None, kv_heads=kv_heads, **how)
        return self._kernels is not None

    def refresh(self) -> None:
        """Nothing is derived from the weight."""


class SplitNorm:
    """RMS norm over a dimension that tensor-parallel ranks share: OLMo 2's norm over all heads."""

    def __init__(self, weight: Tensor, architecture: ModelDescription, *, size: int, world: World) -> None:
        """Args: this rank's weights, the model, the whole dimension, and the ranks."""
        self._weight, self._eps, self._world = weight, architecture.norm_eps, world
        # a KV head may be on several ranks; where each is on one, some ranks have fewer than others
        self._summed = size * max(1, len(weight) * world.size // size)
        self._kernels = _fusing_kernels(weight) if world.size == 1 else None

    def __call__(self, x: Tensor) -> Tensor:
        """[T, heads, D], normed over both."""
        flat = x.flatten(1).float()
        squares = self._world.all_reduce(flat.square().sum(dim=1, keepdim=True))
        normed = flat * torch.rsqrt(squares / self._summed + self._eps)
        return (self._weight.float() * normed).to(x.dtype).view(x.shape)

    def with_keys(self, qkv: Tensor, keys: SplitNorm, *, kv_heads: int) -> bool:
        """Norm queries and keys in place by one kernel, if there is one; this is the norm of queries."""
        if self._kernels is not None:
            self._kernels.norm_all_heads(qkv, self._weight, keys._weight, kv_heads=kv_heads, eps=self._eps)
        return self._kernels is not None

    def refresh(self) -> None:
        """Nothing is derived from the weight."""


HeadsNorm = Norm | HeadNorm | SplitNorm | None
"""Of queries, keys or values."""


def norm_heads(qkv: Tensor, q: HeadsNorm, k: HeadsNorm, v: HeadsNorm, *, kv_heads: int) -> Tensor:
    """Norms of queries, keys and values; none: they stay as they are.

    Args:
        qkv: [T, A + 2 K, D]; may be overwritten.
        q: of queries.
        k: of keys.
        v: of values.
        kv_heads: K.
    """
    if isinstance(q, Norm) and isinstance(k, Norm | None) and isinstance(v, Norm | None):
        if all(norm is None or norm.fuses_with(q) for norm in (q, k, v)):
            q.of_heads(qkv, k, v, kv_heads=kv_heads)
            return qkv
    if isinstance(q, HeadNorm) and isinstance(k, HeadNorm) and v is None and q.with_keys(qkv, k, kv_heads=kv_heads):
        return qkv
    if isinstance(q, SplitNorm) and isinstance(k, SplitNorm) and v is None and q.with_keys(qkv, k, kv_heads=kv_heads):
        return qkv
    parts = qkv.split([qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    return torch.cat([part if norm is None else norm(part) for part, norm in zip(parts, (q, k, v), strict=True)], dim=1)
