"""Latent attention: keys and values of all heads are products of one latent per token, which alone is cached.

The products with which a head's key and value come from the latent are applied to its query and to its result instead,
so heads attend to latents as to one shared KV head, the rotated part in front. Rotation is done here, so keys and
values are the same tensor and the cache stores them once.

On a GPU kernels compute what is between the products (kernels/latent.py); what torch computes is their reference.

Source: DeepSeek-V2 (arXiv 2405.04434, section 2.1), the absorbed form of its appendix C.

Shapes: T tokens, B rows, H hidden, A heads of this rank, Q latent of queries, L latent, R rotated dimensions, U other
dimensions of a query, V dimensions of a value, P pages of the cache, M pages of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from hybrid_rlhf.generation.model.layers import Norm, rotate
from hybrid_rlhf.generation.model.quantised import Linear
from hybrid_rlhf.generation.weights.description import Latent


@dataclass(frozen=True)
class PagedLatents:
    """The latents of a layer in the cache, and what a step writes and reads there by kernels."""

    kernels: ModuleType
    scale: float
    """Scores are multiplied by it."""
    keys: Tensor
    """[P, BLOCK_TOKENS, 1, R + L]."""
    places: Tensor
    """[T] where the new tokens lie in P * BLOCK_TOKENS."""
    pages: Tensor
    """[sequences, M] int32."""
    positions: Tensor
    """[B] of the rows' new tokens."""
    tiles: Tensor | None
    """Of the chunks of prompts; none: there are only rows."""


class LatentAttention:
    """Queries, latents and values of one layer on one rank."""

    def __init__(
        self, kind: Latent, *, down: Linear, q_norm: Norm | None, q: Linear, kv_norm: Norm, kv_up: Tensor
    ) -> None:
        """Take the weights.

        Args:
            kind: sizes.
            down: to the latent of queries, latent, and shared rotated key [Q + L + R].
            q_norm: of the latent of queries; none: they come from the hidden states, and Q is 0.
            q: to queries, of each head U dimensions, then R.
            kv_norm: of the latent.
            kv_up: [A (U + V), L], from the latent to keys and values of each head.
        """
        self._kind, self._down, self._q_norm, self._q, self._kv_norm = kind, down, q_norm, q, kv_norm
        self.kv_up = kv_up.view(-1, kind.plain_dims + kind.value_dims, kind.size)
        self._key_up, self._value_up = self.kv_up.split([kind.plain_dims, kind.value_dims], dim=1)

    @property
    def products(self) -> dict[str, Linear]:
        """Its products with packed or quantised weights."""
        return {"latents": self._down, "q": self._q}

    def refresh(self) -> None:
        """Recompute what is derived from weights, after these were updated in place."""
        for norm in (self._q_norm, self._kv_norm):
            if norm is not None:
                norm.refresh()

    def __call__(
        self,
        x: Tensor,
        table: tuple[Tensor, Tensor] | None,
        attend: Callable[[Tensor], Tensor],
        paged: PagedLatents | None,
    ) -> Tensor:
        """[T, A V] of hidden states [T, H].

        Args:
            x: hidden states.
            table: cosines and signed sines [T, 1, .] of the first of R dimensions; none: no rotation.
            attend: the attention of [T, A + 2, R + L] over the cache.
            paged: what kernels read and write instead; none: there are none.
        """
        values = self._by_torch(x, table, attend) if paged is None else self._by_kernels(x, table, paged)
        return values.flatten(1)

    def _by_torch(self, x: Tensor, table: tuple[Tensor, Tensor] | None, attend: Callable[[Tensor], Tensor]) -> Tensor:
        kind, down = self._kind, self._down(x)
        hidden, latent, key = down.tensor_split([-kind.size - kind.rotated_dims, -kind.rotated_dims], dim=-1)
        queries = self._queries(x if self._q_norm is None else self._q_norm(hidden.contiguous()))
        turned, key = queries[..., kind.plain_dims :], key[:, None]
        if table is not None:
            turned, key = rotate(turned, *table), rotate(key, *table)
        shared = torch.cat([key, self._kv_norm(latent.contiguous())[:, None]], dim=-1)
        given = torch.cat([torch.cat([turned, self._absorbed(queries)], dim=-1), shared, shared], dim=1)
        return _by_heads(attend(given)[..., -kind.size :], self._value_up.transpose(1, 2))

    def _by_kernels(self, x: Tensor, table: tuple[Tensor, Tensor] | None, paged: PagedLatents) -> Tensor:
        hidden = self._kv_norm.write_latents(self._down(x), self._q_norm, table, paged.places, paged.keys)
        queries = self._queries(x if self._q_norm is None else hidden)
        values: Tensor = paged.kernels.latent_attention(
            *(queries, self._absorbed(queries), self._value_up, table),
            *(paged.keys, paged.pages, paged.positions, paged.tiles),
            scale=paged.scale,
        )
        return values

    def _queries(self, hidden: Tensor) -> Tensor:
        """[T, A, U + R], not rotated."""
        return self._q(hidden).view(len(hidden), -1, self._kind.plain_dims + self._kind.rotated_dims)

    def _absorbed(self, queries: Tensor) -> Tensor:
        """[T, A, L], what the dimensions of queries that are not rotated are to latents."""
        return _by_heads(queries[..., : self._kind.plain_dims], self._key_up)


def _by_heads(x: Tensor, weights: Tensor) -> Tensor:
    """[T, A, N] of [T, A, K] and a matrix of each head [A, K, N]."""
    result = x.new_empty(*x.shape[:2], weights.shape[2])
    torch.bmm(x.transpose(0, 1), weights, out=result.transpose(0, 1))
    return result
