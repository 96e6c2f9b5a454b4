"""Linear layers of the decoder in 8 bits: int8 on CPUs and GPUs, fp8 (e4m3) on GPUs.

Weights are quantised per output when inference weights are built, inputs per token in each call. Both are symmetric:
the largest absolute value gets the largest code. Products of codes are summed in int32 (fp8: float32), then scaled and
biased in float32. Each row of a result depends only on its row of the input. On a CPU, one compiled kernel
(cpu_kernels.py) quantises and multiplies; on a GPU, one launch quantises (ops/quantisation.py), and torch multiplies.

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
from hybrid_rlhf.generation.architecture.model_description import ModelDescription
from hybrid_rlhf.generation.model.four_bit import FourBitLinear
from hybrid_rlhf.generation.model.layers import InferenceLinear
from hybrid_rlhf.generation.ops import choice, cpu_kernels
from hybrid_rlhf.generation.ops.quantisation import CODES, SMALLEST, Quantization, quantise
from hybrid_rlhf.models.four_bit import BYTES_PER_WEIGHT

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
        self.error = self._relative_error(weight, bias)
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

    def _relative_error(self, weight: Tensor, bias: Tensor | None) -> Tensor:
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


MakeLinear = Callable[[Tensor, Tensor | None], Linear]
"""Creates a linear layer from a weight [N, K] and a bias [N] or none."""
