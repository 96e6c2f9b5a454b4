"""Log-probs and entropy of tokens, from logits or straight from hidden states; how far two computations may differ.

The logits of a batch, [B, T, V], are the largest tensor of language-model training. `logprobs_from_hidden` computes
them in chunks of tokens, in forward and again in backward.

Shapes: B batch, T time, N tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybrid_rlhf.functional import head_kernels
from hybrid_rlhf.functional.masking import at_least_float32
from hybrid_rlhf.functional.operations import add_wide_product, linear, wide_linear
from hybrid_rlhf.functional.triton_language import HAS_TRITON

FLOAT32_TOLERANCE = 2e-3
"""Largest difference of log-probs in float32, in nats, that `agreement` allows."""
LEAST_CHUNK_TOKENS = 512
"""Tokens whose logits are in memory at a time, at least: the fewest for which products are fast."""
BANNED_LOGIT = -1e30
"""Logit of a token with probability 0: finite, so that no product with it is NaN."""
_MOST_CHUNK_TOKENS = 8192
_CHUNK_BYTES = 2**30
_ROUNDING_STEPS = 2.0
"""Allowed mean difference in rounding steps of the dtype at the magnitude of the logits. In tiny models, different
orders of summation give differences of 0.2 to 0.9 steps."""


def token_logprobs(logits: Tensor, *, labels: Tensor) -> Tensor:
    """Log-probs [B, T] of labels [B, T] under logits [B, T, V], in float32 or better."""
    _check_labels(labels, logits)
    logprobs = torch.log_softmax(at_least_float32(logits), dim=-1)
    return logprobs.gather(-1, labels[..., None]).squeeze(-1)


@dataclass(frozen=True)
class LogprobAgreement:
    """Difference of log-probs from the expected ones, in nats."""

    measured: float
    """Largest difference in float32, mean difference in lower precision."""
    tolerance: float

    @property
    def holds(self) -> bool:
        """True if the difference is within the tolerance; False for NaN."""
        return self.measured <= self.tolerance


def agreement(
    logprobs: Tensor, *, expected: Tensor, dtype: torch.dtype, low_precision: float, magnitude: float = 0.0
) -> LogprobAgreement:
    """Compare log-probs with the expected ones.

    Args:
        logprobs: [P - 1] log-probs to check.
        expected: [P - 1] log-probs of the reference; a token with probability 0 on both sides does not differ.
        dtype: dtype of the computation.
        low_precision: allowed mean difference in nats for dtypes other than float32.
        magnitude: magnitude of the logits; the tolerance is at least two rounding steps of the dtype at it.
    """
    expected = expected.to(logprobs)
    both_banned = (logprobs < BANNED_LOGIT / 2) & (expected < BANNED_LOGIT / 2)
    difference = (logprobs - expected).abs().masked_fill(both_banned, 0.0)
    if dtype == torch.float32:
        return LogprobAgreement(float(difference.max()), FLOAT32_TOLERANCE)
    return LogprobAgreement(
        float(difference.mean()), max(low_precision, _ROUNDING_STEPS * torch.finfo(dtype).eps * magnitude)
    )


def head_chunk_tokens(vocabulary: int, *, device_type: str, dtype: torch.dtype) -> int:
    """Tokens whose logits are in memory at a time.

    On a GPU each chunk takes about 10 launches, so it is the largest of 512, 1,024, ... 8,192 tokens that takes at most
    1 GiB: 4 bytes for each logit, and those of `dtype` for its gradient. In bfloat16 that is 1,024 tokens of a
    vocabulary of 151,936 and 4,096 of one of 32,000. On a CPU, which launches nothing, it is 512.
    """
    tokens = LEAST_CHUNK_TOKENS
    of_token = vocabulary * (torch.promote_types(dtype, torch.float32).itemsize + dtype.itemsize)
    while device_type == "cuda" and tokens < _MOST_CHUNK_TOKENS and 2 * tokens * of_token <= _CHUNK_BYTES:
        tokens *= 2
    return tokens


def logprobs_from_hidden(
    hidden: Tensor,
    *,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    chunk_tokens: int = LEAST_CHUNK_TOKENS,
    bias: Tensor | None = None,
    softcap: float | None = None,
    float32_logits: bool = True,
    banned: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy of labels under the LM head, without the full logits in memory.

    Args:
        hidden: [..., H].
        weight: [V, H], weight of the head, in hidden's dtype. ZeRO-3 may release and gather its memory between forward
            and backward.
        labels: [...] int64; or [..., m], m tokens whose log-probs are needed at each state, with repetitions.
        temperature: divisor of the logits.
        chunk_tokens: number of tokens whose logits are in memory at a time.
        bias: [V], or None.
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2), before the temperature.
        float32_logits: accumulate and store logits in float32; false rounds them to the dtype of hidden. The gradient
            of the logits is rounded to that dtype in either case, before its matrix products. No difference in float32.
        banned: tokens with probability 0, without gradient; no label is one.

    Returns:
        logprobs, in the shape of the labels, and entropy (nats), [...], in float32 or better, differentiable in hidden,
        weight and bias.

    Raises:
        ValueError: when labels and hidden states differ in number, or for banned tokens with a soft cap, which would
            return them.
    """
    _check_labels(labels if labels.dim() < hidden.dim() else labels[..., 0], hidden)
    if banned and softcap is not None:
        raise ValueError(f"banned tokens need logits without a soft cap, got {softcap}")
    flat = hidden.reshape(-1, hidden.shape[-1])
    several = labels.shape[hidden.dim() - 1 :]
    logprobs, entropy = _ChunkedHead.apply(
        flat, weight, bias, labels.reshape(-1, *several), temperature, chunk_tokens, softcap, float32_logits, banned
    )
    return logprobs.view(labels.shape), entropy.view(hidden.shape[:-1])


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
        banned: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(labels.shape, dtype=dtype, device=hidden.device)
        entropy = torch.empty(len(labels), dtype=dtype, device=hidden.device)
        normaliser = torch.empty_like(entropy)
        memory = _ChunkMemory(hidden, weight, chunk_tokens, float32_logits, banned)
        by_kernels = _suits_kernels(hidden, labels)
        for start in range(0, len(labels), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logits = memory.logits(hidden[part], weight, bias)
            if by_kernels:
                found = head_kernels.summary(logits, labels[part], temperature=temperature, softcap=softcap)
            else:
                _temper(logits, temperature, softcap)
                found = _summary(logits, labels[part], memory.buffer(len(logits), dtype))
            logprobs[part], entropy[part], normaliser[part] = found
        ctx.save_for_backward(hidden, weight, bias, labels, normaliser, entropy)
        ctx.settings = (temperature, chunk_tokens, softcap, float32_logits, banned)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, normaliser, entropy = ctx.saved_tensors
        temperature, chunk_tokens, softcap, float32_logits, banned = ctx.settings
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=normaliser.dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=normaliser.dtype) if needs_bias else None
        memory = _ChunkMemory(hidden, weight, chunk_tokens, float32_logits, banned)
        by_kernels = _suits_kernels(hidden, labels)
        for start in range(0, len(labels), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logits = memory.logits(hidden[part], weight, bias)
            known = (labels[part], normaliser[part], entropy[part])
            grads = (
                None if grad_logprobs is None else grad_logprobs[part],
                None if grad_entropy is None else grad_entropy[part],
            )
            if by_kernels:
                out = memory.buffer(len(logits), hidden.dtype)
                grad = low = head_kernels.logits_gradient(
                    logits, *known, *grads, temperature=temperature, softcap=softcap, out=out
                )
            else:
                slope = _temper(logits, temperature, softcap, wants_slope=True)
                grad = _logits_gradient(logits, *known, *grads, memory.buffer(len(logits), logits.dtype))
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
                grad_bias += grad.sum(dim=0, dtype=grad_bias.dtype)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 6,
        )


