"""Recurrent layers described by numbers: sizes, and which rows of the stored weights a tensor-parallel rank needs.

A recurrent layer mixes tokens through a state of fixed size instead of keys and values of all tokens before. Each kind
names the roles of its weights (models/families/recurrent.py has the names of the modules): `inputs` are fused into the
first product, `others` are separate weights, `recurrent_out` is the last product. A layer is divided over ranks by
units: groups of heads that do not depend on each other.

Source: gated delta net (arXiv 2412.06464), Mamba-2 (arXiv 2405.21060, section 6), Mamba (arXiv 2312.00752, section
3.4), short convolution (LFM2, arXiv 2511.23404), lightning attention (arXiv 2501.08313, section 2.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """A gated delta net."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    """Kernel size of the convolution, in tokens."""
    grouped: bool = False
    """The first product is stored by key heads (Qwen3-Next), not by projections."""

    @property
    def units(self) -> int:
        """Number of key heads; a unit is a key head with its value heads."""
        return self.key_heads

    @property
    def shared(self) -> int:
        """Number of value heads per key head."""
        return self.value_heads // self.key_heads

    def inputs(self, mine: range) -> Mapping[str, Tensor]:
        """Rows of some units in each weight of the first product."""
        k = self.key_dim
        v = self.shared * self.value_dim
        r = self.shared
        units = self.units
        if self.grouped:
            return {"recurrent_qkvz": _regrouped(mine, k, k, v, v), "recurrent_ba": _regrouped(mine, r, r)}
        widths = {"qkv": (k, k, v), "z": (v,), "b": (r,), "a": (r,)}
        return {f"recurrent_{name}": _stacked(units, mine, *parts) for name, parts in widths.items()}

    def others(self, mine: range) -> Mapping[str, Tensor]:
        """Rows of some units in the convolution, decay, time step and norm weights."""
        k = self.key_dim
        v = self.shared * self.value_dim
        r = self.shared
        units = self.units
        heads = _stacked(units, mine, r)
        return {
            "recurrent_conv": _stacked(units, mine, k, k, v),
            "recurrent_decay": heads,
            "recurrent_dt": heads,
            "recurrent_norm": torch.arange(self.value_dim),
        }

    def columns(self, mine: range) -> range:
        """Columns of some units in the last product."""
        per_unit = self.shared * self.value_dim
        return range(mine.start * per_unit, mine.stop * per_unit)

    def state_shapes(self, units: int) -> tuple[Shape, Shape]:
        """Convolution [width - 1, channels]; recurrence [units, key_dim, value heads per key head, value_dim]."""
        channels = units * (2 * self.key_dim + self.shared * self.value_dim)
        return (self.width - 1, channels), (units, self.key_dim, self.shared, self.value_dim)


@dataclass(frozen=True, kw_only=True)
class Mamba2:
    """A Mamba-2 mixer."""

    heads: int
    head_dim: int
    groups: int
    """Number of groups of heads; the heads of a group share B and C."""
    state_dim: int
    width: int
    """Kernel size of the convolution, in tokens."""
    norm: Literal["gated", "before_gate", "none"] = "gated"
    """gated: the norm of each group follows the gate; before_gate: it precedes the gate; none: there is no norm."""
    least_step: float = 0.0
    """Lower bound of the time steps."""

    @property
    def units(self) -> int:
        """Number of groups, which B, C and the norm share."""
        return self.groups

    @property
    def shared(self) -> int:
        """Number of heads per group."""
        return self.heads // self.groups

    def inputs(self, mine: range) -> Mapping[str, Tensor]:
        """Rows of some units in each weight of the first product."""
        inner = self.shared * self.head_dim
        n = self.state_dim
        return {"recurrent_in": _stacked(self.units, mine, inner, inner, n, n, self.shared)}

    def others(self, mine: range) -> Mapping[str, Tensor]:
        """Rows of some units in the convolution, decay, time step, skip and norm weights."""
        inner = self.shared * self.head_dim
        n = self.state_dim
        heads = _stacked(self.units, mine, self.shared)
        return {
            "recurrent_conv": _stacked(self.units, mine, inner, n, n),
            "recurrent_decay": heads,
            "recurrent_dt": heads,
            "recurrent_skip": heads,
            "recurrent_norm": _stacked(self.units, mine, inner),
        }

    def columns(self, mine: range) -> range:
        """Columns of some units in the last product."""
        per_unit = self.shared * self.head_dim
        return range(mine.start * per_unit, mine.stop * per_unit)

    def state_shapes(self, units: int) -> tuple[Shape, Shape]:
        """Convolution [width - 1, channels]; recurrence [units, state_dim, heads per group, head_dim]."""
        channels = units * (self.shared * self.head_dim + 2 * self.state_dim)
        return (self.width - 1, channels), (units, self.state_dim, self.shared, self.head_dim)


@dataclass(frozen=True, kw_only=True)
class Mamba:
    """A Mamba mixer with norms of B, C and the step sizes (Jamba)."""

    inner: int
    """Number of channels."""
    state_dim: int
    rank: int
    """Rank of the product that computes the step sizes."""
    width: int
    """Kernel size of the convolution, in tokens."""

    @property
    def units(self) -> int:
        """1: B, C and the step sizes depend on all channels."""
        return 1

    def inputs(self, mine: range) -> Mapping[str, Tensor]:
        """All rows of the first product, as there is one unit."""
        return {"recurrent_in": torch.arange(2 * self.inner)}

    def others(self, mine: range) -> Mapping[str, Tensor]:
        """All rows of the other weights, as there is one unit."""
        sizes = {
            **dict.fromkeys(("conv", "decay", "skip", "dt"), self.inner),
            **{"select": self.rank + 2 * self.state_dim, "dt_norm": self.rank},
            **dict.fromkeys(("b_norm", "c_norm"), self.state_dim),
        }
        return {f"recurrent_{role}": torch.arange(size) for role, size in sizes.items()}

    def columns(self, mine: range) -> range:
        """All columns of the last product, as there is one unit."""
        return range(self.inner)

    def state_shapes(self, units: int) -> tuple[Shape, Shape]:
        """Convolution [width - 1, channels]; recurrence [channels, state_dim]."""
        return (self.width - 1, self.inner), (self.inner, self.state_dim)


@dataclass(frozen=True, kw_only=True)
class ShortConvolution:
    """A gated convolution. Its last inputs are its only state."""

    channels: int
    width: int
    """Kernel size of the convolution, in tokens."""

    @property
    def units(self) -> int:
        """Number of channels."""
        return self.channels

    def inputs(self, mine: range) -> Mapping[str, Tensor]:
        """Rows of some units in each weight of the first product."""
        return {"recurrent_in": _stacked(self.units, mine, 1, 1, 1)}

    def others(self, mine: range) -> Mapping[str, Tensor]:
        """Rows of some units in the convolution weight."""
        return {"recurrent_conv": _stacked(self.units, mine, 1)}

    def columns(self, mine: range) -> range:
        """Columns of some units in the last product."""
        return mine

    def state_shapes(self, units: int) -> tuple[Shape, Shape]:
        """Convolution [width - 1, channels]; the recurrent state is empty."""
        return (self.width - 1, units), (0,)


@dataclass(frozen=True, eq=False, kw_only=True)
class Lightning:
    """Linear attention whose heads decay at fixed rates, with a norm over all heads."""

    heads: int
    head_dim: int
    rates: Tensor
    """[layers of the model, heads]: a state is multiplied by exp(-rate) at each token."""
    norm_eps: float

    @property
    def units(self) -> int:
        """1: the norm depends on all heads."""
        return 1

    def inputs(self, mine: range) -> Mapping[str, Tensor]:
        """All rows of the first product, as there is one unit; those of QKV are reordered."""
        d = self.head_dim
        return {
            "recurrent_qkv": _regrouped(range(self.heads), d, d, d),
            "recurrent_gate": torch.arange(self.heads * d),
        }

    def others(self, mine: range) -> Mapping[str, Tensor]:
        """All rows of the norm, as there is one unit."""
        return {"recurrent_norm": torch.arange(self.heads * self.head_dim)}

    def columns(self, mine: range) -> range:
        """All columns of the last product, as there is one unit."""
        return range(self.heads * self.head_dim)

    def state_shapes(self, units: int) -> tuple[Shape, Shape]:
        """The convolution state is empty; recurrence [heads, head_dim, 1, head_dim]."""
        return (0, 0), (self.heads, self.head_dim, 1, self.head_dim)


Recurrence = GatedDelta | Mamba2 | Mamba | ShortConvolution | Lightning
"""Sizes of a kind of recurrent layer, and the division of its weights: rows of the units `mine` in each weight of the
first product, in the order of computation, and in all other weights, by role; and their columns in the last product."""
KINDS = {
    "gated_delta": GatedDelta,
    "mamba2": Mamba2,
    "mamba": Mamba,
    "short_convolution": ShortConvolution,
    "lightning": Lightning,
}
"""Kinds of recurrent layers by their names in the family table."""


def _stacked(units: int, mine: range, *widths: int) -> Tensor:
    """Row indices of the units `mine` in a weight stored part by part, each part with `width` rows for each unit."""
    rows = []
    start = 0
    for width in widths:
        rows.append(torch.arange(start + mine.start * width, start + mine.stop * width))
        start += units * width
    return torch.cat(rows)


def _regrouped(mine: range, *widths: int) -> Tensor:
    """Row indices of the units `mine` in a weight stored unit by unit, returned part by part as in `_stacked`."""
    rows = torch.arange(mine.start * sum(widths), mine.stop * sum(widths)).view(len(mine), -1)
    return torch.cat([part.flatten() for part in rows.split(widths, dim=1)])
