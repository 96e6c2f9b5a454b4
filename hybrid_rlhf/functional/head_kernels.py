"""Triton kernels that read logits once: log-probs and entropy of tokens, and the gradient of the logits.

Composed of torch's operations they take 12 passes over float32 logits forward and 14 backward, which were four fifths
of the head's forward time and seven tenths of its training time for a 0.5B model with 151,936 tokens in its vocabulary
on an H200 (docs/benchmarks/gpu.md). The references are in logprobs.py. The maximum and the sums, that of the entropy
too, are updated block by block (Milakov and Gimelshein 2018, arXiv 1805.02867).

Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_rlhf.functional.triton_language import tl, triton

_BLOCK = 4096


@triton.jit
def _tempered(raw, temperature, softcap, SOFTCAP: tl.constexpr):
    """Soft-capped logits divided by the temperature, and the derivative by the raw logits."""
    capped = raw
    slope = 1.0 / temperature
    if SOFTCAP:
        tanh = 2 * tl.sigmoid(2 * raw / softcap) - 1
        capped = softcap * tanh
        slope *= 1 - tanh * tanh
    return capped / temperature, slope


@triton.jit
def _summary_kernel(
    logits,
    labels,
    logprobs,
    entropies,
    normalisers,
    vocabulary,
    temperature,
    softcap,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token."""
    row = tl.program_id(0).to(tl.int64)
    scores = logits + row * vocabulary
    highest = tl.full((), -1e38, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    spread = tl.full((), 0.0, tl.float32)  # sum of exp(x - highest) (x - highest)
    for start in range(0, vocabulary, BLOCK):
        place = start + tl.arange(0, BLOCK)
        x, _ = _tempered(tl.load(scores + place, mask=place < vocabulary, other=0.0), temperature, softcap, SOFTCAP)
        x = tl.where(place < vocabulary, x, -float("inf"))
        top = tl.maximum(highest, tl.max(x, 0))
        shrink = tl.exp(highest - top)
        weight = tl.exp(x - top)
        # exp(-inf) * -inf is NaN where a token is masked out
        distance = tl.where(weight == 0, 0.0, x - top)
        spread = shrink * (spread + total * (highest - top)) + tl.sum(weight * distance, 0)
        total = shrink * total + tl.sum(weight, 0)
        highest = top
    label = tl.load(labels + row)
    chosen, _ = _tempered(tl.load(scores + label), temperature, softcap, SOFTCAP)
    log_total = tl.log(total)
    tl.store(logprobs + row, chosen - highest - log_total)
    tl.store(entropies + row, log_total - spread / total)
    tl.store(normalisers + row, highest + log_total)


@triton.jit
def _gradient_kernel(
    logits,
    labels,
    normalisers,
    entropies,
    grad_logprobs,
    grad_entropies,
    out,
    vocabulary,
    temperature,
    softcap,
    SOFTCAP: tl.constexpr,
    OF_LOGPROBS: tl.constexpr,
    OF_ENTROPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of the vocabulary of one token."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < vocabulary
    raw = tl.load(logits + row * vocabulary + place, mask=inside, other=0.0)
    x, slope = _tempered(raw, temperature, softcap, SOFTCAP)
    logprob = x - tl.load(normalisers + row)
    prob = tl.exp(logprob)
    factor = tl.zeros_like(logprob)
    if OF_ENTROPIES:
        factor -= tl.load(grad_entropies + row) * (logprob + tl.load(entropies + row))
    if OF_LOGPROBS:
        factor -= tl.load(grad_logprobs + row)
    grad = tl.where(prob == 0, 0.0, prob * factor)
    if OF_LOGPROBS:
        grad += tl.where(place == tl.load(labels + row), tl.load(grad_logprobs + row), 0.0)
    tl.store(out + row * vocabulary + place, (grad * slope).to(out.dtype.element_ty), mask=inside)


def summary(
    logits: Tensor, labels: Tensor, *, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of labels [N], entropies and normalisers, each [N] float32, under logits [N, V] float32, which rows are
    contiguous.

    Args:
        logits: [N, V] before the soft cap and the temperature; kept.
        labels: [N] int64.
        temperature: divisor of the logits.
        softcap: see `logprobs_from_hidden`.
    """
    results = tuple(torch.empty(len(logits), device=logits.device) for _ in range(3))
    sizes = (logits.shape[1], temperature, softcap or 1.0)
    _summary_kernel[(len(logits),)](
        logits, labels, *results, *sizes, SOFTCAP=softcap is not None, BLOCK=_BLOCK, num_warps=8
    )
    return results  # type: ignore[return-value]


def logits_gradient(
    logits: Tensor,
    labels: Tensor,
    normaliser: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    *,
    temperature: float,
    softcap: float | None,
    out: Tensor,
) -> Tensor:
    """Write the gradient of raw logits [N, V] to `out` [N, V], in its dtype, and return it.

    Args:
        logits: as `summary`.
        labels: as `summary`.
        normaliser: [N], a result of `summary`.
        entropy: [N], a result of `summary`.
        grad_logprobs: [N], or None.
        grad_entropy: [N], or None.
        temperature: as `summary`.
        softcap: as `summary`.
        out: [N, V].
    """
    vocabulary = logits.shape[1]
    grads = [normaliser if grad is None else grad.contiguous() for grad in (grad_logprobs, grad_entropy)]
    _gradient_kernel[(len(logits), -(-vocabulary // _BLOCK))](
        *(logits, labels, normaliser, entropy, *grads, out, vocabulary, temperature, softcap or 1.0),
        SOFTCAP=softcap is not None,
        OF_LOGPROBS=grad_logprobs is not None,
        OF_ENTROPIES=grad_entropy is not None,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    return out