class _ChunkMemory:
    """Buffers [n, V] that all chunks reuse, as the pages of a new allocation would have to be mapped again."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, chunk_tokens: int, float32_logits: bool, banned: Sequence[int]
    ) -> None:
        self._wide = float32_logits
        self._banned = torch.tensor(banned, device=hidden.device) if banned else None
        self._shape = (min(chunk_tokens, len(hidden)), len(weight))
        self._device = hidden.device
        self._buffer: Tensor | None = None
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        is_new = dtype == hidden.dtype and hidden.device.type == "cpu"  # oneDNN's products allocate their output
        self._logits = None if is_new else torch.empty(self._shape, dtype=dtype, device=hidden.device)

    def buffer(self, tokens: int, dtype: torch.dtype) -> Tensor:
        """A buffer [tokens, V]; all calls have one dtype."""
        if self._buffer is None:
            self._buffer = torch.empty(self._shape, dtype=dtype, device=self._device)
        return self._buffer[:tokens]

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Logits [n, V] of a chunk, before the soft cap and the temperature."""
        logits = self._plain_logits(hidden, weight, bias)
        return logits if self._banned is None else logits.index_fill_(1, self._banned, BANNED_LOGIT)

    def _plain_logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self._logits is None:
            return linear(hidden, weight, bias)
        out = self._logits[: len(hidden)]
        if self._wide and out.dtype != hidden.dtype:
            wide_linear(hidden, weight, bias, out=out)
        elif out.dtype != hidden.dtype:
            out.copy_(linear(hidden, weight, bias))
        elif bias is None:
            torch.mm(hidden, weight.t(), out=out)
        else:
            torch.addmm(bias, hidden, weight.t(), out=out)
        return out


