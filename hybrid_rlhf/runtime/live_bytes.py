"""How many bytes of tensors are alive: what a device must hold, without what its allocator or the libraries add.

Why storages: tensors come and go as views; memory is there as long as any of them holds the storage. The same counter
serves tensors without memory (the meta device) and, in tests, those of a real step.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that come to life while it is entered, as long as they live."""

    def __init__(self, device_type: str) -> None:
        """Args: the kind of device whose tensors count."""
        super().__init__()
        self._device_type = device_type
        self._alive: dict[int, tuple[Any, int]] = {}
        self.live = 0
        """Bytes alive."""
        self.peak = 0
        """The most there were since `restart`."""

    def __torch_dispatch__(self, func: Any, types: Any, inputs: Any = (), options: Any = None) -> Any:
        result = func(*inputs, **(options or {}))
        tree_map_only(Tensor, self.count, result)
        return result

    def count(self, tensor: Tensor) -> None:
        """Count a tensor that may have been there before; its storage counts once."""
        if tensor.device.type != self._device_type:
            return
        holder: Any = tensor if tensor.is_mkldnn else tensor.untyped_storage()
        if tensor.is_mkldnn:  # packed weights of a CPU have no storage
            key, size = id(tensor), tensor.numel() * tensor.element_size()
        else:
            key, size = holder._cdata, holder.nbytes()
        if key not in self._alive:
            self._alive[key] = weakref.ref(holder, lambda _: self._forget(key)), size
            self.live += size
            self.peak = max(self.peak, self.live)

    def restart(self) -> None:
        """Look for the peak from here on."""
        self.peak = self.live

    def _forget(self, key: int) -> None:
        self.live -= self._alive.pop(key)[1]
