"""Base weights in 4 bits: NF4 with double quantisation, through bitsandbytes.

Adapters train in the dtype of the model; the base weights are frozen and dequantised in each product. Trainer and
sampler read the same 4-bit weights.

Source: QLoRA (Dettmers et al. 2023, arXiv 2305.14314, section 3): blocks of 64 elements with a scale each, and scales
in 8 bits in blocks of 256.

Shapes: N outputs, K inputs of a linear layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.models.pretrained.adapters import LowRank

SCALE_BYTES_PER_WEIGHT = 1 / 64 + 4 / (64 * 256)
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
    from bitsandbytes.nn import Linear4bit, Params4bit

    dtype = model.dtype
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        with torch.device("meta"):
            layer = Linear4bit(
                linear.in_features, linear.out_features, bias=False, compute_dtype=dtype, quant_type="nf4"
            )
        weight: Any = Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4", module=layer)
        layer.weight = weight.to(device)
        layer.bias = linear.bias
        # otherwise a forward in eval mode repacks the weight in place, in bfloat16, and later gradients are wrong
        layer.support_avx512bf16_for_cpu = False
        model.set_submodule(name, layer)


def require_bitsandbytes() -> None:
    """Require the package; raises UserError."""
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"model.quantization nf4 needs bitsandbytes ({error}): pip install 'hybrid_rlhf[quantization]'"
        ) from error


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

    weight: Tensor = dequantize_4bit(codes, state)
    return weight


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
        from bitsandbytes import matmul_4bit

        product: Tensor = matmul_4bit(x, self.codes, self.state)
        return product

    def copied(self, *, codes: bool) -> FourBitWeight:
        """Return the same with an adapter, and `codes` too, in new memory."""
        change = self.change and replace(self.change, up=self.change.up.clone(), down=self.change.down.clone())
        return replace(self, codes=self.codes.clone() if codes else self.codes, change=change)

    def merged(self) -> Tensor:
        """Return the dequantised weight [N, K] with the adapter."""
        weight = dequantised(self.codes, self.state)
        return weight if self.change is None else weight.addmm_(self.change.up.to(weight), self.change.down.to(weight))
