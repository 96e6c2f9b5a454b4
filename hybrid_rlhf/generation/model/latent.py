"""Latent attention: keys and values of all heads are products of one latent per token; only the latent is cached.

In the absorbed form, a head's projections from the latent to its key and value are applied to its query and to its
result instead. Heads then attend to latents as to one shared KV head, whose first dimensions are the rotated part.
Rotation is done here, so keys and values are the same tensor and the cache stores them once. Decoding rows use this
form. In the plain form, the keys and values of each head are expanded from the latents of a sequence, so attention
works on their smaller sizes. Chunks of prompts use it, except for short chunks after a long prefix (`Latent.expands`).

On a GPU, kernels compute the operations between the matrix products (ops/latent.py for the absorbed form,
ops/attention.py for the plain form). The torch code is their reference.

Source: DeepSeek-V2 (arXiv 2405.04434, section 2.1), the absorbed form of its appendix C.

Shapes: T tokens, n of them, B rows, H hidden, A heads of this rank, Q latent of queries, L latent, R rotated
dimensions, U other dimensions of a query, V dimensions of a value, P pages of the cache, M pages of the longest
sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_rlhf.generation.architecture.model_description import Latent
from hybrid_rlhf.generation.model.attention import ExpandedChunks, PagedLatents, Table
from hybrid_rlhf.generation.model.layers import Linear, Norm
from hybrid_rlhf.generation.ops.rows import rotated


class LatentAttention:
    """Latent attention of one layer on one rank."""

    def __init__(
        self, kind: Latent, *, down: Linear, q_norm: Norm | None, q: Linear, kv_norm: Norm, kv_up: Tensor
    ) -> None:
        """Take the weights.

        Args:
            kind: sizes.
            down: product from hidden states to query latent, latent, and shared rotated key [Q + L + R].
            q_norm: norm of the query latent; none: queries come from the hidden states, and Q is 0.
            q: product that gives queries, for each head U dimensions, then R.
            kv_norm: norm of the latent.
            kv_up: [A (U + V), L], weights from the latent to keys and values of each head.
        """
        self._kind = kind
        self._down = down
        self._q_norm = q_norm
        self._q = q
        self._kv_norm = kv_norm
        self.kv_up = kv_up.view(-1, kind.plain_dims + kind.value_dims, kind.size)
        self._key_up, self._value_up = self.kv_up.split([kind.plain_dims, kind.value_dims], dim=1)

    @property
    def products(self) -> dict[str, Linear]:
        """Products that may be packed or quantised, by name."""
        return {"latents": self._down, "q": self._q}

    def refresh(self) -> None:
        """Recompute tensors derived from weights, after the weights were updated in place."""
        for norm in (self._q_norm, self._kv_norm):
            if norm is not None:
                norm.refresh()

    def __call__(self, x: Tensor, table: Table, paged: PagedLatents) -> Tensor:
        """Write the latents of T tokens to the cache and return attention outputs [T, A V].

        Args:
            x: [T, H] hidden states.
            table: cosines and signed sines [T, 1, r] of the first r <= R dimensions; none: no rotation.
            paged: latents of the layer in the cache.
        """
        queries = self._q(self._write(x, table, paged)).view(len(x), -1, self._kind.query_dims)  # [T, A, U + R]
        parts = [(chunks.tokens, self._plain(queries, table, chunks, paged)) for chunks in paged.step.expanded]
        if paged.step.absorbed is not None:
            parts.append((paged.step.absorbed, self._absorbed(queries, table, paged.step.absorbed, paged)))
        if len(parts) == 1:
            return parts[0][1].flatten(1)
        values = x.new_empty(len(x), *parts[0][1].shape[1:])
        for tokens, part in parts:
            values[tokens] = part
        return values.flatten(1)

    def _write(self, x: Tensor, table: Table, paged: PagedLatents) -> Tensor:
        """Write latents and rotated keys [T, R + L] to the cache; returns the input of the query product, [T, Q or
        H]."""
        kind = self._kind
        down = self._down(x)
        kernels = paged.step.attention.fused
        places = paged.step.places[paged.table]
        if kernels is not None:
            norm = self._kv_norm
            weight = None if self._q_norm is None else self._q_norm.weight
            hidden: Tensor = kernels.write_latents(
                *(down, weight, norm.weight, table, places, paged.keys),
                eps=norm.eps,
                in_float32=norm.in_float32,
            )
            return x if self._q_norm is None else hidden
        hidden, latent, key = down.tensor_split([-kind.size - kind.rotated_dims, -kind.rotated_dims], dim=-1)
        key = key[:, None] if table is None else rotated(key[:, None], *table)
        shared = torch.cat([key, self._kv_norm(latent.contiguous())[:, None]], dim=-1)
        paged.keys.view(-1, *shared.shape[1:]).index_copy_(0, places, shared)
        return x if self._q_norm is None else self._q_norm(hidden.contiguous())

    def _absorbed(self, queries: Tensor, table: Table, tokens: slice | Tensor, paged: PagedLatents) -> Tensor:
        """Return values [n, A, V] of tokens in the absorbed form."""
        step = paged.step
        queries, table = _of_tokens(queries, table, tokens)
        plain, turned = queries.split([self._kind.plain_dims, self._kind.rotated_dims], dim=-1)
        latent = _by_heads(plain, self._key_up)
        if step.attention.fused is not None and step.paged is not None:
            values: Tensor = step.attention.fused.latent_attention(
                *(queries, latent, self._value_up, table, paged.keys, *step.paged.read(paged.kind, paged.table)),
                scale=step.attention.architecture.kinds[paged.kind].scale,
            )
            return values
        turned = turned if table is None else rotated(turned, *table)
        keys = paged.keys
        mixed = step.mixed(paged.kind, paged.table, torch.cat([turned, latent], dim=-1), keys, keys, None)
        mixed = mixed[..., -self._kind.size :]
        return _by_heads(mixed, self._value_up.transpose(1, 2))

    def _plain(self, queries: Tensor, table: Table, chunks: ExpandedChunks, paged: PagedLatents) -> Tensor:
        """Return values [n, A, V] of chunks in the plain form."""
        kind = self._kind
        queries, table = _of_tokens(queries, table, chunks.tokens)
        plain, turned = queries.split([kind.plain_dims, kind.rotated_dims], dim=-1)
        queries = torch.cat([turned, plain], dim=-1)
        if table is not None:
            queries = rotated(queries, *table)
        cached = paged.keys[chunks.pages[paged.table]]
        at_once = chunks.heads_at_once[paged.kind]
        key, latent = cached.flatten(0, 1).split([kind.rotated_dims, kind.size], dim=-1)
        values = queries.new_empty(*queries.shape[:2], kind.value_dims)
        for first in range(0, queries.shape[1], at_once):
            some = slice(first, first + at_once)
            key_up, value_up = self._key_up[some].transpose(1, 2), self._value_up[some].transpose(1, 2)
            shared = latent.expand(-1, len(key_up), -1)
            k, v = queries.new_empty(2, *shared.shape[:2], kind.query_dims)
            k[..., : kind.rotated_dims] = key
            _by_heads(shared, key_up, out=k[..., kind.rotated_dims :])
            _by_heads(shared, value_up, out=v[..., : kind.value_dims])
            v[..., kind.value_dims :] = 0  # attention requires keys and values of one size
            k, v = k.unflatten(0, cached.shape[:2]), v.unflatten(0, cached.shape[:2])
            attended = chunks.attend(paged.kind, 0, queries[:, some].contiguous(), k, v, None)
            values[:, some] = attended[..., : kind.value_dims]
        return values


def _of_tokens(queries: Tensor, table: Table, tokens: slice | Tensor) -> tuple[Tensor, Table]:
    return queries[tokens], table and (table[0][tokens], table[1][tokens])


def _by_heads(x: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply [T, A, K] by a matrix per head [A, K, N]; returns [T, A, N]."""
    result = x.new_empty(*x.shape[:2], weights.shape[2]) if out is None else out
    torch.bmm(x.transpose(0, 1), weights, out=result.transpose(0, 1))
    return result
