"""Choice of the implementation of operations for a device and dtype.

Operations have references in torch, Triton kernels for a GPU (gpu.py) and compiled kernels for a CPU (cpu_kernels.py).
"""

from __future__ import annotations

from types import ModuleType

import torch

from hybrid_rlhf.generation.ops import cpu_kernels, gpu


def kernels_for(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """Return the module of kernels for a device and dtype: Triton kernels on a GPU, compiled kernels on a CPU.

    None if a CPU has no compiler, or there are no kernels for the dtype; torch is used then.
    """
    if device.type == "cuda":
        return gpu
    return cpu_kernels if dtype in cpu_kernels.DTYPES and cpu_kernels.available() else None


def fused_kernels(kernels: ModuleType | None) -> ModuleType | None:
    """Return kernels that fuse more operations than those of a CPU; None for these."""
    return None if kernels is cpu_kernels else kernels


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """True if products with packed weights exist for a device and dtype."""
    if device.type != "cpu" or not torch.backends.mkldnn.enabled:
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
