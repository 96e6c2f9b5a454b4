"""Activations in host memory between forward and backward.

torch's `save_on_cpu` moves every tensor that autograd saves, weights included, so weights that ZeRO-3 has gathered for
a layer would stay in memory as copies. Here weights are not moved. With gradient checkpointing, only the input of each
layer is moved. Copies run in the stream of the computation and do not overlap with it.

torch's allocator of pinned memory rounds each tensor up to a power of two, and keeps what is freed for the same size.
For a GPU, tensors are therefore stored in pieces, one after the other in blocks of one size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

_LEAST_BYTES = 2**16
"""Smaller tensors are not moved, as moving them would cost more than it saves."""
_BLOCK_BYTES = 2**26
_Kept = Tensor | tuple[torch.device, Any]


class HostBlocks:
    """Copies of tensors in blocks of host memory. A block is freed with the last of its copies."""

    def __init__(self, block_bytes: int = 0, *, pin: bool = False) -> None:
        """Take the size of a block, 0 for that of each tensor, and whether blocks are pinned."""
        self._block_bytes = block_bytes
        self._pin = pin
        self._left = torch.empty(0, dtype=torch.uint8)

    def put(self, tensor: Tensor) -> tuple[Tensor, list[Tensor]]:
        """A meta tensor with the shape and strides of the copy, and its bytes."""
        form = torch.empty_like(tensor, device="meta")
        dense = tensor if tensor.stride() == form.stride() else torch.empty_like(tensor).copy_(tensor)
        left, pieces = _bytes_of(dense), []
        while len(left):
            if not len(self._left):
                self._left = torch.empty(self._block_bytes or len(left), dtype=torch.uint8, pin_memory=self._pin)
            size = min(len(left), len(self._left))
            # no synchronisation: the copy back is queued after this one
            pieces.append(self._left[:size].copy_(left[:size], non_blocking=True))
            left, self._left = left[size:], self._left[size:]
        return form, pieces

    def get(self, form: Tensor, pieces: list[Tensor], device: torch.device) -> Tensor:
        """A tensor on a device again, as `put` has taken it."""
        result = torch.empty_like(form, device=device)
        for part, piece in zip(_bytes_of(result).split([len(piece) for piece in pieces]), pieces, strict=True):
            part.copy_(piece, non_blocking=True)
        return result


def _bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a tensor without gaps, [bytes]."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class ActivationOffload(saved_tensors_hooks):
    """Context in which autograd saves tensors on the host, and copies them back for backward."""

    def __init__(self) -> None:
        super().__init__(self._pack, self._unpack)
        self.moved_bytes = 0
        """Bytes moved so far."""
        self._blocks = HostBlocks(_BLOCK_BYTES, pin=True) if torch.cuda.is_available() else HostBlocks()

    def _pack(self, tensor: Tensor) -> _Kept:
        if tensor.nbytes < _LEAST_BYTES or isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return tensor
        self.moved_bytes += tensor.nbytes
        return tensor.device, self._to_host(tensor)

    def _unpack(self, packed: _Kept) -> Tensor:
        return packed if isinstance(packed, Tensor) else self._to_device(packed[1], packed[0])

    def _to_host(self, tensor: Tensor) -> Any:
        return self._blocks.put(tensor)

    def _to_device(self, host: Any, device: torch.device) -> Tensor:
        form, pieces = host
        return self._blocks.get(form, pieces, device)
