"""Unmerged LoRA adapters in the decoder: rows with different adapters, or none, in one batch.

The base product is computed once for all tokens. The low-rank factors of all adapters of a product are concatenated,
and the inner values that do not belong to a token's adapter are set to 0. Why all adapters are computed: their ranks
are small compared to the weights, and shapes that do not depend on the batch can be captured in a CUDA graph.

Source: Punica (arXiv 2310.18547) and S-LoRA (arXiv 2311.03285) batch tokens of several adapters, with kernels that
gather the factors of each.

Shapes: T tokens, N outputs, K inputs, r rank of an adapter, R ranks of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hybrid_rlhf.generation.model.layers import Linear


@dataclass
class ChosenAdapters:
    """Adapter of each token of the present step, shared by the products of a decoder."""

    of_tokens: Tensor | None = None
    """[T] adapter numbers from 1 on, 0 for a token without adapter; none: no token has one."""


@dataclass(frozen=True)
class LowRankChange:
    """Low-rank weight change of one adapter for some outputs of a product: up @ down."""

    adapter: int
    """Number of the adapter, from 1 on."""
    first: int
    """Index of the first of these outputs."""
    up: Tensor
    """[outputs, r]."""
    down: Tensor
    """[r, K]."""


class AdaptedLinear:
    """Linear layer x W^T + b, plus the change of each token's adapter."""

    def __init__(self, base: Linear, changes: Sequence[LowRankChange], chosen: ChosenAdapters) -> None:
        """Args: the base layer, the changes of all adapters, and the adapters of the tokens."""
        self.base = base
        self._chosen = chosen
        self.outputs = base.outputs
        self.inputs = base.inputs
        self.weight = base.weight
        self._down = torch.cat([change.down for change in changes])
        ranks = [len(change.down) for change in changes]
        self._up = self._down.new_zeros(base.outputs, sum(ranks))
        for change, columns in zip(changes, self._up.split(ranks, dim=1), strict=True):
            columns[change.first : change.first + len(change.up)] = change.up
        numbers = torch.tensor([change.adapter for change in changes], device=self._down.device)
        self._owners = numbers.repeat_interleave(torch.tensor(ranks, device=numbers.device))
        """[R] adapter number of each inner value."""

    def __call__(self, x: Tensor) -> Tensor:
        """Map inputs [T, K] to outputs [T, N]."""
        result = self.base(x)
        chosen = self._chosen.of_tokens
        if chosen is None:
            return result
        inner = functional.linear(x, self._down) * (chosen[:, None] == self._owners)
        return result.addmm_(inner, self._up.t())
