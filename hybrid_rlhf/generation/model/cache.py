"""The KV cache: pages of keys and values, and the way in which the layers of a model share them.

Layers that attend to the same number of tokens form a layer group. Each sequence has a list of blocks for each group
(blocks.py), so layers with a sliding window release blocks that other layers still need. All groups take pages from one
pool. A page stores `BLOCK_TOKENS` tokens of `places_per_page` places, where a place has room for the keys or values of
the widest layer; narrower layers share a place, side by side for each token. `places_per_page` is the greatest common
divisor of the numbers of places in the groups. A model with identical layers has one group, and one page per block.

The cache may also record the routes of its tokens: the experts that each router chose. They are stored with the first
page of a token's block in the first layer group, so sharing, copying or reusing keys and values includes their routes.
That group then keeps all its blocks; it is the one with the largest window, usually unlimited.

Shapes: P pages, C dimensions of a place, K KV heads of this rank, D head size, E mixtures of experts, k experts per
token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from hybrid_rlhf.generation.architecture.model_description import ModelDescription, Split
from hybrid_rlhf.generation.transfers import to_device

BLOCK_TOKENS = 16
"""Tokens per block. On average, half of a sequence's last block is unused."""


def blocks_of(tokens: int) -> int:
    """Number of blocks that store `tokens` tokens."""
    return -(-tokens // BLOCK_TOKENS)


@dataclass(frozen=True)
class RouteSize:
    """Shape and dtype of the routes of a token, [mixtures, per_token]."""

    mixtures: int
    """Number of layers with a mixture of experts."""
    per_token: int
    """Number of experts per token."""
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the routes of a token."""
        return self.mixtures * self.per_token * self.dtype.itemsize


@dataclass(frozen=True)
class LayerPlace:
    """Location of the keys and values of a layer in the cache."""

    table: int
    """Index of the page table of a sequence."""
    place: int
    """Index of the place in a page; layers may share a place."""
    start: int
    """First dimension of the layer in the place."""
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """Assignment of layers to layer groups and pages."""

    windows: tuple[int | None, ...] = (None,)
    """For each layer group, the number of tokens that are kept, mostly its attention window; none: all."""
    pages: tuple[int, ...] = (1,)
    """For each layer group, the number of pages of a block."""
    places_per_page: int = 1
    width: int
    """Number of dimensions of a token in a place."""
    places: tuple[LayerPlace | None, ...] = ()
    """For each layer, the place of its keys and values; none: it has no attention."""
    stores: int = 2
    """Number of stores: 2 for keys and values, 1 if they are the same (latent attention)."""
    routes: RouteSize | None = None
    """Size of the recorded routes; none: routes are not recorded."""

    @classmethod
    def of(
        cls, architecture: ModelDescription, split: Split, capacity_tokens: int, *, records_routes: bool = False
    ) -> CacheLayout:
        """Return the layout for sequences of at most `capacity_tokens` tokens; larger windows count as unlimited."""

        def window(layer: int) -> int | None:
            size = architecture.kinds[architecture.attention_of(layer)].window
            return None if size is None or size >= capacity_tokens else size

        cached = architecture.cached_layers
        routes = _route_size(architecture) if records_routes else None
        packed = cls.of_layers(
            [window(layer) for layer in cached],
            [_kv_size(architecture, split, layer) for layer in cached],
            stores=_stores(architecture),
            routes=routes,
        )
        place_of = dict(zip(cached, packed.places, strict=True))
        places = tuple(place_of.get(architecture.kv_sources.get(layer, layer)) for layer in range(architecture.layers))
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
        """Return the layout for cached layers, given the window and the (KV heads, head size) of each."""
        groups = sorted(set(windows), key=lambda size: math.inf if size is None else size, reverse=True)
        width = max((math.prod(size) for size in sizes), default=0)
        used = [list[int]() for _ in groups]
        first = list[tuple[int, int, int]]()
        for window, size in zip(windows, sizes, strict=True):
            group = groups.index(window)
            first.append((group, *_first_fit(used[group], math.prod(size), width)))
        together = math.gcd(*map(len, used)) or 1
        pages = [len(filled) // together for filled in used]
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
        """Return the layout for sequences that are computed once as a whole. Layers overwrite each other's pages,
        except those whose keys later layers read."""
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
        """Number of page tables of a sequence: pages per block, summed over layer groups."""
        return sum(self.pages)

    def pages_of(self, tokens: int, *, computed_together: int = 1) -> int:
        """Maximum number of pages of a sequence at one time, if it is computed in chunks of `computed_together`
        tokens."""
        blocks = blocks_of(tokens)
        most = [
            blocks if window is None else min(blocks, blocks_of(window + computed_together) + 1)
            for window in self.windows
        ]
        return sum(count * per_block for count, per_block in zip(most, self.pages, strict=True))


class KVCache:
    """Keys and values [places_per_page, P, BLOCK_TOKENS, C]."""

    def __init__(self, layout: CacheLayout, *, pages: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        shape = (layout.places_per_page, pages, BLOCK_TOKENS, layout.width)
        # Zeros instead of uninitialised memory, since 0 times NaN is NaN.
        self.keys = _zeros(shape, dtype, device)
        self.values = _zeros(shape, dtype, device) if layout.stores == 2 else self.keys
        # Created once: creating the views of each layer in each step takes 1% of the time with a small model.
        self._layers = [None if location is None else self._view(location) for location in layout.places]
        self.routes: torch.Tensor | None = None
        """[P, BLOCK_TOKENS, E, k] expert indices, for the pages of the first page table; -1 where no token was
        computed."""
        if (size := layout.routes) is not None:
            route_shape = (pages, BLOCK_TOKENS, size.mixtures, size.per_token)
            self.routes = torch.full(route_shape, -1, dtype=size.dtype, device=device)

    @property
    def bytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes * self.layout.stores

    @property
    def pages(self) -> int:
        """Number of pages."""
        return self.keys.shape[1]

    def of_layer(self, layer: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Return the index of a layer's page table, and its keys and values [P, BLOCK_TOKENS, K, D].

        The heads of a token are contiguous.
        """
        view = self._layers[layer]
        assert view is not None
        return view

    def _view(self, location: LayerPlace) -> tuple[int, torch.Tensor, torch.Tensor]:
        part = slice(location.start, location.start + location.kv_heads * location.head_dim)
        keys, values = (
            store[location.place, :, :, part].unflatten(-1, (location.kv_heads, location.head_dim))
            for store in (self.keys, self.values)
        )
        return location.table, keys, values

    def write_routes(self, places: torch.Tensor, routes: Sequence[torch.Tensor]) -> None:
        """Write the routes [T, k] of each mixture for tokens at indices `places` [T] of [P * BLOCK_TOKENS]."""
        assert self.routes is not None
        self.routes.flatten(0, 1).index_copy_(0, places, torch.stack(list(routes), dim=1))

    def routes_of(self, pages: torch.Tensor, tokens: int) -> torch.Tensor:
        """Return a copy [tokens, E, k] of the routes of a sequence, given its pages [M] in the first page table."""
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
        """Return a larger cache with the content of this one."""
        larger = KVCache(self.layout, pages=pages, dtype=self.keys.dtype, device=self.keys.device)
        larger.keys[:, : self.pages] = self.keys
        larger.values[:, : self.pages] = self.values
        if self.routes is not None and larger.routes is not None:
            larger.routes[: self.pages] = self.routes
        return larger


def page_bytes(layout: CacheLayout, dtype: torch.dtype) -> int:
    """Bytes of a page."""
    routes = 0 if layout.routes is None else layout.routes.nbytes
    return BLOCK_TOKENS * (layout.stores * layout.places_per_page * layout.width * dtype.itemsize + routes)


def token_bytes(architecture: ModelDescription, split: Split, dtype: torch.dtype, *, layer: int) -> int:
    """Bytes of the keys and values of one token that a layer reads on a rank."""
    return _stores(architecture) * math.prod(_kv_size(architecture, split, layer)) * dtype.itemsize


def _kv_size(architecture: ModelDescription, split: Split, layer: int) -> tuple[int, int]:
    """Return the number of KV heads of a layer on a rank, and the head size."""
    kind = architecture.attention_of(layer)
    return len(split.kv_heads_of[kind]), architecture.kv_size(kind)[1]


def _first_fit(used: list[int], width: int, most: int) -> tuple[int, int]:
    """Return the first place with room for a layer, and the layer's first dimension there; updates `used`."""
    place = next((place for place, taken in enumerate(used) if taken + width <= most), len(used))
    if place == len(used):
        used.append(0)
    used[place] += width
    return place, used[place] - width


def _route_size(architecture: ModelDescription) -> RouteSize | None:
    kind = architecture.experts
    mixtures = len(architecture.expert_layers)
    return RouteSize(mixtures, kind.per_token, kind.index_dtype) if kind is not None and mixtures else None


def _stores(architecture: ModelDescription) -> int:
    return 2 if architecture.latent is None else 1


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros. On a CPU, the system maps the memory when it is first written, so unused parts of a cache cost
    nothing."""
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(*shape)
