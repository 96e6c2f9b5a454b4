"""The recurrent layers: projections, a short convolution, a recurrence, a gate and a norm.

Source: gated delta net (arXiv 2412.06464, section 3.3, with the norms and the gate of Qwen3-Next), Mamba-2 (arXiv
2405.21060, section 7), Mamba (arXiv 2312.00752, section 3.4, with the norms of Jamba, arXiv 2403.19887), short
convolution (LFM2, arXiv 2511.23404), lightning attention (MiniMax-01, arXiv 2501.08313, section 2.2). Decays and the
recurrence are computed in float32.

Shapes: T tokens, H hidden, G groups of r heads on this rank, see scan.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from hybrid_rlhf.generation.model.quantised import Linear
from hybrid_rlhf.generation.model.recurrent.scan import DECAYING_SCAN, selective_scan
from hybrid_rlhf.generation.model.recurrent.states import StepStates
from hybrid_rlhf.generation.weights.recurrence import GatedDelta, Lightning, Mamba, Mamba2, Recurrence, ShortConvolution


@dataclass(frozen=True)
class MixerWeights:
    """The weights of a recurrent layer on this rank."""

    project: Linear
    out: Linear
    others: Mapping[str, Tensor]
    """By role, without the prefix `recurrent_`; that of a bias ends with `.bias`."""


class Mixer(Protocol):
    """A recurrent layer."""

    weights: MixerWeights

    def __call__(self, layer: int, x: Tensor, states: StepStates) -> Tensor:
        """This rank's part of the sum over units, [T, H] of [T, H]; updates the states of the layer."""


class GatedDeltaMixer:
    """A gated delta net."""

    def __init__(
        self, kind: GatedDelta, weights: MixerWeights, activation: Callable[[Tensor], Tensor], eps: float
    ) -> None:
        self._kind, self.weights, self._activation, self._eps = kind, weights, activation, eps

    def __call__(self, layer: int, x: Tensor, states: StepStates) -> Tensor:
        """See Mixer."""
        kind, w = self._kind, self.weights.others
        heads = len(w["decay"])
        values, keys = heads * kind.value_dim, heads // kind.shared * kind.key_dim
        mixed, z, b, a = self.weights.project(x).split([2 * keys + values, values, heads, heads], dim=-1)
        mixed = self._activation(states.convolve(layer, mixed, w["conv"], w.get("conv.bias"))).float()
        q, k, v = mixed.split([keys, keys, values], dim=-1)
        q, k = (_unit(part.unflatten(-1, (-1, kind.key_dim))) for part in (q, k))
        g = -w["decay"].float().exp() * functional.softplus(a.float() + w["dt"].float())
        beta = b.float().sigmoid()
        out = states.scan(
            layer,
            DECAYING_SCAN,
            q * kind.key_dim**-0.5,
            k,
            v.unflatten(-1, (-1, kind.shared, kind.value_dim)),
            g.unflatten(-1, (-1, kind.shared)),
            beta.unflatten(-1, (-1, kind.shared)),
        ).reshape(len(x), heads, kind.value_dim)
        normed = functional.rms_norm(out, out.shape[-1:], w["norm"].float(), self._eps)
        gated = normed * functional.silu(z.float()).view_as(normed)
        return self.weights.out(gated.flatten(1).to(x.dtype))


class Mamba2Mixer:
    """A Mamba-2 mixer: values are inputs times step sizes, keys and queries are B and C."""

    def __init__(self, kind: Mamba2, weights: MixerWeights, activation: Callable[[Tensor], Tensor], eps: float) -> None:
        self._kind, self.weights, self._activation, self._eps = kind, weights, activation, eps

    def __call__(self, layer: int, x: Tensor, states: StepStates) -> Tensor:
        """See Mixer."""
        kind, w = self._kind, self.weights.others
        heads = len(w["decay"])
        inner, shared = heads * kind.head_dim, heads // kind.shared * kind.state_dim
        z, mixed, dt = self.weights.project(x).split([inner, inner + 2 * shared, heads], dim=-1)
        mixed = self._activation(states.convolve(layer, mixed, w["conv"], w.get("conv.bias"))).float()
        inputs, b, c = mixed.split([inner, shared, shared], dim=-1)
        b, c = (part.unflatten(-1, (-1, kind.state_dim)) for part in (b, c))
        inputs = inputs.unflatten(-1, (-1, kind.shared, kind.head_dim))
        dt = functional.softplus(dt.float() + w["dt"].float()).clamp(min=kind.least_step)
        g, dt, skip = (
            part.unflatten(-1, (-1, kind.shared)) for part in (-w["decay"].float().exp() * dt, dt, w["skip"])
        )
        out = states.scan(layer, DECAYING_SCAN, c, b, inputs * dt[..., None], g) + inputs * skip[..., None].float()
        return self.weights.out(self._gated(out.flatten(2), z.float()).to(x.dtype))

    def _gated(self, out: Tensor, z: Tensor) -> Tensor:
        """[T, inner] of [T, G, inner / G] and the gate [T, inner], normed for each group."""
        gate = functional.silu(z).view_as(out)
        if self._kind.norm == "none":
            return (out * gate).flatten(1)
        before = self._kind.norm == "before_gate"
        normed = functional.rms_norm(out if before else out * gate, out.shape[-1:], eps=self._eps)
        normed = normed * self.weights.others["norm"].float().view(out.shape[1:])
        return (normed * gate if before else normed).flatten(1)


