"""Linear layers of the decoder in 8 bits: int8 on CPUs and GPUs, fp8 (e4m3) on GPUs.

Weights are quantised per output when inference weights are built, inputs per token as they come; both are symmetric, so
that the largest value has the largest code. Products of codes are summed in int32 (fp8: float32), and scaled and biased
in float32. A row of a result depends on its own row of the input alone. On a CPU one compiled kernel (cpu_kernels.py)
quantises and multiplies; on a GPU one launch quantises (ops/quantisation.py), and torch's products multiply.

Why 8 bits on both sides: the integer products are the fast ones, and decoding reads a quarter of the bytes of float32.
The head, the embeddings (also what projects them for each layer) and the routers of experts keep their dtype: they
decide over tokens and experts directly.

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
from hybrid_rlhf.generation.model.layers import InferenceLinear
from hybrid_rlhf.generation.ops import choice, cpu_kernels
from hybrid_rlhf.generation.ops.quantisation import CODES, SMALLEST, Quantization, quantise

_LEAST_CAPABILITY: dict[Quantization, tuple[int, int]] = {"int8": (8, 0), "fp8": (8, 9)}
"""Compute capability of a GPU whose tensor cores multiply them."""
_INT_MM_ROWS = 17
"""Fewest rows that torch._int_mm takes on a GPU."""
_GPU_MULTIPLE = 16
"""Of outputs and inputs, for a GPU's products."""
_PROBE_ROWS = 4


def product_maker(
    kind: Quantization | None, architecture: ModelDescription, device: torch.device, dtype: torch.dtype
) -> MakeLinear:
    """What makes the products of a model's layers: quantised, or packed where that is supported.

    Raises:
        UserError: when they cannot be quantised.
    """
    if kind is None:
        return partial(InferenceLinear, pack=choice.can_pack(device, dtype))
    _require_support(kind, device, dtype, experts=architecture.experts is not None)
    return partial(QuantisedLinear, kind=kind)


def _require_support(kind: Quantization, device: torch.device, dtype: torch.dtype, *, experts: bool) -> None:
    """Raise UserError unless products of a device and dtype can be quantised.

    Args:
        kind: how.
        device: of the inference weights.
        dtype: of the model in generation.
        experts: whether the model has routed experts; a GPU's grouped products have no quantised form.
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
    capability, least = torch.cuda.get_device_capability(device), _LEAST_CAPABILITY[kind]
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
    """x W^T + b in 8 bits."""

    def __init__(self, weight: Tensor, bias: Tensor | None, kind: Quantization) -> None:
        """Take a weight [N, K], which is copied, and a bias [N]."""
        self.outputs, self.inputs = weight.shape
        self.bias = None if bias is None else bias.float()
        self._on_cpu, self._kind = weight.device.type == "cpu", kind
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
        """[] difference of some products from those of the weight as given, relative to their norm."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] to [T, N]."""
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
        """Of fixed rows of noise."""
        noise = torch.randn(_PROBE_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0))
        x = noise.to(weight)
        expected = functional.linear(x, weight).float()
        found = self(x).float() - (0.0 if self.bias is None else self.bias)
        return (found - expected).norm() / expected.norm().clamp(min=SMALLEST)


Linear = InferenceLinear | QuantisedLinear
MakeLinear = Callable[[Tensor, Tensor | None], Linear]
"""A product of a weight [N, K] and a bias [N]."""
