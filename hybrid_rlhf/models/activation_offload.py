"""Activations in host memory between forward and backward.

torch's `save_on_cpu` moves every tensor that autograd saves, weights included, so weights that ZeRO-3 has gathered for
a layer would stay in memory as copies. Here weights are not moved. With gradient checkpointing, only the input of each
layer is moved. Copies run in the stream of the computation and do not overlap with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

_LEAST_BYTES = 2**16
"""Smaller tensors are not moved, as moving them would cost more than it saves."""
_Kept = Tensor | tuple[torch.device, Any]


class ActivationOffload(saved_tensors_hooks):
    """Context in which autograd saves tensors on the host, and copies them back for backward."""

    def __init__(self) -> None:
        super().__init__(self._pack, self._unpack)
        self.moved_bytes = 0
        """Bytes moved so far."""

    def _pack(self, tensor: Tensor) -> _Kept:
        if tensor.nbytes < _LEAST_BYTES or isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return tensor
        self.moved_bytes += tensor.nbytes
        return tensor.device, self._to_host(tensor)

    def _unpack(self, packed: _Kept) -> Tensor:
        return packed if isinstance(packed, Tensor) else self._to_device(packed[1], packed[0])

    def _to_host(self, tensor: Tensor) -> Any:
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
        # No synchronisation: the copy back is queued after this one.
        return host.copy_(tensor, non_blocking=True)

    def _to_device(self, host: Any, device: torch.device) -> Tensor:
        return host.to(device, non_blocking=True)  # type: ignore[no-any-return]
