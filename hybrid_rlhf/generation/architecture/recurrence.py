"""Recurrent layers described by numbers: sizes, and which rows of the stored weights a tensor-parallel rank needs.

A recurrent layer mixes tokens through a state of fixed size instead of keys and values of all tokens before. Each kind
names the roles of its weights (models/families/recurrent.py has the names of the modules): `inputs` are fused into one
product, `others` are kept apart, `recurrent_out` is the product at the end. Ranks share a layer by units, which are
groups of heads that need nothing of each other.

Source: gated delta net (arXiv 2412.06464), Mamba-2 (arXiv 2405.21060, section 6), Mamba (arXiv 2312.00752, section
3.4), short convolution (LFM2, arXiv 2511.23404), lightning attention (arXiv 2501.08313, section 2.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

Shape = tuple[int, ...]


class Recurrence(Protocol):
    """A kind of recurrent layer."""

    @property
    def units(self) -> int:
        """Parts that ranks can share."""

    def inputs(self, mine: range) -> Mapping[str, Tensor]:
        """For each weight of the first product, the rows of some units, in the order in which they are computed."""

    def others(self, mine: range) -> Mapping[str, Tensor]:
        """The same for all other weights except the last product."""

    def columns(self, mine: range) -> range:
        """Columns of the last product."""

    def state_shapes(self, units: int) -> tuple[Shape, Shape]:
        """Of the state of a convolution, in the dtype of the weights, and of the recurrent state, in float32."""


@dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """A gated delta net."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    """Tokens that the convolution sees."""
    grouped: bool = False
    """The first product is stored key head by key head (Qwen3-Next), not projection by projection."""

    @property
    def units(self) -> int:
        """See Recurrence: key heads, with the value heads that they serve."""
        return self.key_heads

    @property
    def shared(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    def inputs(self, mine: range) -> Mapping[str, Tensor]:
        """See Recurrence."""
        k, v, r, units = self.key_dim, self.shared * self.value_dim, self.shared, self.units
        if self.grouped:
            return {"recurrent_qkvz": _regrouped(mine, k, k, v, v), "recurrent_ba": _regrouped(mine, r, r)}
        widths = {"qkv": (k, k, v), "z": (v,), "b": (r,), "a": (r,)}
        return {f"recurrent_{name}": _stacked(units, mine, *each) for name, each in widths.items()}

    def others(self, mine: range) -> Mapping[str, Tensor]:
        """See Recurrence."""
        k, v, r, units = self.key_dim, self.shared * self.value_dim, self.shared, self.units
        heads = _stacked(units, mine, r)
        return {
            "recurrent_conv": _stacked(units, mine, k, k, v),
            "recurrent_decay": heads,
            "recurrent_dt": heads,
            "recurrent_norm": torch.arange(self.value_dim),
        }

    def columns(self, mine: range) -> range:
        """See Recurrence."""
        each = self.shared * self.value_dim
        return range(mine.start * each, mine.stop * each)

    def state_shapes(self, units: int) -> tuple[Shape, Shape]:
        """See Recurrence."""
        channels = units * (2 * self.key_dim + self.shared * self.value_dim)
        return (self.width - 1, channels), (units, self.key_dim, self.shared, self.value_dim)


@dataclass(frozen=True, kw_only=True)
class Mamba2:
    """A Mamba-2 mixer."""

    heads: int
    head_dim: int
    groups: int
    """Groups of heads that share B and C."""
    state_dim: int
    width: int
    """Tokens that the convolution sees."""
    norm: Literal["gated", "before_gate", "none"] = "gated"
    """The norm of each group follows the gate, precedes it, or is left out."""
    least_step: float = 0.0
    """Time steps are at least that."""

    @property
    def units(self) -> int:
        """See Recurrence: groups, which are also those of the norm."""
        return self.groups

    @property
    def shared(self) -> int:
        """Heads of a group."""
        return self.heads // self.groups

    def inputs(self, mine: range) -> Mapping[str, Tensor]:
        """See Recurrence."""
        inner, n = self.shared * self.head_dim, self.state_dim
        return {"recurrent_in": _stacked(self.units, mine, inner, inner, n, n, self.shared)}

    def others(self, mine: range) -> Mapping[str, Tensor]:
        """See Recurrence."""
        inner, n, heads = self.shared * self.head_dim, self.state_dim, _stacked(self.units, mine, self.shared)
        return {
            "recurrent_conv": _stacked(self.units, mine, inner, n, n),
            "recurrent_decay": heads,
            "recurrent_dt": heads,
            "recurrent_skip": heads,
            "recurrent_norm": _stacked(self.units, mine, inner),
        }

    def columns(self, mine: range) -> range:
        """See Recurrence."""
        each = self.shared * self.head_dim
        return range(mine.start * each, mine.stop * each)

    def state_shapes(self, units: int) -> tuple[Shape, Shape]:
        """See Recurrence."""
        channels = units * (self.shared * self.head_dim + 2 * self.state_dim)
        return (self.width - 1, channels), (units, self.state_dim, self.shared, self.head_dim)


@dataclass(frozen=True, kw_only=True)
class Mamba:
    """A Mamba mixer with norms of B, C and the step sizes (Jamba)."""

    inner: int
    """Channels."""
    state_dim: int
    rank: int
    """Of the product that gives the step sizes."""
    width: int
    """Tokens that the convolution sees."""

    @property
    def units(self) -> int:
        """See Recurrence: B, C and the step sizes depend on all channels."""
        return 1

    def inputs(self, mine: range) -> Mapping[str, Tensor]:
        """See Recurrence."""
        return {"recurrent_in": torch.arange(2 * self.inner)}

    def others(self, mine: range) -> Mapping[str, Tensor]:
        """See Recurrence."""
        sizes = {
            **dict.fromkeys(("conv", "decay", "skip", "dt"), self.inner),
            **{"select": self.rank + 2 * self.state_dim, "dt_norm": self.rank},
            **dict.fromkeys(("b_norm", "c_norm"), self.state_dim),
        }
        return {f"recurrent_{role}": torch.arange(size) for role, size in sizes.items()}

    def columns(self, mine: range) -> range:
        """See Recurrence."""
        return range(self.inner)

    def state_shapes(self, units: int) -> tuple[Shape, Shape]:
        """See Recurrence."""
        return (self.width - 1, self.inner), (self.inner, self.state_dim)


@dataclass(frozen=True, kw_only=True)
class ShortConvolution:
    """A gated convolution, whose last inputs are all of its state."""

    channels: int
    width: int
    """Tokens that the convolution sees."""

    @property
    def units(self) -> int:
        """See Recurrence."""
        return self.channels

    def inputs(self, mine: range) -> Mapping[str, Tensor]:
        """See Recurrence."""
        return {"recurrent_in": _stacked(self.units, mine, 1, 1, 1)}

    def others(self, mine: range) -> Mapping[str, Tensor]:
        """See Recurrence."""
        return {"recurrent_conv": _stacked(self.units, mine, 1)}

    def columns(self, mine: range) -> range:
        """See Recurrence."""
        return mine

    def state_shapes(self, units: int) -> tuple[Shape, Shape]:
        """See Recurrence."""
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
        """See Recurrence: the norm depends on all heads."""
        return 1

    def inputs(self, mine: range) -> Mapping[str, Tensor]:
        """See Recurrence."""
        d = self.head_dim
        return {
            "recurrent_qkv": _regrouped(range(self.heads), d, d, d),
            "recurrent_gate": torch.arange(self.heads * d),
        }

    def others(self, mine: range) -> Mapping[str, Tensor]:
        """See Recurrence."""
        return {"recurrent_norm": torch.arange(self.heads * self.head_dim)}

    def columns(self, mine: range) -> range:
        """See Recurrence."""
        return range(self.heads * self.head_dim)

    def state_shapes(self, units: int) -> tuple[Shape, Shape]:
        """See Recurrence."""
        return (0, 0), (self.heads, self.head_dim, 1, self.head_dim)


KINDS = {
    "gated_delta": GatedDelta,
    "mamba2": Mamba2,
    "mamba": Mamba,
    "short_convolution": ShortConvolution,
    "lightning": Lightning,
}
"""The kinds by the names that the family table uses."""


def _stacked(units: int, mine: range, *widths: int) -> Tensor:
    """Rows of some of `units` units in weights that are stored part by part; a part has `width` rows for each unit."""
    rows, start = [], 0
    for width in widths:
        rows.append(torch.arange(start + mine.start * width, start + mine.stop * width))
        start += units * width
    return torch.cat(rows)


def _regrouped(mine: range, *widths: int) -> Tensor:
    """The same for weights that are stored unit by unit, still in the order part by part."""
    rows = torch.arange(mine.start * sum(widths), mine.stop * sum(widths)).view(len(mine), -1)
    return torch.cat([part.flatten() for part in rows.split(widths, dim=1)])
