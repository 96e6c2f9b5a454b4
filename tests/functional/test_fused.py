"""Fused norms and rotary positions against their plain forms in autograd's own operations, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hybrid_rlhf.functional.operations import rms_norm, rotate


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plain_rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize("learns", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("shape", [(5, 32), (1, 7, 32), (2, 3, 4, 32), (0, 32)])
@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e4])
def test_rms_norm_and_its_gradients(shape: tuple[int, ...], learns: tuple[bool, bool], scale: float) -> None:
    found = []
    for function, dtype in ((rms_norm, torch.float32), (plain_rms_norm, torch.float64)):
        x, weight = (noise(*shape) * scale).to(dtype), noise(shape[-1], seed=1).to(dtype)
        inputs = [tensor.requires_grad_() for tensor, own in zip((x, weight), learns, strict=True) if own]
        output = function(x, weight, eps=1e-5)
        found.append([output, *torch.autograd.grad(output, inputs, noise(*shape, seed=2).to(dtype))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-5, atol=2e-5 / min(scale, 1.0))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_rotary_positions_and_their_gradient(rows: int, transposed: bool) -> None:
    """Also where the two halves of cos and sin differ, which no family here has."""
    cos, sin = noise(rows, 5, 8, seed=1), noise(rows, 5, 8, seed=2)
    found = []
    for fused in (True, False):
        x = noise(rows, 5, 3, 8).transpose(1, 2) if transposed else noise(rows, 3, 5, 8)
        x = x.detach().requires_grad_()
        output = rotate(x, cos[:, None], sin[:, None]) if fused else apply_rotary_pos_emb(x, x, cos, sin)[0]
        found.append((output, *torch.autograd.grad(output, x, noise(rows, 3, 5, 8, seed=3))))
        if fused:
            assert output.stride() == x.stride(), "in the order that attention reads it in"
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
