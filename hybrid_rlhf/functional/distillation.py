"""Divergence of a student's distribution from a teacher's, over the whole vocabulary, straight from hidden states.

The logits of two models, [N, V] each, would be the largest tensors of distillation. They are computed in chunks of
tokens, together with the gradient of each chunk (as in Liger's fused losses, arXiv 2410.10989). Backward only scales
that gradient, so the teacher's head is needed only in forward, and ZeRO-3 does not gather it twice.

Sources: Hinton et al. 2015 (arXiv 1503.02531), whose factor T^2 keeps the size of gradients at any temperature; MiniLLM
(arXiv 2306.08543) for the reverse divergence; GKD (arXiv 2306.13649), eq. 1, for the generalised Jensen-Shannon
divergence.

Shapes: N tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from hybrid_rlhf.functional.logprobs import BANNED_LOGIT
from hybrid_rlhf.functional.masking import at_least_float32
from hybrid_rlhf.functional.operations import add_wide_product, wide_linear

DivergenceName = Literal["forward", "reverse", "jensen_shannon"]


@dataclass(frozen=True)
class OutputHead:
    """An LM head: logits are softcap(hidden @ weight.T + bias)."""

    weight: Tensor
    """[V, H]"""
    bias: Tensor | None = None
    """[V]"""
    softcap: float | None = None
    float32_logits: bool = True
    """Accumulate and store logits in float32; false rounds them to the dtype of the weights."""
    banned: tuple[int, ...] = ()
    """Tokens with probability 0; without a soft cap."""

    def logits(self, hidden: Tensor, rows: int) -> Tensor:
        """Logits [n, rows] before the soft cap, for the first rows of the vocabulary, in float32 or better."""
        bias = None if self.bias is None else self.bias[:rows]
        if self.float32_logits and hidden.dtype in (torch.bfloat16, torch.float16):
            logits = wide_linear(hidden, self.weight[:rows], bias)
        else:
            logits = at_least_float32(linear(hidden, self.weight[:rows], bias))
        if self.banned:
            logits.index_fill_(1, torch.tensor(self.banned, device=logits.device), BANNED_LOGIT)
        return logits

    def capped(self, logits: Tensor) -> Tensor:
        """Logits with the soft cap applied."""
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


@dataclass(frozen=True)
class DistillationRule:
    """The distillation loss: T^2 * divergence + sft_coef * -log p(label), summed over tokens."""

    divergence: DivergenceName = "forward"
    beta: float = 0.5
    """Weight of the teacher in the mixture of jensen_shannon."""
    temperature: float = 1.0
    """Divisor of both models' logits in the divergence."""
    sft_coef: float = 0.0


