"""The KV cache: pages of keys and values, and how the layers of a model share them.

Layers that attend to the same number of tokens form a layer group. Each sequence has a list of blocks for each group
(blocks.py), so layers with a sliding window release the blocks that they no longer need while others keep theirs. All
groups take pages from one pool: a page holds `BLOCK_TOKENS` tokens of `layers_per_page` layers, the greatest common
divisor of the sizes of the groups. A model whose layers are alike has one group, and one page per block.

The cache may also record the routes of its tokens: the experts that each router chose. They are at the token's place in
the first page of its block in the first layer group, so whatever shares, copies or finds keys and values has the routes
that these were computed with. That group then keeps all its blocks: it has the largest window, mostly none.

Shapes: P pages, K KV heads of this rank, D head size, E mixtures of experts, k experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybrid_rlhf.generation.weights.description import ModelDescription

BLOCK_TOKENS = 16
"""Tokens of a block. On average half of a sequence's last block is unused."""


def blocks_of(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK_TOKENS)


@dataclass(frozen=True)
class RouteSize:
    """The routes of a token: [mixtures, per_token]."""

    mixtures: int
    """Layers with a mixture of experts."""
    per_token: int
    """Experts."""
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of a token's routes."""
        return self.mixtures * self.per_token * self.dtype.itemsize


