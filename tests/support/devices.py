"""Devices of tests that a GPU runs too."""

from __future__ import annotations

import pytest
import torch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
"""For the parameter `device`; a GPU decodes with kernels and CUDA graphs."""