class MambaMixer:
    """A Mamba mixer."""

    def __init__(self, kind: Mamba, weights: MixerWeights, activation: Callable[[Tensor], Tensor], eps: float) -> None:
        self._kind, self.weights, self._activation, self._eps = kind, weights, activation, eps

    def __call__(self, layer: int, x: Tensor, states: StepStates) -> Tensor:
        """See Mixer."""
        kind, w = self._kind, self.weights.others
        mixed, z = self.weights.project(x).chunk(2, dim=-1)
        mixed = self._activation(states.convolve(layer, mixed, w["conv"], w.get("conv.bias")))
        parts = functional.linear(mixed, w["select"]).split([kind.rank, kind.state_dim, kind.state_dim], dim=-1)
        dt, b, c = (
            functional.rms_norm(part, part.shape[-1:], w[f"{name}_norm"], self._eps)
            for part, name in zip(parts, ("dt", "b", "c"), strict=True)
        )
        dt = functional.softplus(functional.linear(dt, w["dt"]).float() + w["dt.bias"].float())
        rule, mixed = selective_scan(-w["decay"].float().exp()), mixed.float()
        out = states.scan(layer, rule, mixed * dt, dt, b.float(), c.float()) + mixed * w["skip"].float()
        return self.weights.out((out * functional.silu(z.float())).to(x.dtype))


class ShortConvolutionMixer:
    """A convolution between two gates."""

    def __init__(self, weights: MixerWeights) -> None:
        self.weights = weights

    def __call__(self, layer: int, x: Tensor, states: StepStates) -> Tensor:
        """See Mixer."""
        w = self.weights.others
        before, after, mixed = self.weights.project(x).chunk(3, dim=-1)
        mixed = states.convolve(layer, before * mixed, w["conv"], w.get("conv.bias"))
        return self.weights.out(after * mixed)


class LightningMixer:
    """Lightning attention."""

    def __init__(self, kind: Lightning, weights: MixerWeights, activation: Callable[[Tensor], Tensor]) -> None:
        self._kind, self.weights, self._activation = kind, weights, activation
        self._rates = kind.rates.to(weights.others["norm"].device)

    def __call__(self, layer: int, x: Tensor, states: StepStates) -> Tensor:
        """See Mixer."""
        heads, d, norm = self._kind.heads, self._kind.head_dim, self.weights.others["norm"]
        qkv, gate = self.weights.project(x).split([3 * heads * d, heads * d], dim=-1)
        q, k, v = self._activation(qkv).float().unflatten(-1, (3, heads, d)).unbind(dim=1)
        decay = -self._rates[layer, :, None].expand(len(x), heads, 1)
        out = states.scan(layer, DECAYING_SCAN, q, k, v[:, :, None], decay).flatten(1)
        normed = functional.rms_norm(out, out.shape[-1:], norm.float(), self._kind.norm_eps)
        return self.weights.out((normed * gate.float().sigmoid()).to(x.dtype))


def mixer(kind: Recurrence, weights: MixerWeights, activation: Callable[[Tensor], Tensor], eps: float) -> Mixer:
    """The layer of a kind."""
    if isinstance(kind, GatedDelta):
        return GatedDeltaMixer(kind, weights, activation, eps)
    if isinstance(kind, Mamba):
        return MambaMixer(kind, weights, activation, eps)
    if isinstance(kind, ShortConvolution):
        return ShortConvolutionMixer(weights)
    if isinstance(kind, Lightning):
        return LightningMixer(kind, weights, activation)
    assert isinstance(kind, Mamba2)
    return Mamba2Mixer(kind, weights, activation, eps)


def _unit(x: Tensor) -> Tensor:
    """Vectors divided by their length, as the reference kernels do it."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)
