"""Attention of new tokens over the KV cache: for a prefill of many prompts, and for one token per live row.

Both first rotate queries and keys and write the new keys and values to the cache. Decoding treats the query heads that
share a KV head as one matrix, so that keys are read once for all of them. A prefill is one call of a varlen kernel if
there is one (models/varlen.py), else one call per length.

Shapes: T tokens, B rows, A heads and K KV heads of this rank, G = A / K, D head size, R rotated dimensions, L new
tokens, S tokens in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from hybrid_rlhf.generation.batching.cache import KVCache
from hybrid_rlhf.generation.model.layers import rotate
from hybrid_rlhf.generation.weights.description import ModelDescription
from hybrid_rlhf.generation.weights.split import Split
from hybrid_rlhf.models.varlen import boundaries, varlen_attention

Table = tuple[Tensor, Tensor] | None
"""Cosines and signed sines [T, 1, R] of the new tokens; none: the model has no rotary positions."""


class AttentionFunction(Protocol):
    """Attention of one layer over the cache."""

    def __call__(self, layer: int, qkv: Tensor, table: Table) -> Tensor:
        """[T, A, D] of queries, keys and values [T, A + 2 K, D]; keys and values are written to the cache first."""


@dataclass(frozen=True)
class Span:
    """Slots whose prefill has the same start and length; the tokens are ordered by slot."""

    slots: Sequence[int]
    start: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens of all slots."""
        return len(self.slots) * self.length


