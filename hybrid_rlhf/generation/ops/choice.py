"""Which implementation of the operations a device and dtype has.

Operations have references in torch, Triton's kernels on a GPU (gpu.py) and compiled ones on a CPU (cpu_kernels.py).
"""

from __future__ import annotations

from types import ModuleType

import torch

from hybrid_rlhf.generation.ops import cpu_kernels, gpu


def kernels_for(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """The module of kernels for a device and dtype: Triton's on a GPU, compiled ones on a CPU.

    None where a CPU has no compiler, or the dtype no kernels; torch's operations compute the same then.
    """
    if device.type == "cuda":
        return gpu
    return cpu_kernels if dtype in cpu_kernels.DTYPES and cpu_kernels.available() else None


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are products with packed weights for a device and dtype."""
    if device.type != "cpu" or not torch.backends.mkldnn.enabled:
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
