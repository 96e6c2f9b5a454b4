"""The KV cache: pages of keys and values, and how the layers of a model share them.

Layers that attend to the same number of tokens form a layer group. Each sequence has a list of blocks for each group
(blocks.py), so layers with a sliding window release the blocks that they no longer need while others keep theirs. All
groups take pages from one pool: a page holds `BLOCK_TOKENS` tokens of `places_per_page` places, the greatest common
divisor of the numbers of places in the groups. A place has room for the widest layer; narrower layers share one, side
by side for each token. A model whose layers are alike has one group, and one page per block.

The cache may also record the routes of its tokens: the experts that each router chose. They are at the token's place in
the first page of its block in the first layer group, so whatever shares, copies or finds keys and values has the routes
that these were computed with. That group then keeps all its blocks: it has the largest window, mostly none.

Shapes: P pages, C dimensions of a place, K KV heads of this rank, D head size, E mixtures of experts, k experts per
token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from hybrid_rlhf.generation.architecture.model_description import ModelDescription
from hybrid_rlhf.generation.architecture.split import Split
from hybrid_rlhf.generation.transfers import to_device

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
class LayerPlace:
    """Where the keys and values of a layer are."""

    table: int
    """Of the pages of a sequence."""
    place: int
    """In a page; layers may share it."""
    start: int
    """Dimension of the place that is the layer's first."""
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """Which layers share pages."""

    windows: tuple[int | None, ...] = (None,)
    """For each layer group, the tokens that its queries attend to, or that are kept for other reasons; none: all."""
    pages: tuple[int, ...] = (1,)
    """For each layer group, the pages of a block."""
    places_per_page: int = 1
    width: int
    """Dimensions of a token in a place."""
    places: tuple[LayerPlace | None, ...] = ()
    """Of each layer; none: it has no attention."""
    stores: int = 2
    """Keys and values; 1 where they are the same (latent attention)."""
    routes: RouteSize | None = None
    """Of the routes that are recorded; none: none are."""

    @classmethod
    def of(
        cls, architecture: ModelDescription, split: Split, capacity_tokens: int, *, records_routes: bool = False
    ) -> CacheLayout:
        """The layout for sequences of at most `capacity_tokens`; a window of that size or above is none."""

        def window(layer: int) -> int | None:
            own = architecture.kinds[architecture.attention_of(layer)].window
            return None if own is None or own >= capacity_tokens else own

        cached = architecture.cached_layers
        routes = _route_size(architecture) if records_routes else None
        packed = cls.of_layers(
            [window(layer) for layer in cached],
            [_kv_size(architecture, split, layer) for layer in cached],
            stores=_stores(architecture),
            routes=routes,
        )
        own = dict(zip(cached, packed.places, strict=True))
        places = tuple(own.get(architecture.kv_sources.get(layer, layer)) for layer in range(architecture.layers))
        return replace(packed, places=places)

    @classmethod
    def of_layers(
        cls,
        windows: Sequence[int | None],
        sizes: Sequence[tuple[int, int]],
        *,
        stores: int,
        routes: RouteSize | None = None,
    ) -> CacheLayout:
        """The layout of layers with keys of their own: the window, the KV heads and the head size of each."""
        groups = sorted(set(windows), key=lambda size: math.inf if size is None else size, reverse=True)
        width, used = max((math.prod(size) for size in sizes), default=0), [list[int]() for _ in groups]
        first = list[tuple[int, int, int]]()
        for window, size in zip(windows, sizes, strict=True):
            group = groups.index(window)
            first.append((group, *_first_fit(used[group], math.prod(size), width)))
        together = math.gcd(*map(len, used)) or 1
        pages = [len(own) // together for own in used]
        places = tuple(
            LayerPlace(sum(pages[:group]) + place // together, place % together, start, *size)
            for (group, place, start), size in zip(first, sizes, strict=True)
        )
        if routes is not None:
            groups[0] = None
        return cls(
            windows=tuple(groups),
            pages=tuple(pages),
            places_per_page=together,
            width=width,
            places=places,
            stores=stores,
            routes=routes,
        )

    @classmethod
    def of_one_pass(cls, architecture: ModelDescription, split: Split) -> CacheLayout:
        """The layout for sequences that pass through the layers once, as a whole: layers write to the same pages one
        after the other, except those whose keys later layers read."""
        sources = sorted({*architecture.kv_sources.values()})
        places: list[LayerPlace | None] = []
        for layer, kind in enumerate(architecture.layer_kinds):
            source = architecture.kv_sources.get(layer, layer)
            place = 1 + sources.index(source) if source in sources else 0
            size = (0, 0) if kind is None else _kv_size(architecture, split, source)
            places.append(None if kind is None else LayerPlace(0, place, 0, *size))
        width = max((place.kv_heads * place.head_dim for place in places if place is not None), default=0)
        return cls(places_per_page=1 + len(sources), width=width, places=tuple(places), stores=_stores(architecture))

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
    """Keys and values [places_per_page, P, BLOCK_TOKENS, C]."""

    def __init__(self, layout: CacheLayout, *, pages: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        shape = (layout.places_per_page, pages, BLOCK_TOKENS, layout.width)
        # Zeros, not uninitialised memory: an attention weight of 0 times NaN is NaN.
        self.keys = _zeros(shape, dtype, device)
        self.values = _zeros(shape, dtype, device) if layout.stores == 2 else self.keys
        # made once: views for each layer of each step would take 1% of a step of a small model
        self._layers = [None if own is None else self._view(own) for own in layout.places]
        self.routes: torch.Tensor | None = None
        """[P, BLOCK_TOKENS, E, k], of the pages of the first page table; -1 where no token was computed."""
        if (size := layout.routes) is not None:
            route_shape = (pages, BLOCK_TOKENS, size.mixtures, size.per_token)
            self.routes = torch.full(route_shape, -1, dtype=size.dtype, device=device)

    @property
    def bytes(self) -> int:
        """Of keys and values."""
        return self.keys.nbytes * self.layout.stores

    @property
    def pages(self) -> int:
        """Number of pages."""
        return self.keys.shape[1]

    def of_layer(self, layer: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        """The page table of a layer, and its keys and values [P, BLOCK_TOKENS, K, D]; a token's are contiguous."""
        found = self._layers[layer]
        assert found is not None
        return found

    def _view(self, own: LayerPlace) -> tuple[int, torch.Tensor, torch.Tensor]:
        part = slice(own.start, own.start + own.kv_heads * own.head_dim)
        keys, values = (
            store[own.place, :, :, part].unflatten(-1, (own.kv_heads, own.head_dim))
            for store in (self.keys, self.values)
        )
        return own.table, keys, values

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
        sources, targets = to_device(pairs, self.keys.device).unbind(dim=1)
        for store in (self.keys, self.values)[: self.layout.stores]:
            store[:, targets] = store[:, sources]
        if self.routes is not None:
            self.routes[targets] = self.routes[sources]

    def grown(self, pages: int) -> KVCache:
        """A cache of more pages with the content of this one."""
        larger = KVCache(self.layout, pages=pages, dtype=self.keys.dtype, device=self.keys.device)
        larger.keys[:, : self.pages], larger.values[:, : self.pages] = self.keys, self.values
        if self.routes is not None and larger.routes is not None:
            larger.routes[: self.pages] = self.routes
        return larger


def page_bytes(layout: CacheLayout, dtype: torch.dtype) -> int:
    """Bytes of a page."""
    routes = 0 if layout.routes is None else layout.routes.nbytes
    return BLOCK_TOKENS * (layout.stores * layout.places_per_page * layout.width * dtype.itemsize + routes)


def bytes_per_token(architecture: ModelDescription, split: Split, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values on a rank."""
    widths = [math.prod(_kv_size(architecture, split, layer)) for layer in architecture.cached_layers]
    return _stores(architecture) * sum(widths) * dtype.itemsize


def _kv_size(architecture: ModelDescription, split: Split, layer: int) -> tuple[int, int]:
    """KV heads of a layer on a rank, and dimensions of each."""
    kind = architecture.attention_of(layer)
    return len(split.kv_heads_of[kind]), architecture.kv_size(kind)[1]


def _first_fit(used: list[int], width: int, most: int) -> tuple[int, int]:
    """The first place with room for a layer, and its first dimension there; `used` dimensions of each place grow."""
    place = next((place for place, taken in enumerate(used) if taken + width <= most), len(used))
    if place == len(used):
        used.append(0)
    used[place] += width
    return place, used[place] - width


def _route_size(architecture: ModelDescription) -> RouteSize | None:
    kind, mixtures = architecture.experts, len(architecture.expert_layers)
    return RouteSize(mixtures, kind.per_token, kind.index_dtype) if kind is not None and mixtures else None


def _stores(architecture: ModelDescription) -> int:
    return 2 if architecture.latent is None else 1


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU in memory that the system maps when it is written: most of a large cache may never be."""
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(*shape)