class Attention:
    """What prefill and decoding share: attention scores of the architecture, and the cache."""

    def __init__(
        self, architecture: ModelDescription, split: Split, cache: KVCache, kernels: ModuleType | None = None
    ) -> None:
        """Args: the model, this rank's part of it, the cache, and the module of Triton kernels if decoding uses it."""
        self._architecture, self._cache, self._kernels = architecture, cache, kernels
        device = cache.keys.device
        self._kv_heads, self._group = len(split.kv_heads), len(split.heads) // len(split.kv_heads)
        self._dtype = cache.keys.dtype
        self.alibi = None
        """[A, S] float32, what ALiBi adds to the scores of each key."""
        if architecture.alibi is not None:
            slopes = architecture.alibi[split.heads.start : split.heads.stop, None]
            slopes = slopes.bfloat16() if architecture.alibi_bfloat16 else slopes
            places = torch.arange(cache.capacity_tokens)
            self.alibi = ((slopes * places).float() * architecture.alibi_scale).to(self._dtype).float().to(device)

        self.varlen = None
        """Varlen kernel of a prefill; none where there is none, or the model caps or biases scores."""
        if self.alibi is None and architecture.attention_softcap is None:
            self.varlen = varlen_attention(device, self._dtype, architecture.head_dim)

    def prefill(self, spans: Sequence[Span]) -> AttentionFunction:
        """Attention of the tokens of spans, one span after the other."""
        return PrefillAttention(self, spans) if self.varlen is None else VarlenPrefill(self, spans)

    def decode(self, positions: Tensor, *, shortest: int, longest: int) -> AttentionFunction:
        """Attention of one token in each of the first slots.

        Args:
            positions: [B] of the new tokens; row i writes into slot i.
            shortest: tokens of the shortest row, the new one included; the kernels read lengths on the device instead.
            longest: tokens of the longest row; likewise.
        """
        if self._kernels is not None:
            return KernelAttention(self, self._kernels, positions)
        return DecodeAttention(self, positions, shortest, longest)

    def rotated(self, qkv: Tensor, table: Table) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, A, D], keys and values [T, K, D]."""
        heads = self._kv_heads * self._group
        qk, v = qkv[:, : heads + self._kv_heads], qkv[:, heads + self._kv_heads :]
        if table is not None:
            qk = rotate(qk, *table)
        return qk[:, :heads], qk[:, heads:], v

    def sees_all_before(self, kind: int, start: int, end: int) -> bool:
        """Whether a causal mask is enough for queries at positions start to end - 1 and keys 0 to end - 1."""
        window = self._architecture.kinds[kind].window
        return self.alibi is None and start == 0 and (window is None or window >= end)

    def bias(self, kind: int, queries: Tensor, keys: int) -> Tensor:
        """Bias of scores [..., A or 1, S] for queries at positions [...]; -inf where a key is masked."""
        place = torch.arange(keys, device=queries.device)
        distance = queries[..., None] - place
        seen = distance >= 0
        window = self._architecture.kinds[kind].window
        if window is not None and keys > window:
            seen &= distance < window
        bias = torch.zeros((), dtype=self._dtype, device=queries.device).expand(seen.shape).unsqueeze(-2)
        if self.alibi is not None:
            bias = self.alibi[:, :keys].to(self._dtype)
            bias = bias.expand(*queries.shape, *bias.shape)
        return bias.masked_fill(~seen.unsqueeze(-2), -torch.inf)

    def mix(self, kind: int, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, causal: bool) -> Tensor:
        """Attention [n, A, L, D] of q [n, A, L, D] over k, v [n, K, S, D]; bias [n or 1, A or 1, L, S]."""
        if self._architecture.attention_softcap is None:
            return functional.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=bias,
                is_causal=causal,
                scale=self._architecture.kinds[kind].scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        n, heads, length, d = q.shape
        rows = q.reshape(n * k.shape[1], -1, d)  # group the queries of each KV head
        bias = None if bias is None else bias.expand(n, heads, length, -1).reshape(len(rows), rows.shape[1], -1)
        return self.mix_rows(kind, rows, k.flatten(0, 1), v.flatten(0, 1), bias).view(n, heads, length, d)

    def mix_rows(self, kind: int, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        """The same with two matrix products, [n, G, D] of q [n, G, D] over k, v [n, S, D]; bias [n, G or 1, S].

        On a CPU this takes half the time of torch's flash attention for small G, as in decoding.
        """
        scale, cap = self._architecture.kinds[kind].scale, self._architecture.attention_softcap
        scores = torch.bmm(q, k.transpose(1, 2)).float().mul_(scale)
        if cap is not None:
            scores.div_(cap).tanh_().mul_(cap)
        if bias is not None:
            scores += bias
        return torch.bmm(scores.softmax(dim=-1).to(v.dtype), v)


class PrefillAttention:
    """Prefill of prompts or chunks of them, one attention call per span."""

    def __init__(self, attention: Attention, spans: Sequence[Span]) -> None:
        self._attention, self._spans = attention, spans
        device = attention._cache.keys.device
        self._slots = [torch.tensor(span.slots, device=device) for span in spans]
        kinds = range(len(attention._architecture.kinds))
        self._biases = [[self._make_bias(span, kind) for kind in kinds] for span in spans]

    def __call__(self, layer: int, qkv: Tensor, table: Table) -> Tensor:
        """See AttentionFunction."""
        attention, cache = self._attention, self._attention._cache
        kind = attention._architecture.layer_kinds[layer]
        q, k, v = attention.rotated(qkv, table)
        mixed, offset = torch.empty_like(q), 0
        for span, slots, biases in zip(self._spans, self._slots, self._biases, strict=True):
            part, end = slice(offset, offset + span.tokens), span.start + span.length
            offset += span.tokens
            rows, new_keys, new_values = (
                x[part].unflatten(0, (len(span.slots), span.length)).transpose(1, 2) for x in (q, k, v)
            )
            cache.keys[layer, slots, :, span.start : end] = new_keys
            cache.values[layer, slots, :, span.start : end] = new_values
            if span.start:
                new_keys, new_values = cache.keys[layer, slots, :, :end], cache.values[layer, slots, :, :end]
            out = attention.mix(kind, rows, new_keys, new_values, biases[kind], causal=biases[kind] is None)
            mixed[part] = out.transpose(1, 2).flatten(0, 1)
        return mixed

    def _make_bias(self, span: Span, kind: int) -> Tensor | None:
        """[1, A or 1, L, S]; none where a causal mask is enough."""
        attention, end = self._attention, span.start + span.length
        capped = attention._architecture.attention_softcap is not None  # this path has no causal kernel
        if not capped and attention.sees_all_before(kind, span.start, end):
            return None
        queries = torch.arange(span.start, end, device=attention._cache.keys.device)
        return attention.bias(kind, queries, end).transpose(0, 1)[None]


class VarlenPrefill:
    """Prefill of prompts or chunks of them, in one call of a varlen kernel."""

    def __init__(self, attention: Attention, spans: Sequence[Span]) -> None:
        self._attention, device = attention, attention._cache.keys.device
        starts = [span.start for span in spans for _ in span.slots]
        lengths = [span.length for span in spans for _ in span.slots]
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        slots = torch.tensor([slot for span in spans for slot in span.slots], device=device)

        def where(firsts: Sequence[int], sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
            """Slot and position of each token, and the boundaries of the sequences."""
            counts = torch.tensor(sizes, device=device)
            limits = boundaries(counts)
            shift = torch.tensor(firsts, device=device) - limits[:-1]
            places = torch.arange(sum(sizes), device=device) + shift.repeat_interleave(counts, output_size=sum(sizes))
            return slots.repeat_interleave(counts, output_size=sum(sizes)), places, limits

        self._slots, self._places, new_ends = where(starts, lengths)
        self._read: tuple[Tensor, Tensor] | None = None
        """Slots and positions of all keys; none where all keys are new."""
        key_ends = new_ends
        if any(starts):
            *self._read, key_ends = where([0] * len(ends), ends)  # type: ignore[assignment]
        self._ends, self._longest = (new_ends, key_ends), (max(lengths), max(ends))

    def __call__(self, layer: int, qkv: Tensor, table: Table) -> Tensor:
        """See AttentionFunction."""
        attention, cache = self._attention, self._attention._cache
        assert attention.varlen is not None
        kind = attention._architecture.kinds[attention._architecture.layer_kinds[layer]]
        q, k, v = attention.rotated(qkv, table)
        keys, values = cache.keys[layer], cache.values[layer]
        keys[self._slots, :, self._places] = k
        values[self._slots, :, self._places] = v
        if self._read is not None:
            slots, places = self._read
            k, v = keys[slots, :, places], values[slots, :, places]
        return attention.varlen(q, k, v, self._ends, self._longest, scale=kind.scale, window=kind.window)


class DecodeAttention:
    """One token for each of the first B slots."""

    def __init__(self, attention: Attention, positions: Tensor, shortest: int, longest: int) -> None:
        cache = attention._cache
        self._attention, self._longest = attention, longest
        self._kv_heads, self._group = attention._kv_heads, attention._group
        heads = torch.arange(self._kv_heads, device=positions.device)
        rows = torch.arange(len(positions), device=positions.device)[:, None] * self._kv_heads + heads
        self._places = (rows * cache.capacity_tokens + positions[:, None]).flatten()
        kinds = range(len(attention._architecture.kinds))
        self._biases = [self._make_bias(kind, positions, shortest) for kind in kinds]

    def __call__(self, layer: int, qkv: Tensor, table: Table) -> Tensor:
        """See AttentionFunction."""
        attention, cache = self._attention, self._attention._cache
        q, k, v = attention.rotated(qkv, table)
        keys, values = cache.keys[layer].flatten(0, 1), cache.values[layer].flatten(0, 1)
        keys.flatten(0, 1).index_copy_(0, self._places, k.flatten(0, 1))
        values.flatten(0, 1).index_copy_(0, self._places, v.flatten(0, 1))
        batch, kind = len(q), attention._architecture.layer_kinds[layer]
        rows = q.reshape(batch * self._kv_heads, self._group, -1)
        seen = (slice(0, len(rows)), slice(0, self._longest))
        return attention.mix_rows(kind, rows, keys[seen], values[seen], self._biases[kind]).view(batch, -1, q.shape[-1])

    def _make_bias(self, kind: int, positions: Tensor, shortest: int) -> Tensor | None:
        """[B * K, G or 1, S]; none where every row attends to all keys."""
        if shortest == self._longest and self._attention.sees_all_before(kind, 0, self._longest):
            return None
        bias = self._attention.bias(kind, positions, self._longest)
        if bias.shape[1] == 1:
            return bias.repeat_interleave(self._kv_heads, dim=0)
        return bias.reshape(len(positions) * self._kv_heads, self._group, -1)


class KernelAttention:
    """The same with Triton kernels on a GPU. Shapes do not depend on lengths, as a CUDA graph requires."""

    def __init__(self, attention: Attention, kernels: ModuleType, positions: Tensor) -> None:
        self._attention, self._kernels, self._positions = attention, kernels, positions

    def __call__(self, layer: int, qkv: Tensor, table: Table) -> Tensor:
        """See AttentionFunction."""
        a, cache = self._attention._architecture, self._attention._cache
        keys, values, kind = cache.keys[layer], cache.values[layer], a.kinds[a.layer_kinds[layer]]
        queries = self._kernels.rotate_and_write(qkv, table, self._positions, keys, values)
        mixed: Tensor = self._kernels.decode_attention(
            queries,
            keys,
            values,
            self._positions,
            scale=kind.scale,
            window=kind.window,
            softcap=a.attention_softcap,
            bias=self._attention.alibi,
        )
        return mixed