def divergence(student: Tensor, *, teacher: Tensor, kind: DivergenceName, beta: float = 0.5) -> Tensor:
    """Divergence [N] in nats between distributions given as log-probs [N, V].

    Args:
        student: log-probs, with gradient.
        teacher: log-probs.
        kind: forward is KL(teacher || student), which is mean-seeking; reverse is KL(student || teacher), which is
            mode-seeking; jensen_shannon interpolates between them.
        beta: weight of the teacher in the mixture of jensen_shannon, in (0, 1).
    """
    if kind == "forward":
        return _kl(teacher, student)
    if kind == "reverse":
        return _kl(student, teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def with_tail(logprobs: Tensor) -> Tensor:
    """Log-probs [..., k + 1] of k tokens, and of all others as one.

    A divergence of these is a lower bound of that over the whole vocabulary, and equal to it if the others have no
    part in either. Without the last entry, the sum of the others' probabilities would be free to grow (arXiv
    2608.14728). It is at least the rounding step of the dtype, below which 1 minus a sum is rounding.
    """
    rest = 1 - logprobs.exp().sum(dim=-1, keepdim=True)
    return torch.cat([logprobs, rest.clamp(min=torch.finfo(rest.dtype).eps).log()], dim=-1)


def top_logprobs_from_hidden(
    hidden: Tensor, head: OutputHead, *, labels: Tensor, k: int, rows: int, temperature: float, chunk_tokens: int = 256
) -> Tensor:
    """Log-prob of each label, the k largest log-probs among the first `rows` tokens, and these tokens, [N, 1 + 2 k] in
    float32 or better, which holds all ids below 2^24; without gradient. States hidden [N, H], labels [N]."""
    found = [torch.empty(0, 1 + 2 * k, dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)]
    for start in range(0, len(labels), chunk_tokens):
        part = slice(start, start + chunk_tokens)
        logits = head.capped(head.logits(hidden[part], len(head.weight))) / temperature
        logprobs = torch.log_softmax(logits, dim=-1)
        top, tokens = logprobs[:, :rows].topk(k, dim=-1)
        found.append(torch.cat([logprobs.gather(1, labels[part, None]), top, tokens.to(top)], dim=1))
    return torch.cat(found)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(dim=-1)


def divergence_from_hidden(
    hidden: Tensor,
    head: OutputHead,
    *,
    teacher_hidden: Tensor,
    teacher_head: OutputHead,
    labels: Tensor,
    rule: DistillationRule,
    weights: Tensor | None = None,
    chunk_tokens: int = 256,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of a student on tokens, without the full logits of either model in memory.

    If one vocabulary has more rows than the other (some models pad theirs), both are truncated to the smaller.

    Args:
        hidden: [N, H], hidden states of the student.
        head: head of the student; its weight and bias may require a gradient.
        teacher_hidden: [N, H'], hidden states of the teacher, at the same tokens.
        teacher_head: head of the teacher; used only during this call.
        labels: [N] int64, the next tokens of the text.
        rule: definition of the loss.
        weights: [N], of each token's divergence in the loss; None: 1.
        chunk_tokens: number of tokens whose logits are in memory at a time.

    Returns:
        the loss, differentiable in hidden, weight and bias; the divergence; -log p(labels). Scalar sums over tokens,
        in float32 or better, the latter two without gradient.

    Raises:
        ValueError: if teacher or labels do not have the student's tokens.
    """
    if not len(hidden) == len(teacher_hidden) == len(labels):
        raise ValueError(
            f"hidden, teacher_hidden, labels must have the same tokens, got {len(hidden)}, {len(teacher_hidden)} and "
            f"{len(labels)}"
        )
    total, apart, nll = _ChunkedDivergence.apply(
        hidden, head.weight, head.bias, head, teacher_hidden.detach(), teacher_head, labels, rule, weights, chunk_tokens
    )
    return total, apart, nll


class _ChunkedDivergence(torch.autograd.Function):
    """Computes the gradients with the loss, and saves those of hidden [N, H], weight [V, H] and bias [V]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: OutputHead,
        teacher_hidden: Tensor,
        teacher_head: OutputHead,
        labels: Tensor,
        rule: DistillationRule,
        weights: Tensor | None,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        rows = min(len(weight), len(teacher_head.weight))
        sums = torch.zeros(3, dtype=dtype, device=hidden.device)
        inputs = (hidden, weight, bias)
        needed = [tensor is not None and ctx.needs_input_grad[place] for place, tensor in enumerate(inputs)]
        grads = [
            torch.zeros_like(tensor, dtype=dtype) if tensor is not None and wanted else None
            for tensor, wanted in zip(inputs, needed, strict=True)
        ]
        for start in range(0, len(labels), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logits = head.logits(hidden[part], rows)
            target = torch.log_softmax(
                teacher_head.capped(teacher_head.logits(teacher_hidden[part], rows)) / rule.temperature, dim=-1
            )
            with torch.set_grad_enabled(any(needed)):
                losses = _chunk_losses(
                    head.capped(logits.requires_grad_(any(needed))),
                    target,
                    labels[part],
                    rule,
                    None if weights is None else weights[part],
                )
            if any(needed):
                (grad,) = torch.autograd.grad(losses[0], logits)
                _add_gradients(grads, grad, hidden[part], weight, part)
            sums += torch.stack(losses).detach()
        ctx.save_for_backward(*grads)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in inputs]
        total, apart, nll = sums.unbind()
        ctx.mark_non_differentiable(apart, nll)
        return total.clone(), apart, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        grads = [
            None if grad is None else (grad * grad_total).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*grads, *[None] * 7)


def _chunk_losses(
    logits: Tensor, target: Tensor, labels: Tensor, rule: DistillationRule, weights: Tensor | None
) -> tuple[Tensor, ...]:
    """Loss, divergence and negative log-likelihood of a chunk, summed."""
    tempered = torch.log_softmax(logits / rule.temperature, dim=-1)
    of_tokens = divergence(tempered, teacher=target, kind=rule.divergence, beta=rule.beta)
    apart = of_tokens.sum()
    weighted = apart if weights is None else (weights * of_tokens).sum()
    plain = tempered if rule.temperature == 1 else torch.log_softmax(logits, dim=-1)
    nll = -plain.gather(1, labels[:, None]).sum()
    return rule.temperature**2 * weighted + rule.sft_coef * nll, apart, nll


def _add_gradients(grads: list[Tensor | None], grad: Tensor, hidden: Tensor, weight: Tensor, part: slice) -> None:
    """Add the gradients of a chunk, from the gradient of its logits [n, rows]; products use the dtype of the
    weights."""
    of_hidden, of_weight, of_bias = grads
    low = grad.to(hidden.dtype)
    rows = grad.shape[1]
    if of_hidden is not None:
        of_hidden[part] = low @ weight[:rows]
    if of_weight is not None:
        add_wide_product(of_weight[:rows], low.t(), hidden)
    if of_bias is not None:
        of_bias[:rows] += grad.sum(dim=0)
