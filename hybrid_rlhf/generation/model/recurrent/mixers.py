"""The recurrent layers: projections, a short convolution, a recurrence, a gate and a norm.

Source: gated delta net (arXiv 2412.06464, section 3.3, with the norms and the gate of Qwen3-Next), Mamba-2 (arXiv
2405.21060, section 7), Mamba (arXiv 2312.00752, section 3.4, with the norms of Jamba, arXiv 2403.19887), short
convolution (LFM2, arXiv 2511.23404), lightning attention (MiniMax-01, arXiv 2501.08313, section 2.2). Decays and the
recurrence are computed in float32. With kernels (ops/), the convolution is one launch, and so is a decoding step of the
recurrence of a gated delta net or of Mamba-2.

Shapes: T tokens, H hidden, G groups of r heads on this rank, see ops/recurrence.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from hybrid_rlhf.generation.architecture.model_description import Activation
from hybrid_rlhf.generation.architecture.recurrence import (
    GatedDelta,
    Lightning,
    Mamba,
    Mamba2,
    Recurrence,
    ShortConvolution,
)
from hybrid_rlhf.generation.model.layers import Linear
from hybrid_rlhf.generation.model.recurrent.states import StepStates
from hybrid_rlhf.generation.ops.recurrence import DECAYING_SCAN, selective_rule
from hybrid_rlhf.generation.ops.rows import ACTIVATIONS

KindT = TypeVar("KindT", bound=Recurrence)


@dataclass(frozen=True)
class MixerWeights:
    """The weights of a recurrent layer on this rank."""

    project: Linear
    out: Linear
    others: Mapping[str, Tensor]
    """Other weights by role without the prefix `recurrent_`; roles of biases end with `.bias`."""


class Mixer(Generic[KindT]):
    """A recurrent layer."""

    def __init__(self, kind: KindT, weights: MixerWeights, activation: Activation, eps: float) -> None:
        self._kind = kind
        self.weights = weights
        self._activation = activation
        self._eps = eps

    def __call__(self, layer: int, x: Tensor, states: StepStates) -> Tensor:
        """Map [T, H] to this rank's part of the sum over units [T, H]; updates the states of the layer."""
        return self.weights.out(self._mixed(layer, self.weights.project(x), states).to(x.dtype))

    def _mixed(self, layer: int, projected: Tensor, states: StepStates) -> Tensor:
        """Return the inputs of the last projection from the outputs of the first; updates the states of the layer."""
        raise NotImplementedError


