"""Runs models on torch's meta device, where tensors have a shape and no memory, and counts bytes of live tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, masking_utils
from transformers.integrations import hub_kernels

from hybrid_rlhf.functional import head_kernels, logprobs
from hybrid_rlhf.models.activation_offload import ActivationOffload
from hybrid_rlhf.planning.live_bytes import LiveBytes


class ForwardMemory(NamedTuple):
    """Bytes that a batch adds to the memory of a model."""

    kept: float
    """Alive between forward and backward."""
    peak: float
    """Maximum at any time, without gradients of weights that are already allocated."""
    host: float
    """Activations offloaded to host memory."""

    def with_tower(self, tower: ForwardMemory) -> ForwardMemory:
        """Memory of a batch whose images pass a tower first."""
        return ForwardMemory(self.kept + tower.kept, max(self.peak + tower.kept, tower.peak), self.host + tower.host)

    def extrapolated(self, other: ForwardMemory, steps: float) -> ForwardMemory:
        """Linear extrapolation from self through other, by `steps` times their distance."""
        return ForwardMemory(*(b + (b - a) * steps for a, b in zip(self, other, strict=True)))


def passage(
    lm: PreTrainedModel, forward: Callable[[], Tensor], *, device: str, offloads: bool = False
) -> ForwardMemory:
    """Memory of a forward and, if its result requires a gradient, of a backward.

    Args:
        lm: the model, on the meta device.
        forward: returns a scalar.
        device: type of the device whose memory it takes.
        offloads: activations are offloaded to host memory.
    """
    with _shapes_suffice(device):
        for parameter in lm.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        counter = LiveBytes("meta")
        for tensor in (*lm.parameters(), *lm.buffers(), *(p.grad for p in lm.parameters() if p.grad is not None)):
            counter.count(tensor.detach())
        before = counter.live
        with counter:
            offload = _MetaOffload() if offloads else None
            with offload or contextlib.nullcontext():
                total = forward()
            kept = counter.live - before
            if total.requires_grad:
                torch.autograd.backward([total])
    moved = 0 if offload is None else offload.moved_bytes
    return ForwardMemory(kept=float(kept), peak=float(counter.peak - before), host=float(moved))


class _MetaOffload(ActivationOffload):
    """Offload of tensors on the meta device: keeps shapes."""

    def _to_host(self, tensor: Tensor) -> Any:
        return tuple(tensor.shape), tensor.dtype

    def _to_device(self, host: Any, device: torch.device) -> Tensor:
        return torch.empty(host[0], dtype=host[1], device=device)


@contextlib.contextmanager
def _shapes_suffice(device: str) -> Iterator[None]:
    """Replace functions so that models run on the meta device, with the memory that they take on a type of device."""
    of_device = _REPLACED_ON_GPUS if device == "cuda" else ()
    replaced = [(*each, getattr(*each[:2])) for each in (*_REPLACED, *of_device) if hasattr(*each[:2])]
    for owner, name, other, _ in replaced:
        setattr(owner, name, other)
    try:
        yield
    finally:
        for owner, name, _, original in replaced:
            setattr(owner, name, original)


class _GroupedProduct(torch.autograd.Function):
    """[T, K] and [E, K, N] give [T, N], each row with the weight of its group."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return rows.new_empty(len(rows), weight.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Sequence[Tensor | None]:
        pairs = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        return tuple(torch.empty_like(tensor) if needed else None for tensor, needed in pairs)


class _FusedAttention(torch.autograd.Function):
    """Keeps queries, keys, values, the output and one normaliser per row (arXiv 2205.14135)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, heads, length, width = *query.shape[:-1], value.shape[-1]
        if width == query.shape[-1]:
            mixed = torch.empty_like(query)  # in the layout of the queries
        else:  # latent attention
            mixed = query.new_empty(rows, length, heads, width).transpose(1, 2)
        normaliser = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, mixed, normaliser)
        return mixed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Sequence[Tensor]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


_REPLACED: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    # packed rows are looked for in position ids, which have no values here
    (masking_utils, "find_packed_sequence_indices", lambda position_ids: None),
    # torch keeps all attention scores here, a fused kernel does not
    (functional, "scaled_dot_product_attention", lambda q, k, v, **options: _FusedAttention.apply(q, k, v)),
    # torch has none on this device; peft turns it off around the adapters of stacked experts
    (torch, "autocast", lambda *_, **__: contextlib.nullcontext()),
    # transformers then takes torch's functions in place of Triton kernels (fla), which would read the tensors
    (hub_kernels, "is_torchdynamo_exporting", lambda: True),
    # torch's shape rule knows bfloat16 alone; before torch 2.9 there is no such product
    (functional, "grouped_mm", lambda rows, weight, **_: _GroupedProduct.apply(rows, weight)),
)
"""Functions of modules, and what takes their place."""
_REPLACED_ON_GPUS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (logprobs, "_suits_kernels", lambda hidden, labels: hidden.dtype != torch.float64),
    (logprobs, "wide_linear", lambda *_, out: out),
    (head_kernels, "summary", lambda logits, labels, **_: logits.new_empty(3, len(labels)).unbind()),
    (head_kernels, "logits_gradient", lambda *_, out, **__: out),
)
"""The product and the kernels of the head, and which states these take."""
