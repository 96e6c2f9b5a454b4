"""Log-probs and entropy of tokens, from logits or straight from hidden states.

The logits of a batch, [B, T, V], are the largest tensor of language-model training. `logprobs_from_hidden` computes
them in chunks of tokens, in forward and again in backward.

Shapes: B batch, T time, N tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybrid_rlhf.functional.masking import at_least_float32
from hybrid_rlhf.functional.operations import add_wide_product, linear, wide_linear


def token_logprobs(logits: Tensor, *, labels: Tensor) -> Tensor:
    """Log-probs [B, T] of labels [B, T] under logits [B, T, V], in float32 or better."""
    _check_labels(labels, logits)
    logprobs = torch.log_softmax(at_least_float32(logits), dim=-1)
    return logprobs.gather(-1, labels[..., None]).squeeze(-1)


def logprobs_from_hidden(
    hidden: Tensor,
    *,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    bias: Tensor | None = None,
    softcap: float | None = None,
    float32_logits: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy of labels under the LM head, without the full logits in memory.

    Args:
        hidden: [..., H].
        weight: [V, H], weight of the head, in hidden's dtype. ZeRO-3 may release and gather its memory between forward
            and backward.
        labels: [...] int64.
        temperature: divisor of the logits.
        chunk_tokens: number of tokens whose logits are in memory at a time.
        bias: [V], or None.
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2), before the temperature.
        float32_logits: accumulate and store logits in float32; false rounds them to the dtype of hidden. The gradient
            of the logits is rounded to that dtype in either case, before its matrix products. No difference in float32.

    Returns:
        logprobs and entropy (nats), [...] float32 or better, differentiable in hidden, weight and bias.

    Raises:
        ValueError: when labels and hidden states differ in number.
    """
    _check_labels(labels, hidden)
    flat = hidden.reshape(-1, hidden.shape[-1])
    logprobs, entropy = _ChunkedHead.apply(
        flat, weight, bias, labels.reshape(-1), temperature, chunk_tokens, softcap, float32_logits
    )
    return logprobs.view(labels.shape), entropy.view(labels.shape)


class _ChunkedHead(torch.autograd.Function):
    """Saves hidden states, weight and normaliser; recomputes the logits of each chunk in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
        chunk_tokens: int,
        softcap: float | None,
        float32_logits: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(len(labels), dtype=dtype, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        normaliser = torch.empty_like(logprobs)
        memory = _ChunkMemory(hidden, weight, chunk_tokens, float32_logits)
        for start in range(0, len(labels), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logits, probs = memory.logits(hidden[part], weight, bias, temperature, softcap)
            highest = logits.amax(dim=-1)
            logits.sub_(highest[:, None])
            total = torch.exp(logits, out=probs).sum(dim=-1)
            logprobs[part] = logits.gather(1, labels[part, None]).squeeze(1) - total.log()
            normaliser[part] = highest + total.log()
            # exp(-inf) * -inf is NaN where a token is masked out
            mean = probs.mul_(logits.clamp_(min=torch.finfo(dtype).min)).sum(dim=-1) / total
            entropy[part] = total.log() - mean
        ctx.save_for_backward(hidden, weight, bias, labels, normaliser, entropy)
        ctx.settings = (temperature, chunk_tokens, softcap, float32_logits)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, normaliser, entropy = ctx.saved_tensors
        temperature, chunk_tokens, softcap, float32_logits = ctx.settings
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=normaliser.dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=normaliser.dtype) if needs_bias else None
        memory = _ChunkMemory(hidden, weight, chunk_tokens, float32_logits)
        for start in range(0, len(labels), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logits, buffer = memory.logits(hidden[part], weight, bias, temperature, softcap)
            # 1 - tanh^2, before the gradient overwrites the logits
            slope = None if softcap is None else (logits * (temperature / softcap)).square_().neg_().add_(1)
            grad = _logits_gradient(
                logits,
                labels[part],
                normaliser[part],
                entropy[part],
                None if grad_logprobs is None else grad_logprobs[part],
                None if grad_entropy is None else grad_entropy[part],
                buffer,
            )
            if slope is not None:
                grad.mul_(slope)
            if temperature != 1.0:
                grad.div_(temperature)
            low = grad.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = linear(low, weight.t())
            if grad_weight is not None:
                add_wide_product(grad_weight, low.t(), hidden[part])
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
            None,
        )


class _ChunkMemory:
    """Buffers [n, V] that all chunks reuse, as the pages of a new allocation would have to be mapped again."""

    def __init__(self, hidden: Tensor, weight: Tensor, chunk_tokens: int, float32_logits: bool) -> None:
        self._wide = float32_logits
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        self._other = torch.empty(min(chunk_tokens, len(hidden)), len(weight), dtype=dtype, device=hidden.device)
        is_new = dtype == hidden.dtype and hidden.device.type == "cpu"  # oneDNN's products allocate their output
        self._logits = None if is_new else torch.empty_like(self._other)

    def logits(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """Logits [n, V] of a chunk, soft-capped and divided by the temperature, and a buffer of the same shape."""
        buffer = self._other[: len(hidden)]
        if self._logits is None:
            out = linear(hidden, weight, bias)
        else:
            out = self._product(hidden, weight, bias, self._logits[: len(hidden)])
        if softcap is not None:
            out.div_(softcap).tanh_().mul_(softcap)
        if temperature != 1.0:
            out.div_(temperature)
        return out, buffer

    def _product(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        if self._wide and out.dtype != hidden.dtype:
            wide_linear(hidden, weight, bias, out=out)
        elif out.dtype != hidden.dtype:
            out.copy_(linear(hidden, weight, bias))
        elif bias is None:
            torch.mm(hidden, weight.t(), out=out)
        else:
            torch.addmm(bias, hidden, weight.t(), out=out)
        return out


def _check_labels(labels: Tensor, states: Tensor) -> None:
    """Raise ValueError for states without a label, which gather() would silently ignore."""
    if labels.shape != states.shape[:-1]:
        raise ValueError(f"labels need one entry per token: labels {tuple(labels.shape)} for {tuple(states.shape)}")


def _logits_gradient(
    logits: Tensor,
    labels: Tensor,
    normaliser: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    buffer: Tensor,
) -> Tensor:
    """The gradient of a chunk's tempered logits [n, V]; overwrites the logits and `buffer`, which has their shape.

    With p = softmax(logits): d logprob = onehot - p, d entropy = -p * (log p + entropy).
    """
    logprobs = logits.sub_(normaliser[:, None])
    probs = torch.exp(logprobs, out=buffer)
    if grad_entropy is None:
        grad = probs if grad_logprobs is None else probs.mul_(-grad_logprobs[:, None])
        grad = grad.zero_() if grad_logprobs is None else grad
    else:
        # logprobs becomes the factor of p: -(g_entropy * (log p + entropy)) - g_logprob
        factor = logprobs.add_(entropy[:, None]).mul_(-grad_entropy[:, None])
        if grad_logprobs is not None:
            factor.sub_(grad_logprobs[:, None])
        grad = probs.mul_(factor)
    if grad_logprobs is not None:
        grad.scatter_add_(1, labels[:, None], grad_logprobs[:, None])
    return grad
