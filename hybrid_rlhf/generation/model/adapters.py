"""LoRA adapters in the decoder, unmerged: rows of several adapters, and of none, in one batch.

The product of the base is computed once for all tokens. The low-rank factors of all adapters of a product stand side by
side, and each token keeps the inner values of its own adapter alone. Why all of them are computed: ranks are small
beside the weights, and shapes that do not depend on who is in the batch can be captured in a CUDA graph.

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

from hybrid_rlhf.generation.model.quantised import Linear


@dataclass
class ChosenAdapters:
    """What the products of a decoder share: the adapter of each token of the present step."""

    of_tokens: Tensor | None = None
    """[T] numbers from 1 on, 0 for a token without adapter; none: no token has one."""


@dataclass(frozen=True)
class LowRankChange:
    """What one adapter adds to some outputs of a product: up @ down."""

    adapter: int
    """Its number."""
    first: int
    """The first of the outputs."""
    up: Tensor
    """[outputs, r]."""
    down: Tensor
    """[r, K]."""


class AdaptedLinear:
    """x W^T + b, and what the adapter of each token adds."""

    def __init__(self, base: Linear, changes: Sequence[LowRankChange], chosen: ChosenAdapters) -> None:
        """Args: the product, the changes of all adapters, and what tells those of the tokens."""
        self._base, self._chosen = base, chosen
        self.outputs, self.inputs, self.weight = base.outputs, base.inputs, base.weight
        self._down = torch.cat([change.down for change in changes])
        ranks = [len(change.down) for change in changes]
        self._up = self._down.new_zeros(base.outputs, sum(ranks))
        for change, columns in zip(changes, self._up.split(ranks, dim=1), strict=True):
            columns[change.first : change.first + len(change.up)] = change.up
        numbers = torch.tensor([change.adapter for change in changes], device=self._down.device)
        self._owners = numbers.repeat_interleave(torch.tensor(ranks, device=numbers.device))
        """[R] the adapter of each inner value."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] to [T, N]."""
        result, chosen = self._base(x), self._chosen.of_tokens
        if chosen is None:
            return result
        inner = functional.linear(x, self._down) * (chosen[:, None] == self._owners)
        return result.addmm_(inner, self._up.t())