def _suits_kernels(hidden: Tensor, labels: Tensor) -> bool:
    """True if the kernels of head_kernels.py compute the logits of these states, which are float32 there."""
    return HAS_TRITON and hidden.is_cuda and hidden.dtype != torch.float64 and labels.dim() == 1


def _temper(logits: Tensor, temperature: float, softcap: float | None, *, wants_slope: bool = False) -> Tensor | None:
    """Soft-cap logits and divide them by the temperature in place; returns the derivative of the soft cap if wanted."""
    slope = None
    if softcap is not None:
        logits.div_(softcap).tanh_()
        slope = logits.square().neg_().add_(1) if wants_slope else None
        logits.mul_(softcap)
    if temperature != 1.0:
        logits.div_(temperature)
    return slope


def _summary(logits: Tensor, labels: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies and normalisers [n] of tempered logits [n, V]; overwrites the logits and `buffer`."""
    highest = logits.amax(dim=-1)
    logits.sub_(highest[:, None])
    total = torch.exp(logits, out=buffer).sum(dim=-1)
    logprobs = (logits.gather(1, labels.view(len(labels), -1)) - total.log()[:, None]).view(labels.shape)
    # exp(-inf) * -inf is NaN where a token is masked out
    mean = buffer.mul_(logits.clamp_(min=torch.finfo(logits.dtype).min)).sum(dim=-1) / total
    return logprobs, total.log() - mean, highest + total.log()


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
    if grad_logprobs is not None:
        labels, grad_logprobs = (of.view(len(logits), -1) for of in (labels, grad_logprobs))
    logprobs = logits.sub_(normaliser[:, None])
    probs = torch.exp(logprobs, out=buffer)
    if grad_entropy is None:
        grad = probs.zero_() if grad_logprobs is None else probs.mul_(-grad_logprobs.sum(dim=1, keepdim=True))
    else:
        # logprobs becomes the factor of p: -(g_entropy * (log p + entropy)) - g_logprob
        factor = logprobs.add_(entropy[:, None]).mul_(-grad_entropy[:, None])
        if grad_logprobs is not None:
            factor.sub_(grad_logprobs.sum(dim=1, keepdim=True))
        grad = probs.mul_(factor)
    if grad_logprobs is not None:
        grad.scatter_add_(1, labels, grad_logprobs)
    return grad
