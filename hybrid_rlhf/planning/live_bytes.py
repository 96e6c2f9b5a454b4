"""Bytes of live tensors: what a device must hold, without the overhead of its allocator and libraries.

Counts storages, because tensors are often views and memory is freed with the last of them. The same counter measures
tensors on the meta device and, in tests, those of a real step.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors created in its context while they are alive."""

    def __init__(self, device_type: str) -> None:
        """Count tensors on devices of this type."""
        super().__init__()
        self._device_type = device_type
        self._alive: dict[int, tuple[Any, int]] = {}
        self.live = 0
        """Bytes of the tensors that are alive."""
        self.peak = 0
        """Maximum of `live` since `restart`."""

    def __torch_dispatch__(self, func: Any, types: Any, inputs: Any = (), options: Any = None) -> Any:
        result = func(*inputs, **(options or {}))
        tree_map_only(Tensor, self.count, result)
        return result

    def count(self, tensor: Tensor) -> None:
        """Count a tensor; a storage that is already counted is not counted again."""
        if tensor.device.type != self._device_type:
            return
        holder: Any = tensor if tensor.is_mkldnn else tensor.untyped_storage()
        if tensor.is_mkldnn:  # weights packed by oneDNN have no storage
            key = id(tensor)
            size = tensor.numel() * tensor.element_size()
        else:
            key = holder._cdata
            size = holder.nbytes()
        if key not in self._alive:
            self._alive[key] = weakref.ref(holder, lambda _: self._forget(key)), size
            self.live += size
            self.peak = max(self.peak, self.live)

    def restart(self) -> None:
        """Measure the peak from now on."""
        self.peak = self.live

    def _forget(self, key: int) -> None:
        self.live -= self._alive.pop(key)[1]
