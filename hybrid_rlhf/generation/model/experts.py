"""Mixture of experts: a router selects some MLPs for each token.

Tensor-parallel ranks hold different experts (expert parallelism). Each rank computes the tokens of its experts, and the
all-reduce at the end of every MLP adds the others. The router computes in float32. On a GPU, Triton kernels compute a
decoding step: the choice (ops/routing.py), up and down (ops/experts.py). Otherwise tokens are sorted by
expert: larger steps on a GPU use one grouped product per projection for all experts, and a CPU one product with packed
weights per selected expert. On a GPU no shape depends on the routing, as a CUDA graph requires.

Source: Shazeer et al. 2017 (arXiv 1701.06538); softmax over all or over the chosen experts (Mixtral, arXiv 2401.04088;
Granite); sigmoid with a correction of the choice, and groups (DeepSeek-V3, arXiv 2412.19437, section 2.1.2);
SparseMixer-v2 as used after training (arXiv 2409.12136, as in transformers' phimoe); biases and clamped SwiGLU
(gpt-oss, arXiv 2508.10925, section 2.2, as in transformers' gpt_oss); sigmoids of the chosen that weigh the inputs of
experts (as in transformers' llama4); weights that are multiplied by a learned scale of each expert (as in transformers'
gemma4).

Shapes: T tokens, H hidden, E experts, X experts of this rank, k experts per token, I inner units.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

from hybrid_rlhf.generation.architecture.model_description import Activation, Experts
from hybrid_rlhf.generation.model.layers import Linear, MakeLinear, operations, weight_bytes
from hybrid_rlhf.generation.ops.routing import route

MOST_KERNEL_TOKENS = 256
"""Maximum number of tokens for Triton kernels. In larger steps, experts have enough tokens for a grouped product."""


class RoutedExperts:
    """The routed experts of one layer on one rank."""

    def __init__(
        self,
        kind: Experts,
        *,
        router: Tensor,
        up: Tensor,
        down: Tensor,
        mine: range,
        correction: Tensor | None,
        product: MakeLinear | None,
        scale: Tensor | None = None,
        router_bias: Tensor | None = None,
        up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> None:
        """Take the weights.

        Args:
            kind: sizes and routing.
            router: [E, H].
            up: [X, 2 I, H], gate and up, or up alone [X, I, H].
            down: [X, H, I].
            mine: the experts of this rank.
            correction: [E] or [1, E], added to the scores by which experts are chosen; or none.
            product: creates a packed or quantised product for each expert; none: grouped products compute all experts.
            scale: [E], factors of the weights of chosen experts; or none.
            router_bias: [E], or none.
            up_bias: [X, 2 I], or none.
            down_bias: [X, H], or none.
        """
        self._kind = kind
        self._mine = mine
        self._correction = correction
        self._scale = scale
        self.router = router
        self.router_bias = router_bias
        self.up = up
        self.up_bias = up_bias
        self.down = down
        self.down_bias = down_bias
        self._of_each: list[tuple[Linear, Linear]] | None = None
        self._inner = down.shape[2]
        if product is not None:
            products = [_of_each(product, *both) for both in ((up, up_bias), (down, down_bias))]
            self._of_each = list(zip(*products, strict=True))
            self.up = self.down = up.new_empty(0)

    @property
    def products(self) -> dict[str, Linear]:
        """Products of each expert by description; empty if grouped products compute all experts."""
        return {
            f"{name} of expert {index}": product
            for index, both in zip(self._mine, self._of_each or (), strict=False)
            for name, product in zip(("up", "down"), both, strict=True)
        }

    @property
    def weight_bytes(self) -> int:
        """Bytes of all experts of this rank. A step with few tokens reads fewer."""
        return self.up.nbytes + self.down.nbytes + sum(map(weight_bytes, self.products.values()))

    @property
    def operations(self) -> float:
        """Floating-point operations of one token in all experts of this rank."""
        return 2 * (self.up.numel() + self.down.numel()) + sum(map(operations, self.products.values()))

    def route(self, x: Tensor, kernels: ModuleType | None = None) -> tuple[Tensor, Tensor]:
        """Choose experts for tokens [T, H]; returns their weights [T, k] float32 and indices [T, k]."""
        bias = None if self.router_bias is None else self.router_bias.float()
        logits = functional.linear(x.float(), self.router.float(), bias)
        choose = route if kernels is None else kernels.choose_experts
        weights, index = choose(logits, self._kind, correction=self._correction, expert_scale=self._scale)
        return weights, index

    def __call__(
        self,
        x: Tensor,
        activate: Callable[[Tensor], Tensor],
        *,
        routed: Tensor | None = None,
        routes: list[Tensor] | None = None,
        kernels: ModuleType | None = None,
        activation: Activation = "silu",
    ) -> Tensor:
        """Return this rank's part of the sum over experts, [T, H].

        Args:
            x: [T, H] hidden states of tokens.
            activate: maps [n, 2 I] to activation(gate) * up, or for experts without a gate [n, I] to activation(up).
            routed: [T, H] input of the router; none: x.
            routes: list to which the expert indices [T, k] are appended, in the smallest dtype; none: not recorded.
            kernels: Triton kernels, used for weights that are not packed or quantised, and for few tokens or a dtype
                other than bfloat16 on a GPU; none: torch.
            activation: name of the activation in `activate`, for the kernels.
        """
        by_kernels = kernels is not None and self._of_each is None and self._suit_kernels(x)
        weights, index = self.route(x if routed is None else routed, kernels if by_kernels else None)
        if routes is not None:
            routes.append(index.to(self._kind.index_dtype))
        if by_kernels:
            assert kernels is not None
            return self._by_kernels(x, weights, index, kernels, activation)
        return self._by_products(x, weights, index, activate)

    @staticmethod
    def _suit_kernels(x: Tensor) -> bool:
        """True for few tokens, and on a GPU for dtypes whose grouped product would copy the sizes of groups to the
        host, which a CUDA graph cannot."""
        return len(x) <= MOST_KERNEL_TOKENS or (x.is_cuda and x.dtype != torch.bfloat16)

    def _by_kernels(
        self, x: Tensor, weights: Tensor, index: Tensor, kernels: ModuleType, activation: Activation
    ) -> Tensor:
        """Compute experts by kernels, in two launches and a sum."""
        kind = self._kind
        mine = self._mine
        inner = kernels.experts_up(
            x,
            weights,
            index,
            self.up,
            self.up_bias,
            mine=mine,
            inner=self._inner,
            activation=activation,
            clamp=kind.clamp,
            weighs_inputs=kind.weighs_inputs,
        )
        outputs: Tensor = kernels.experts_down(
            inner, None if kind.weighs_inputs else weights, index, self.down, self.down_bias, mine=mine
        ).unflatten(0, index.shape)
        if len(mine) < kind.count:  # rows of other ranks' experts are uninitialised
            local = (index >= mine.start) & (index < mine.stop)
            outputs = outputs.masked_fill(~local[..., None], 0.0)
        return outputs.sum(dim=1)

    def _by_products(self, x: Tensor, weights: Tensor, index: Tensor, activate: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute experts by torch, with the tokens sorted by expert."""
        if self._kind.clamp is not None:
            activate = partial(clamped_swiglu, limit=self._kind.clamp)
        # renumbered so that this rank's experts come first, as 0 to X - 1
        experts, order = ((index.flatten() - self._mine.start) % self._kind.count).sort(stable=True)
        tokens = order // self._kind.per_token
        weights = weights.flatten()[order, None].to(x.dtype)
        ends = torch.searchsorted(experts, torch.arange(len(self._mine), device=x.device), right=True, out_int32=True)
        out = torch.zeros_like(x)

        def mixed(some: slice, up: Callable[[Tensor], Tensor], down: Callable[[Tensor], Tensor]) -> Tensor:
            inputs = x[tokens[some]]
            weight = weights[some]
            if self._kind.weighs_inputs:
                return down(activate(up(inputs * weight)))
            return down(activate(up(inputs))) * weight

        if self._of_each is not None:
            start = 0
            for (up, down), end in zip(self._of_each, ends.tolist(), strict=True):
                part = slice(start, end)
                start = end
                if part.start < part.stop:
                    out.index_add_(0, tokens[part], mixed(part, up, down))
            return out
        known = experts.clamp(max=len(self._mine) - 1)

        def grouped(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
            def multiplied(inputs: Tensor) -> Tensor:
                products = functional.grouped_mm(inputs, weight.transpose(1, 2), offs=ends)
                return products if bias is None else products + bias[known]

            return multiplied

        added = mixed(slice(None), grouped(self.up, self.up_bias), grouped(self.down, self.down_bias))
        # rows after the last group belong to other ranks: their products are uninitialised
        return out.index_add_(0, tokens, torch.where((experts < len(self._mine))[:, None], added, 0.0))


def clamped_swiglu(both: Tensor, *, limit: float) -> Tensor:
    """Return (up + 1) gate sigmoid(1.702 gate) for [n, 2 I]; gate is clamped from above, up on both sides."""
    gate, up = both.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def _of_each(product: MakeLinear, weights: Tensor, biases: Tensor | None) -> list[Linear]:
    """Create the products of expert weights [X, outputs, inputs]."""
    of_each = [None] * len(weights) if biases is None else biases
    return [product(weight, bias) for weight, bias in zip(weights, of_each, strict=True)]
