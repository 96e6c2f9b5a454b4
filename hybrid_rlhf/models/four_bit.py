"""Base weights in 4 bits: NF4 with double quantisation, through bitsandbytes.

Adapters train in the dtype of the model; the base weights are frozen and dequantised in each product. Trainer and
sampler read the same 4-bit weights.

Source: QLoRA (Dettmers et al. 2023, arXiv 2305.14314, section 3): blocks of 64 elements with a scale each, and scales
in 8 bits in blocks of 256.

On a CPU, rows that do not consist of whole blocks are dequantised as one long row: bitsandbytes' kernel for AVX-512
(0.50) takes wrong scales for such rows, without an error.

Shapes: N outputs, K inputs of a linear layer.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.models.pretrained.adapters import LowRank

_BLOCK = 64
"""Elements with a scale."""
SCALE_BYTES_PER_WEIGHT = 1 / _BLOCK + 4 / (_BLOCK * 256)
"""A scale of 8 bits per block, and a float32 scale of these per 256 blocks."""
BYTES_PER_WEIGHT = 0.5 + SCALE_BYTES_PER_WEIGHT
"""A code of 4 bits, and scales."""


def quantise_layers(model: PreTrainedModel, names: list[str], *, device: torch.device) -> None:
    """Replace linear layers by layers with 4-bit weights, which are moved to a device one by one.

    Args:
        model: model with full weights on any device.
        names: names of its linear layers to quantise.
        device: device on which the weights are quantised and stay.
    """
    from bitsandbytes.nn import Params4bit

    dtype = model.dtype
    layer_type = _layer_type()
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        with torch.device("meta"):
            layer: Any = layer_type(
                linear.in_features, linear.out_features, bias=False, compute_dtype=dtype, quant_type="nf4"
            )
        weight: Any = Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4", module=layer)
        layer.weight = weight.to(device)
        layer.bias = linear.bias
        # otherwise a forward in eval mode repacks the weight in place, in bfloat16, and later gradients are wrong
        layer.support_avx512bf16_for_cpu = False
        model.set_submodule(name, layer)


@cache
def _layer_type() -> type[nn.Module]:
    """The class of layers with 4-bit weights."""
    from bitsandbytes.nn import Linear4bit
    from bitsandbytes.nn.modules import fix_4bit_weight_quant_state_from_module

    class Layer(Linear4bit):  # type: ignore[misc]
        """bitsandbytes' layer, with `multiplied` for rows that its kernel does not compute."""

        def forward(self, x: Tensor) -> Tensor:
            """Map [..., K] to [..., N]."""
            fix_4bit_weight_quant_state_from_module(self)
            weight: Any = self.weight
            if not _is_ragged(weight, weight.quant_state):
                result: Tensor = super().forward(x)
                return result
            product = multiplied(x.to(self.compute_dtype), weight, weight.quant_state)
            return (product if self.bias is None else product + self.bias.to(product)).to(x.dtype)

    return Layer


def _is_ragged(codes: Tensor, state: Any) -> bool:
    """True on a CPU for rows that do not consist of whole blocks."""
    return codes.device.type == "cpu" and bool(state.shape[-1] % _BLOCK)


def multiplied(x: Tensor, codes: Tensor, state: Any) -> Tensor:
    """x W^T [..., N] for x [..., K] and a weight in 4 bits, differentiable in x; the weight is not kept for backward.

    Args:
        x: [..., K].
        codes: two codes per byte.
        state: bitsandbytes' QuantState.
    """
    from bitsandbytes import matmul_4bit

    if _is_ragged(codes, state):
        return _RaggedProduct.apply(x, codes, state)  # type: ignore[no-any-return]
    product: Tensor = matmul_4bit(x, codes, state)
    return product


class _RaggedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, state: Any) -> Tensor:
        ctx.weight = (codes, state)
        return nn.functional.linear(x, dequantised(codes, state).to(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad @ dequantised(*ctx.weight).to(grad), None, None


def require_bitsandbytes(setting: str) -> None:
    """Require the package for a setting; raises UserError."""
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise UserError(f"{setting} needs bitsandbytes ({error}): pip install 'hybrid_rlhf[quantization]'") from error


def is_four_bit(parameter: Tensor) -> bool:
    """True for a weight that `quantise_layers` quantised."""
    return getattr(parameter, "quant_state", None) is not None


def elements_of(parameter: Tensor) -> int:
    """Number of elements before quantisation; 0 for a weight that is not quantised."""
    return parameter.quant_state.shape.numel() if is_four_bit(parameter) else 0  # type: ignore[attr-defined]


def plain_value(parameter: Tensor) -> Tensor:
    """The value of a weight: dequantised [N, K] if it is in 4 bits, else without a copy."""
    value = parameter.detach()
    return dequantised(value, parameter.quant_state) if is_four_bit(parameter) else value  # type: ignore[attr-defined]


def dequantised(codes: Tensor, state: Any) -> Tensor:
    """The weight [N, K] in the dtype from which it was quantised.

    Args:
        codes: two codes per byte.
        state: bitsandbytes' QuantState.
    """
    from bitsandbytes.functional import dequantize_4bit

    if not _is_ragged(codes, state):
        weight: Tensor = dequantize_4bit(codes, state)
        return weight
    flat = copy.copy(state)
    flat.shape = torch.Size([1, state.shape.numel()])
    whole: Tensor = dequantize_4bit(codes, flat)
    return whole.view(state.shape)


def share_four_bit(source: nn.Parameter, target: nn.Parameter) -> None:
    """Make `target` use the scales of `source` too, after its codes."""
    if is_four_bit(source):
        target.quant_state = source.quant_state  # type: ignore[attr-defined]


@dataclass(frozen=True, eq=False)
class FourBitWeight:
    """A 4-bit weight with the adapter that changes it."""

    codes: Tensor
    """[N K / 2, 1] uint8."""
    state: Any
    """bitsandbytes' QuantState: scales, shape and dtype."""
    change: LowRank | None = None

    @property
    def shape(self) -> torch.Size:
        """[N, K]."""
        shape: torch.Size = self.state.shape
        return shape

    def multiply(self, x: Tensor) -> Tensor:
        """Return x W^T [T, N] for x [T, K], without the adapter: the product that training computes."""
        return multiplied(x, self.codes, self.state)

    def copied(self, *, codes: bool) -> FourBitWeight:
        """Return the same with an adapter, and `codes` too, in new memory."""
        change = self.change and replace(self.change, up=self.change.up.clone(), down=self.change.down.clone())
        return replace(self, codes=self.codes.clone() if codes else self.codes, change=change)

    def merged(self) -> Tensor:
        """Return the dequantised weight [N, K] with the adapter."""
        weight = dequantised(self.codes, self.state)
        return weight if self.change is None else weight.addmm_(self.change.up.to(weight), self.change.down.to(weight))
