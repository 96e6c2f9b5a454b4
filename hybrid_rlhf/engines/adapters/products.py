"""Products of a packed batch whose tokens belong to different adapters.

The base product is computed once for all tokens. The tokens of an adapter are adjacent, and a grouped product
multiplies those of each by its own factors, which are stacked with ranks padded by zeros. A product with all factors at
once, with the inner values of other adapters set to 0, costs the sum of the ranks for each token, and a NaN of one
adapter would reach the gradients of all: 0 * NaN is NaN.

Source: Punica (arXiv 2310.18547) and S-LoRA (arXiv 2311.03285) group tokens by adapter in inference; here also the
backward pass does.

Shapes: T tokens, A adapters, r rank, R the largest rank, rounded up, K inputs, N outputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from hybrid_rlhf.engines.adapters.adapter import Adapter

_MULTIPLE = 8
"""Rows of a grouped product are multiples of 16 bytes, so factors are padded to multiples of this with zeros."""


class StackedFactors:
    """Copies of the factors of some adapters, stacked by layer, and one gradient for all of them."""

    def __init__(self, adapters: Sequence[Adapter], device: torch.device) -> None:
        """Copy the weights of the adapters."""
        layers = {layer.name: layer for adapter in adapters for layer in adapter.layers}
        shapes = [
            (len(adapters), _padded(max(adapter.rank for adapter in adapters)), _padded(size))
            for layer in layers.values()
            for size in (layer.inputs, layer.outputs)
        ]
        sizes = [count * rank * width for count, rank, width in shapes]
        self.gradient = torch.zeros(sum(sizes), device=device)
        factors = []
        gradients = self.gradient.split(sizes)
        values = torch.zeros_like(self.gradient).split(sizes)
        for value, gradient, shape in zip(values, gradients, shapes, strict=True):
            factor = value.view(shape).requires_grad_()
            factor.grad = gradient.view(shape)  # backward adds to it in place
            factors.append(factor)
        self.of_layer = dict(zip(layers, zip(factors[::2], factors[1::2], strict=True), strict=True))
        """First factor [A, R, K] and second one [A, R, N] of each layer, padded, by its name."""
        copies: list[Tensor] = []
        self._gradients: list[list[Tensor]] = []
        for number, adapter in enumerate(adapters):
            of_adapter: list[Tensor] = []
            for layer in adapter.layers:
                for factor, size in zip(self.of_layer[layer.name], (layer.inputs, layer.outputs), strict=True):
                    assert factor.grad is not None
                    place = (number, slice(adapter.rank), slice(size))
                    copies.append(factor.detach()[place])
                    of_adapter.append(factor.grad[place])
            self._gradients.append(of_adapter)
        torch._foreach_copy_(copies, [part for adapter in adapters for part in adapter.parts("weights")])

    @torch.no_grad()
    def add_gradients(self, adapters: Sequence[Adapter], learns: Sequence[bool]) -> None:
        """Add the gradients to those of the adapters that learn."""
        for adapter, gradients, wanted in zip(adapters, self._gradients, learns, strict=True):
            if wanted:
                torch._foreach_add_(adapter.parts("gradient"), gradients)


class AdapterProducts:
    """Adds the product of each token's adapter to the outputs of linear layers, inside `of`."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        """Register hooks of layers by name; outside of `of` they add nothing."""
        self._stacked: StackedFactors | None = None
        for name, layer in layers.items():
            layer.register_forward_hook(lambda _, inputs, output, name=name: self._added(name, inputs[0], output))

    @contextlib.contextmanager
    def of(self, stacked: StackedFactors, scales: Sequence[float], tokens: Sequence[int]) -> Iterator[None]:
        """Context of forward and backward, in which a recomputed forward also adds the products.

        Args:
            stacked: factors of the adapters.
            scales: factor of each adapter's output.
            tokens: number of tokens of each adapter, which are adjacent and in the order of the adapters.
        """
        device = stacked.gradient.device
        counts = torch.tensor(tokens)
        self._ends = counts.cumsum(0, dtype=torch.int32).to(device)
        self._scales = torch.tensor(scales).repeat_interleave(counts)[:, None].to(device)
        self._stacked = stacked
        try:
            yield
        finally:
            self._stacked = None

    def _added(self, name: str, x: Tensor, output: Tensor) -> Tensor:
        stacked = self._stacked
        factors = None if stacked is None else stacked.of_layer.get(name)
        if factors is None:
            return output
        down, up = (factor.to(x.dtype) for factor in factors)
        rows = x.flatten(0, -2)
        if len(rows) != len(self._scales):
            raise RuntimeError(f"layer {name} has {len(rows)} tokens, the packed batch {len(self._scales)}")
        if padding := down.shape[2] - rows.shape[1]:
            rows = functional.pad(rows, (0, padding))
        inner = functional.grouped_mm(rows, down.transpose(1, 2), offs=self._ends) * self._scales.to(x.dtype)
        added = functional.grouped_mm(inner, up, offs=self._ends)
        return output + added[:, : output.shape[-1]].view_as(output)


def _padded(size: int) -> int:
    return -(-size // _MULTIPLE) * _MULTIPLE
