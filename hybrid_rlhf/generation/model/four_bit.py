"""Linear layers of the decoder over the 4-bit weights that training reads, with an unmerged adapter.

The weights are not copied: each call dequantises them, on a CPU in a compiled kernel, or multiplies by them in
bitsandbytes' kernel. Where inference weights need other columns than training, as the row-parallel products of tensor
parallelism, the dequantised weight is merged and selected in each call.

Source: QLoRA (arXiv 2305.14314, equation 5).

Shapes: T tokens, N outputs, K inputs, r rank of the adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hybrid_rlhf.functional import operations
from hybrid_rlhf.generation.ops import choice, cpu_kernels
from hybrid_rlhf.generation.ops.rows import concatenated
from hybrid_rlhf.models.four_bit import FourBitWeight


@dataclass
class FourBitPart:
    """The outputs of a product that come from one training weight."""

    weight: FourBitWeight
    pick: Callable[[Tensor], Tensor]
    """Selects this rank's part of the full weight."""

    def __post_init__(self) -> None:
        outputs, inputs = self.weight.shape
        numbers = torch.arange(outputs, dtype=torch.float64, device=self.weight.codes.device)
        picked = self.pick(numbers[:, None].expand(outputs, inputs))
        self.shape = picked.shape
        """Outputs and inputs of this part."""
        is_scaled = bool((self.pick(torch.ones_like(numbers)[:, None].expand(outputs, inputs))[:, 0] != 1).any())
        self.selects_rows = picked.shape[1] == inputs and not is_scaled
        """True if the part consists of rows of the weight."""
        rows = picked[:, 0].long()
        has_all = not self.selects_rows or (len(rows) == outputs and bool((rows == numbers).all()))
        self._rows = None if has_all else rows

    @property
    def is_whole(self) -> bool:
        """True if the part is the weight."""
        return self.selects_rows and self._rows is None

    def dense(self) -> Tensor:
        """Return the part [N, K] with its adapter merged."""
        return self.pick(self.weight.merged())

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, K] to [T, N]; without the adapter if `selects_rows`."""
        if not self.selects_rows:
            return functional.linear(x, self.dense())
        product = self.weight.multiply(x)
        return product if self._rows is None else product[:, self._rows]

    def rows_of(self, up: Tensor) -> Tensor:
        """Return the rows for these outputs of an adapter's factor for all outputs of the weight."""
        return up if self._rows is None else up[self._rows]


class FourBitLinear:
    """Linear layer x W^T + b whose weight consists of parts in 4 bits."""

    def __init__(self, parts: Sequence[FourBitPart], bias: Tensor | None) -> None:
        """Args: the parts in the order of the outputs, and the bias [N] or none."""
        self._parts = list(parts)
        self.bias = bias
        self.outputs = sum(part.shape[0] for part in parts)
        self.inputs = parts[0].shape[1]
        self.weight = parts[0].weight.codes
        device = self.weight.device
        dtype = parts[0].weight.state.dtype
        self._by_kernel = choice.kernels_for(device, dtype) is cpu_kernels and all(part.is_whole for part in parts)
        # products in bfloat16 are slow without instructions for them
        self._dtype = torch.float32 if self._by_kernel and not choice.can_pack(device, dtype) else dtype
        changes = [part.weight.change if part.selects_rows else None for part in parts]
        self._ranks = [0 if change is None else len(change.down) for change in changes]
        width = sum(self._ranks)
        self._down = torch.empty(width, self.inputs, dtype=self._dtype, device=device)
        self._up = torch.zeros(self.outputs, width, dtype=self._dtype, device=device)
        for place in range(len(self._parts)):
            self._set_factors(place)

    def follow(self, place: int, weight: FourBitWeight) -> None:
        """Copy the adapter of a part into the memory of its last one; CUDA graphs contain the address."""
        last = self._parts[place].weight.change
        if last is not None and weight.change is not None:
            last.up.copy_(weight.change.up)
            last.down.copy_(weight.change.down)
            self._set_factors(place)

    def _set_factors(self, place: int) -> None:
        part = self._parts[place]
        change = part.weight.change
        rank = self._ranks[place]
        if not rank or change is None:
            return
        columns = sum(self._ranks[:place])
        rows = sum(before.shape[0] for before in self._parts[:place])
        self._down[columns : columns + rank] = change.down
        self._up[rows : rows + part.shape[0], columns : columns + rank] = part.rows_of(change.up)

    def _product(self, x: Tensor) -> Tensor:
        """Return x W^T."""
        if self._by_kernel:
            weight = x.new_empty(self.outputs, self.inputs)
            for part, rows in zip(self._parts, weight.split([part.shape[0] for part in self._parts]), strict=True):
                cpu_kernels.dequantise(part.weight.codes, part.weight.state, rows)
            return operations.linear(x, weight)
        return concatenated([part(x) for part in self._parts], dim=1)

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, K] to [T, N]."""
        dtype = x.dtype
        x = x.to(self._dtype)
        out = self._product(x)
        if self.bias is not None:
            out = out + self.bias
        if len(self._down):
            out = torch.addmm(out, functional.linear(x, self._down), self._up.t())
        return out.to(dtype)