class GatedDeltaMixer(Mixer[GatedDelta]):
    """A gated delta net."""

    def _mixed(self, layer: int, projected: Tensor, states: StepStates) -> Tensor:
        kind = self._kind
        w = self.weights.others
        kernels = states.kernels
        heads = len(w["decay"])
        values, keys = heads * kind.value_dim, heads // kind.shared * kind.key_dim
        mixed, z, b, a = projected.split([2 * keys + values, values, heads, heads], dim=-1)
        mixed = states.convolve(layer, mixed, w["conv"], w.get("conv.bias"), self._activation)
        kernel = None if kernels is None else partial(kernels.delta_step, w["decay"], w["dt"])
        rule = replace(DECAYING_SCAN, inputs=self._inputs, kernel=kernel)
        out = states.scan(layer, rule, mixed, b, a).reshape(len(projected), heads, kind.value_dim)
        normed = functional.rms_norm(out, out.shape[-1:], w["norm"].float(), self._eps)
        gated = normed * functional.silu(z.float()).view_as(normed)
        return gated.flatten(1)

    def _inputs(self, mixed: Tensor, b: Tensor, a: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys, values, decays and betas of the scan."""
        kind = self._kind
        w = self.weights.others
        values = b.shape[1] * self._kind.value_dim
        keys = (mixed.shape[1] - values) // 2
        q, k, v = mixed.float().split([keys, keys, values], dim=-1)
        q, k = (_unit(part.unflatten(-1, (-1, kind.key_dim))) for part in (q, k))
        g = -w["decay"].float().exp() * functional.softplus(a.float() + w["dt"].float())
        beta = b.float().sigmoid()
        g, beta = (part.unflatten(-1, (-1, kind.shared)) for part in (g, beta))
        return q * kind.key_dim**-0.5, k, v.unflatten(-1, (-1, kind.shared, kind.value_dim)), g, beta


class Mamba2Mixer(Mixer[Mamba2]):
    """A Mamba-2 mixer: values are inputs times step sizes, keys and queries are B and C."""

    def _mixed(self, layer: int, projected: Tensor, states: StepStates) -> Tensor:
        kind = self._kind
        w = self.weights.others
        kernels = states.kernels
        heads = len(w["decay"])
        inner = heads * kind.head_dim
        shared = heads // kind.shared * kind.state_dim
        z, mixed, dt = projected.split([inner, inner + 2 * shared, heads], dim=-1)
        mixed = states.convolve(layer, mixed, w["conv"], w.get("conv.bias"), self._activation)
        kernel = None
        if kernels is not None:
            kernel = partial(kernels.mamba2_step, w["decay"], w["dt"], w["skip"], least_step=kind.least_step)
        rule = replace(DECAYING_SCAN, inputs=self._inputs, skip=self._skip, kernel=kernel)
        out = states.scan(layer, rule, mixed, dt).flatten(2)
        return self._gated(out, z.float())

    def _inputs(self, mixed: Tensor, dt: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys, values and decays of the scan."""
        kind = self._kind
        w = self.weights.others
        values = self._values(mixed, dt)
        b, c = mixed[:, values.shape[1:].numel() :].float().unflatten(-1, (2, -1, kind.state_dim)).unbind(dim=1)
        dt = functional.softplus(dt.float() + w["dt"].float()).clamp(min=kind.least_step)
        g, dt = (part.unflatten(-1, (-1, kind.shared)) for part in (-w["decay"].float().exp() * dt, dt))
        return c, b, values * dt[..., None], g

    def _skip(self, mixed: Tensor, dt: Tensor) -> Tensor:
        """Return the direct contribution of the inputs to the outputs, [T, G, r, V]."""
        return self._values(mixed, dt) * self.weights.others["skip"].view(-1, self._kind.shared, 1).float()

    def _values(self, mixed: Tensor, dt: Tensor) -> Tensor:
        """Return the inputs as values [T, G, r, V]."""
        inner = dt.shape[1] * self._kind.head_dim
        return mixed[:, :inner].float().unflatten(-1, (-1, self._kind.shared, self._kind.head_dim))

    def _gated(self, out: Tensor, z: Tensor) -> Tensor:
        """Gate outputs [T, G, inner / G] by z [T, inner] and norm each group; returns [T, inner]."""
        gate = functional.silu(z).view_as(out)
        if self._kind.norm == "none":
            return (out * gate).flatten(1)
        before = self._kind.norm == "before_gate"
        normed = functional.rms_norm(out if before else out * gate, out.shape[-1:], eps=self._eps)
        normed = normed * self.weights.others["norm"].float().view(out.shape[1:])
        return (normed * gate if before else normed).flatten(1)


class MambaMixer(Mixer[Mamba]):
    """A Mamba mixer."""

    def _mixed(self, layer: int, projected: Tensor, states: StepStates) -> Tensor:
        kind = self._kind
        w = self.weights.others
        mixed, z = projected.chunk(2, dim=-1)
        mixed = states.convolve(layer, mixed, w["conv"], w.get("conv.bias"), self._activation)
        selected = functional.linear(mixed, w["select"])
        parts = selected.split([kind.rank, kind.state_dim, kind.state_dim], dim=-1)
        dt, b, c = (
            functional.rms_norm(part, part.shape[-1:], w[f"{name}_norm"], self._eps)
            for part, name in zip(parts, ("dt", "b", "c"), strict=True)
        )
        dt = functional.softplus(functional.linear(dt, w["dt"]).float() + w["dt.bias"].float())
        rule = selective_rule(-w["decay"].float().exp())
        mixed = mixed.float()
        out = states.scan(layer, rule, mixed * dt, dt, b.float(), c.float()) + mixed * w["skip"].float()
        return out * functional.silu(z.float())


class ShortConvolutionMixer(Mixer[ShortConvolution]):
    """A convolution between two gates."""

    def _mixed(self, layer: int, projected: Tensor, states: StepStates) -> Tensor:
        w = self.weights.others
        before, after, mixed = projected.chunk(3, dim=-1)
        mixed = states.convolve(layer, before * mixed, w["conv"], w.get("conv.bias"))
        return after * mixed


class LightningMixer(Mixer[Lightning]):
    """Lightning attention."""

    def __init__(self, kind: Lightning, weights: MixerWeights, activation: Activation, eps: float) -> None:
        super().__init__(kind, weights, activation, eps)
        self._rates = kind.rates.to(weights.others["norm"].device)

    def _mixed(self, layer: int, projected: Tensor, states: StepStates) -> Tensor:
        width = self._kind.heads * self._kind.head_dim
        norm = self.weights.others["norm"]
        qkv, gate = projected.split([3 * width, width], dim=-1)
        rule = replace(DECAYING_SCAN, inputs=partial(self._inputs, layer))
        out = states.scan(layer, rule, qkv).flatten(1)
        normed = functional.rms_norm(out, out.shape[-1:], norm.float(), self._kind.norm_eps)
        return normed * gate.float().sigmoid()

    def _inputs(self, layer: int, qkv: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys, values and decays of the scan."""
        heads = self._kind.heads
        mixed = ACTIVATIONS[self._activation](qkv).float()
        q, k, v = mixed.unflatten(-1, (3, heads, self._kind.head_dim)).unbind(dim=1)
        return q, k, v[:, :, None], -self._rates[layer, :, None].expand(len(qkv), heads, 1)


_MIXERS: dict[type, type[Mixer[Any]]] = {
    GatedDelta: GatedDeltaMixer,
    Mamba2: Mamba2Mixer,
    Mamba: MambaMixer,
    ShortConvolution: ShortConvolutionMixer,
    Lightning: LightningMixer,
}


def mixer(kind: Recurrence, weights: MixerWeights, activation: Activation, eps: float) -> Mixer[Any]:
    """Create the recurrent layer of a kind."""
    return _MIXERS[type(kind)](kind, weights, activation, eps)


def _unit(x: Tensor) -> Tensor:
    """Divide vectors by their length, with the epsilon of the reference kernels."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)
