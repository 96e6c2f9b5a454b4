"""Latent attention: keys and values of all heads are products of one latent per token, which alone is cached.

The products with which a head's key and value come from the latent are applied to its query and to its result instead,
so heads attend to latents as to one shared KV head, the rotated part in front. Rotation is done here, so keys and
values are the same tensor and the cache stores them once.

Source: DeepSeek-V2 (arXiv 2405.04434, section 2.1), the absorbed form of its appendix C.

Shapes: T tokens, H hidden, A heads of this rank, L latent, R rotated dimensions, N other dimensions of a query, V
dimensions of a value.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybrid_rlhf.generation.model.layers import Norm, rotate
from hybrid_rlhf.generation.model.quantised import Linear
from hybrid_rlhf.generation.weights.description import Latent


class LatentAttention:
    """Queries, latents and values of one layer on one rank."""

    def __init__(
        self,
        kind: Latent,
        *,
        q_down: Linear | None,
        q_norm: Norm | None,
        q: Linear,
        kv_down: Linear,
        kv_norm: Norm,
        kv_up: Tensor,
    ) -> None:
        """Take the weights.

        Args:
            kind: sizes.
            q_down: to the latent of the queries; none: they come from the hidden states.
            q_norm: of that latent.
            q: to queries, of each head N dimensions, then R.
            kv_down: to latent and shared rotated key [L + R].
            kv_norm: of the latent.
            kv_up: [A (N + V), L], from the latent to keys and values of each head.
        """
        self._kind, self._q_down, self._q_norm, self._q = kind, q_down, q_norm, q
        self._kv_down, self._kv_norm = kv_down, kv_norm
        self.kv_up = kv_up.view(-1, kind.plain_dims + kind.value_dims, kind.size)

    @property
    def products(self) -> dict[str, Linear]:
        """Its products with packed or quantised weights."""
        each = {"q down": self._q_down, "q": self._q, "kv down": self._kv_down}
        return {name: product for name, product in each.items() if product is not None}

    def refresh(self) -> None:
        """Recompute what is derived from weights, after these were updated in place."""
        for norm in (self._q_norm, self._kv_norm):
            if norm is not None:
                norm.refresh()

    def __call__(self, x: Tensor, table: tuple[Tensor, Tensor] | None, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """[T, A V] of hidden states [T, H]; `attend` is the attention of [T, A + 2, R + L] over the cache."""
        kind = self._kind
        if self._q_down is not None:
            hidden = self._q_down(x)
            queries = self._q(hidden if self._q_norm is None else self._q_norm(hidden))
        else:
            queries = self._q(x)
        queries, down = queries.view(len(x), -1, kind.plain_dims + kind.rotated_dims), self._kv_down(x)
        plain, turned = queries.split([kind.plain_dims, kind.rotated_dims], dim=-1)
        key_up, value_up = self.kv_up.split([kind.plain_dims, kind.value_dims], dim=1)
        given = self._kv_norm.of_latents(queries, down, table)
        if given is None:
            latent, key = down.split([kind.size, kind.rotated_dims], dim=-1)
            latent, key = self._kv_norm(latent.contiguous())[:, None], key[:, None]
            if table is not None:
                turned, key = rotate(turned, *table), rotate(key, *table)
            absorbed = torch.bmm(plain.transpose(0, 1), key_up).transpose(0, 1)
            shared = torch.cat([key, latent], dim=-1)
            given = torch.cat([torch.cat([turned, absorbed], dim=-1), shared, shared], dim=1)
        else:
            torch.bmm(plain.transpose(0, 1), key_up, out=given[:, :-2, kind.rotated_dims :].transpose(0, 1))
        mixed = attend(given)[..., -kind.size :]
        values = mixed.new_empty(*mixed.shape[:2], kind.value_dims)
        torch.bmm(mixed.transpose(0, 1), value_up.transpose(1, 2), out=values.transpose(0, 1))
        return values.flatten(1)
