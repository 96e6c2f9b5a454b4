"""Linear layers, norms and activations of the decoder, each in the form that is fastest on its device.

On a CPU, weights are packed once into the format of a compiled product (cpu_kernels.py) or of oneDNN, which is about
twice as fast at the small batches of decoding, and norms are compiled kernels. On a GPU, a weight may be a view of the
training weight.

Linear layers may have 8 bits: int8 on CPUs and GPUs, fp8 (e4m3) on GPUs. Weights are quantised per output when
inference weights are built, inputs per token in each call. Both are symmetric: the largest absolute value gets the
largest code. Products of codes are summed in int32 (fp8: float32), then scaled and biased in float32. Each row of a
result depends only on its row of the input. On a CPU, one compiled kernel (cpu_kernels.py) quantises and multiplies; on
a GPU, one launch quantises (ops/quantisation.py), and torch multiplies.

Why 8 bits for both weights and inputs: products of integers are fast, and decoding reads a quarter of the bytes of
float32. The head, the embeddings (and their projection for per-layer inputs) and the routers of experts keep their
dtype, because they choose tokens and experts directly.

Source: LLM.int8(), arXiv 2208.07339, section 2.1 (one scale per row and per column); rollouts of quantised weights with
truncated importance sampling: FlashRL, fengyao.notion.site/flash-rl (2025).

Shapes: T tokens, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.functional.operations import onednn_linear, wide_linear
from hybrid_rlhf.generation.architecture.model_description import ModelDescription
from hybrid_rlhf.generation.model.four_bit import FourBitLinear
from hybrid_rlhf.generation.ops import choice, cpu_kernels
from hybrid_rlhf.generation.ops.norms import rms_norm
from hybrid_rlhf.generation.ops.quantisation import CODES, SMALLEST, Quantization, quantise
from hybrid_rlhf.models.four_bit import BYTES_PER_WEIGHT
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


_LEAST_CAPABILITY: dict[Quantization, tuple[int, int]] = {"int8": (8, 0), "fp8": (8, 9)}
"""Minimum compute capability of a GPU whose tensor cores multiply these types."""
_INT_MM_ROWS = 17
"""Minimum number of rows that torch._int_mm accepts on a GPU."""
_GPU_MULTIPLE = 16
"""On a GPU, numbers of outputs and inputs must be multiples of this."""
_PROBE_ROWS = 4


def product_maker(
    kind: Quantization | None, architecture: ModelDescription, device: torch.device, dtype: torch.dtype
) -> MakeLinear:
    """Return a function that creates the products of layers: quantised, or else packed if that is supported.

    Raises:
        UserError: when the products cannot be quantised.
    """
    if kind is None:
        return partial(InferenceLinear, pack=choice.can_pack(device, dtype))
    _require_support(kind, device, dtype, experts=architecture.experts is not None)
    return partial(QuantisedLinear, kind=kind)


def _require_support(kind: Quantization, device: torch.device, dtype: torch.dtype, *, experts: bool) -> None:
    """Raise UserError unless products on a device and in a dtype can be quantised.

    Args:
        kind: type of the codes.
        device: device of the inference weights.
        dtype: dtype of the model in generation.
        experts: the model has routed experts; a GPU's grouped products have no quantised form.
    """
    fix = "leave rollout.quantization out"
    if device.type == "cpu":
        if kind != "int8":
            raise UserError(f"rollout.quantization on a CPU is int8, got {kind}: give int8")
        if dtype not in cpu_kernels.DTYPES:
            raise UserError(f"rollout.quantization needs float32 or bfloat16 on a CPU, got {dtype}: set rollout.dtype")
        if not cpu_kernels.available():
            raise UserError(f"rollout.quantization needs the compiled CPU kernels, got none: install g++, or {fix}")
        return
    capability = torch.cuda.get_device_capability(device)
    least = _LEAST_CAPABILITY[kind]
    if capability < least:
        raise UserError(
            f"rollout.quantization {kind} needs a GPU of compute capability {least[0]}.{least[1]}, got "
            f"{capability[0]}.{capability[1]}: {fix}"
        )
    if kind == "fp8" and dtype != torch.bfloat16:
        raise UserError(f"rollout.quantization fp8 needs bfloat16, got {dtype}: set rollout.dtype to bfloat16")
    if experts:
        raise UserError(f"rollout.quantization on a GPU needs a model without routed experts, got some: {fix}")


class QuantisedLinear:
    """Linear layer x W^T + b in 8 bits."""

    def __init__(self, weight: Tensor, bias: Tensor | None, kind: Quantization) -> None:
        """Quantise a copy of a weight [N, K]; the bias is [N] or none."""
        self.outputs, self.inputs = weight.shape
        self.bias = None if bias is None else bias.float()
        self._on_cpu = weight.device.type == "cpu"
        self._kind = kind
        self._kernels = choice.kernels_for(weight.device, weight.dtype)
        self.weight, self.scale = quantise(weight, kind)
        if self._on_cpu:
            self.weight, self._offset = cpu_kernels.pack_int8(self.weight)
        elif any(size % _GPU_MULTIPLE for size in weight.shape):
            raise UserError(
                f"rollout.quantization needs products whose sizes are multiples of {_GPU_MULTIPLE} on a GPU, got "
                f"{list(weight.shape)}: leave it out"
            )
        self.error = self._relative_error(weight)
        """Scalar: relative error of products with the quantised weight, on random inputs."""

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, K] to [T, N]."""
        if self._on_cpu:
            return cpu_kernels.int8_linear(x, self.weight, self._offset, self.scale, self.bias)
        assert self._kernels is not None
        dtype, most = CODES[self._kind]
        rows = max(_INT_MM_ROWS, len(x)) if self._kind == "int8" else len(x)
        codes, scales = self._kernels.quantise_rows(x, dtype, most=most, smallest=SMALLEST, rows=rows)
        if self._kind == "int8":
            sums = torch._int_mm(codes, self.weight.t())[: len(x)]
            out = sums.float() * (scales[:, None] * self.scale)
        else:
            out = torch._scaled_mm(
                codes,
                self.weight.t(),
                scale_a=scales[:, None],
                scale_b=self.scale[None],
                out_dtype=torch.bfloat16,
            )
        return (out if self.bias is None else out + self.bias).to(x.dtype)

    def _relative_error(self, weight: Tensor) -> Tensor:
        """Return the relative error of the products of fixed random rows."""
        noise = torch.randn(_PROBE_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0))
        x = noise.to(weight)
        expected = functional.linear(x, weight).float()
        computed = self(x).float() - (0.0 if self.bias is None else self.bias)
        return (computed - expected).norm() / expected.norm().clamp(min=SMALLEST)


Linear = InferenceLinear | QuantisedLinear | FourBitLinear


def weight_bytes(product: Linear) -> int:
    """Number of bytes of the weight that a call reads, without padding."""
    elements = product.outputs * product.inputs
    is_four_bit = isinstance(product, FourBitLinear)
    return round(elements * BYTES_PER_WEIGHT) if is_four_bit else elements * product.weight.element_size()


def operations(product: Linear) -> float:
    """Floating-point operations per token; products of 8 bits, which take half the time on a GPU, count half."""
    return product.outputs * product.inputs * (1.0 if isinstance(product, QuantisedLinear) else 2.0)


MakeLinear = Callable[[Tensor, Tensor | None], Linear]
"""Creates a linear layer from a weight [N, K] and a bias [N] or none."""