@dataclass(frozen=True)
class CacheLayout:
    """Which layers share pages."""

    windows: tuple[int | None, ...]
    """For each layer group, the tokens that its queries attend to, or that are kept for other reasons; none: all."""
    pages: tuple[int, ...]
    """For each layer group, the pages of a block."""
    layers_per_page: int
    places: tuple[tuple[int, int] | None, ...]
    """For each layer, its page table, and its place in a page, which layers may share; none: it has no attention."""
    stores: int = 2
    """Keys and values; 1 where they are the same (latent attention)."""
    routes: RouteSize | None = None
    """Of the routes that are recorded; none: none are."""

    @classmethod
    def of(cls, architecture: ModelDescription, capacity_tokens: int, *, records_routes: bool = False) -> CacheLayout:
        """The layout for sequences of at most `capacity_tokens`; a window of that size or above is none."""

        def window(kind: int) -> int | None:
            own = architecture.kinds[kind].window
            return None if own is None or own >= capacity_tokens else own

        each = [window(architecture.attention_of(layer)) for layer in architecture.cached_layers]
        windows = sorted(set(each), key=lambda size: math.inf if size is None else size, reverse=True)
        counts = [each.count(one) for one in windows]
        together = math.gcd(*counts)
        pages = [count // together for count in counts]
        seen = [0] * len(windows)
        places = list[tuple[int, int] | None]()
        for layer, kind in enumerate(architecture.layer_kinds):
            source = architecture.kv_sources.get(layer)
            if kind is None or source is not None:
                places.append(None if source is None else places[source])
                continue
            group = windows.index(window(kind))
            places.append((sum(pages[:group]) + seen[group] // together, seen[group] % together))
            seen[group] += 1
        routes = _route_size(architecture) if records_routes else None
        if routes is not None:
            windows[0] = None
        return cls(tuple(windows), tuple(pages), together, tuple(places), _stores(architecture), routes)

    @classmethod
    def of_one_pass(cls, architecture: ModelDescription) -> CacheLayout:
        """The layout for sequences that pass through the layers once, as a whole: layers write to the same pages one
        after the other, except those whose keys later layers read."""
        sources = sorted({*architecture.kv_sources.values()})
        places: list[tuple[int, int] | None] = []
        for layer, kind in enumerate(architecture.layer_kinds):
            source = architecture.kv_sources.get(layer, layer)
            places.append(None if kind is None else (0, 1 + sources.index(source) if source in sources else 0))
        return cls((None,), (1,), 1 + len(sources), tuple(places), _stores(architecture))

    @property
    def tables(self) -> int:
        """Page tables of a sequence: pages of its blocks in all layer groups."""
        return sum(self.pages)

    def pages_of(self, tokens: int, *, computed_together: int = 1) -> int:
        """Most pages that a sequence holds at once when it is computed in chunks of `computed_together` tokens."""
        blocks = blocks_of(tokens)
        most = [
            blocks if window is None else min(blocks, blocks_of(window + computed_together) + 1)
            for window in self.windows
        ]
        return sum(count * own for count, own in zip(most, self.pages, strict=True))


class KVCache:
    """Keys and values [layers_per_page, P, BLOCK_TOKENS, K, D]."""

    def __init__(
        self,
        layout: CacheLayout,
        *,
        pages: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layout = layout
        shape = (layout.layers_per_page, pages, BLOCK_TOKENS, kv_heads, head_dim)
        # Zeros, not uninitialised memory: an attention weight of 0 times NaN is NaN.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys) if layout.stores == 2 else self.keys
        self.routes: torch.Tensor | None = None
        """[P, BLOCK_TOKENS, E, k], of the pages of the first page table; -1 where no token was computed."""
        if (size := layout.routes) is not None:
            route_shape = (pages, BLOCK_TOKENS, size.mixtures, size.per_token)
            self.routes = torch.full(route_shape, -1, dtype=size.dtype, device=device)

    @property
    def pages(self) -> int:
        """Number of pages."""
        return self.keys.shape[1]

    def of_layer(self, layer: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        """The page table of a layer, and its keys and values [P, BLOCK_TOKENS, K, D]."""
        both = self.layout.places[layer]
        assert both is not None
        table, place = both
        return table, self.keys[place], self.values[place]

    def write_routes(self, places: torch.Tensor, routes: Sequence[torch.Tensor]) -> None:
        """Write the routes [T, k] of each mixture for tokens at places [T] of [P * BLOCK_TOKENS]."""
        assert self.routes is not None
        self.routes.flatten(0, 1).index_copy_(0, places, torch.stack(list(routes), dim=1))

    def routes_of(self, pages: torch.Tensor, tokens: int) -> torch.Tensor:
        """A copy [tokens, E, k] of the routes of a sequence, the pages [M] of which are those of the first table."""
        assert self.routes is not None
        return self.routes[pages[: blocks_of(tokens)].long()].flatten(0, 1)[:tokens]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages, given as (source, target)."""
        if not pairs:
            return
        sources, targets = torch.tensor(pairs, device=self.keys.device).unbind(dim=1)
        for store in (self.keys, self.values)[: self.layout.stores]:
            store[:, targets] = store[:, sources]
        if self.routes is not None:
            self.routes[targets] = self.routes[sources]

    def grown(self, pages: int) -> KVCache:
        """A cache of more pages with the content of this one."""
        _, _, _, kv_heads, head_dim = self.keys.shape
        larger = KVCache(
            self.layout,
            pages=pages,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=self.keys.dtype,
            device=self.keys.device,
        )
        larger.keys[:, : self.pages], larger.values[:, : self.pages] = self.keys, self.values
        if self.routes is not None and larger.routes is not None:
            larger.routes[: self.pages] = self.routes
        return larger


def page_bytes(layout: CacheLayout, *, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of a page."""
    routes = 0 if layout.routes is None else layout.routes.nbytes
    return BLOCK_TOKENS * (layout.stores * layout.layers_per_page * kv_heads * head_dim * dtype.itemsize + routes)


def bytes_per_token(architecture: ModelDescription, kv_heads: int, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values on a rank with so many KV heads."""
    return _stores(architecture) * len(architecture.cached_layers) * kv_heads * architecture.head_dim * dtype.itemsize


def _route_size(architecture: ModelDescription) -> RouteSize | None:
    kind, mixtures = architecture.experts, len(architecture.expert_layers)
    return RouteSize(mixtures, kind.per_token, kind.index_dtype) if kind is not None and mixtures else None


def _stores(architecture: ModelDescription) -> int:
    return 2 if architecture.latent is None else 1
