"""Linear layers, norms and activations of the decoder, each in the form that is fastest on its device.

On a CPU, weights are packed once into the format of a compiled product (cpu_kernels.py) or of oneDNN, which is about
twice as fast at the small batches of decoding, and norms are compiled kernels. On a GPU, a weight may be a view of the
training weight.

Shapes: T tokens, N outputs, K inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hybrid_rlhf.functional.operations import onednn_linear, wide_linear
from hybrid_rlhf.generation.architecture.model_description import ModelDescription
from hybrid_rlhf.generation.ops import choice, cpu_kernels
from hybrid_rlhf.generation.ops.norms import rms_norm
from hybrid_rlhf.runtime.world import World

PACKED_ROWS = 32
"""Batch size that oneDNN's packed weights are optimised for; with other sizes, products are slightly slower."""


class InferenceLinear:
    """Linear layer x W^T + b."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, pack: bool, wide: bool = False) -> None:
        """Take a weight [N, K] and a bias [N].

        Args:
            weight: [N, K], used in place unless packed.
            bias: [N], or none.
            pack: copy the weight into the format of the fastest product for few rows.
            wide: accumulate and return float32 for weights in bfloat16 or float16. If packed, the copy is float32.
        """
        self._wide = wide and weight.dtype in (torch.bfloat16, torch.float16)
        if self._wide and pack:
            weight = weight.float()
            bias = None if bias is None else bias.float()
        self.bias = bias
        self.outputs, self.inputs = weight.shape
        self.packed = pack
        self._by_kernel = pack and weight.dtype == torch.float32 and cpu_kernels.multiplies_float32()
        if self._by_kernel:
            self.weight = cpu_kernels.pack(weight)
        else:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS) if pack else weight

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, K] to [T, N]; float32 if wide."""
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
        self.weight = weight
        self.eps = architecture.norm_eps
        self.in_float32 = architecture.norm_in_float32 and weight.dtype != torch.float32
        """True if the weight multiplies before rounding to the dtype."""
        self._stored = weight
        self._offset = architecture.norm_offset
        self._rms = architecture.norm == "rms"
        self._bias = bias
        if self._offset:
            self.weight = (weight.float() if self._rms else weight) + self._offset
        self._kernels = choice.kernels_for(weight.device, weight.dtype) if self._rms else None

    def refresh(self) -> None:
        """Recompute tensors derived from the weight, after it was updated in place."""
        if self._offset:
            self.weight.copy_(self._stored.to(self.weight.dtype) + self._offset)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normed x, of the same shape and dtype."""
        if self._kernels is not None:
            normed: Tensor = self._kernels.norm(x, self.weight, self.eps, in_float32=self.in_float32)
            return normed
        if self._rms:
            return rms_norm(x, self.weight, self.eps, in_float32=self.in_float32)
        return functional.layer_norm(x, self.weight.shape, self.weight, self._bias, self.eps)

    def after_adding(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + delta, and its norm."""
        if self._kernels is not None:
            added, normed = self._kernels.add_norm(x, delta, self.weight, self.eps, in_float32=self.in_float32)
            return added, normed
        x = x + delta
        return x, self(x)


class HeadNorm:
    """RMS or layer norm of each head, with separate weights per head."""

    def __init__(self, weight: Tensor, architecture: ModelDescription) -> None:
        """Args: weights [heads, D], and the model."""
        self._weight = weight
        self._eps = architecture.norm_eps
        self._rms = architecture.norm == "rms"

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normed x [T, heads, D], in its dtype."""
        normalise = functional.rms_norm if self._rms else functional.layer_norm
        normed = normalise(x.float(), x.shape[-1:], eps=self._eps)
        return (self._weight.float() * normed).to(x.dtype)


class SplitNorm:
    """RMS norm over a dimension that is divided over tensor-parallel ranks: OLMo 2's norm over all heads."""

    def __init__(self, weight: Tensor, architecture: ModelDescription, *, size: int, world: World) -> None:
        """Args: this rank's weights, the model, the size of the whole dimension, and the ranks."""
        self._weight = weight
        self._eps = architecture.norm_eps
        self._world = world
        # a KV head may be on several ranks; otherwise, ranks may have different numbers of heads
        self._summed = size * max(1, len(weight) * world.size // size)

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [T, heads, D] normed over heads and dimensions, in its dtype."""
        flat = x.flatten(1).float()
        squares = self._world.all_reduce(flat.square().sum(dim=1, keepdim=True))
        normed = flat * torch.rsqrt(squares / self._summed + self._eps)
        return (self._weight.float() * normed).to(x.dtype).view(x.shape)


HeadsNorm = Norm | HeadNorm | SplitNorm | None
"""Norm of queries, keys or values."""


def norm_heads(qkv: Tensor, q: HeadsNorm, k: HeadsNorm, v: HeadsNorm, *, kv_heads: int) -> Tensor:
    """Norm the queries, K keys and K values in [T, A + 2 K, D]; none: that part is unchanged."""
    parts = qkv.split([qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    return torch.cat([part if norm is None else norm(part) for part, norm in zip(parts, (q, k, v), strict=True)], dim=1)
