"""Divergences against whole logits and torch's own autograd; nothing of [N, V] is ever held."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid_rlhf.functional.distillation import (
    DistillationRule,
    DivergenceName,
    OutputHead,
    divergence,
    divergence_from_hidden,
    top_logprobs_from_hidden,
    with_tail,
)
from tests.support.tensors import LargestTensor

KINDS: list[DivergenceName] = ["forward", "reverse", "jensen_shannon"]


def losses(
    hidden: Tensor,
    head: OutputHead,
    taught: Tensor,
    teacher: Tensor,
    labels: Tensor | None = None,
    rule: DistillationRule | None = None,
    softcap: float | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return divergence_from_hidden(
        hidden,
        head,
        teacher_hidden=taught,
        teacher_head=OutputHead(teacher, None, softcap),
        labels=torch.zeros(len(hidden), dtype=torch.long) if labels is None else labels,
        rule=rule or DistillationRule(),
        **more,
    )


def whole(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor,
    rule: DistillationRule,
    softcaps: tuple[float | None, float | None],
) -> Tensor:
    """The loss from whole logits [N, V], by the papers' sums of probabilities."""
    student, teacher = (
        x if cap is None else cap * torch.tanh(x / cap) for x, cap in zip((student, teacher), softcaps, strict=True)
    )
    q, p = (x / rule.temperature for x in (student, teacher))
    q, p = q.softmax(-1), p.softmax(-1)
    m = rule.beta * p + (1 - rule.beta) * q

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a / b).log()).sum()

    apart = {
        "forward": lambda: kl(p, q),
        "reverse": lambda: kl(q, p),
        "jensen_shannon": lambda: rule.beta * kl(p, m) + (1 - rule.beta) * kl(q, m),
    }[rule.divergence]()
    nll = torch.nn.functional.cross_entropy(student, labels, reduction="sum")
    return rule.temperature**2 * apart + rule.sft_coef * nll


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.integers(0, 7),
    st.integers(1, 5),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.sampled_from([0.1, 0.5, 0.9]),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([None, 2.0]),
    st.sampled_from([None, 3.0]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_the_loss_equals_that_of_whole_logits(
    kind: DivergenceName,
    tokens: int,
    chunk: int,
    temperature: float,
    beta: float,
    sft_coef: float,
    softcap: float | None,
    teacher_softcap: float | None,
    with_bias: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    rule = DistillationRule(kind, beta, temperature, sft_coef)
    hidden, weight = (torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (tokens, 9))
    bias = torch.randn(9, dtype=torch.float64, requires_grad=True) if with_bias else None
    taught, teacher = torch.randn(tokens, 6, dtype=torch.float64), torch.randn(9, 6, dtype=torch.float64)
    labels = torch.randint(0, 9, (tokens,))
    total, apart, nll = losses(
        hidden, OutputHead(weight, bias, softcap), taught, teacher, labels, rule, teacher_softcap, chunk_tokens=chunk
    )
    logits = torch.nn.functional.linear(hidden, weight, bias)
    expected = whole(logits, taught @ teacher.t(), labels, rule, (softcap, teacher_softcap))
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(total, temperature**2 * apart + sft_coef * nll)
    assert not (apart.requires_grad or nll.requires_grad)
    inputs = [hidden, weight] + ([bias] if bias is not None else [])
    torch.testing.assert_close(
        torch.autograd.grad(3.0 * total, inputs), torch.autograd.grad(3.0 * expected, inputs), atol=1e-9, rtol=1e-7
    )


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_of_each_token(kind: DivergenceName) -> None:
    """Catches weights of another chunk, and a reported divergence that is weighted."""
    torch.manual_seed(0)
    hidden, taught = torch.randn(7, 4, dtype=torch.float64), torch.randn(7, 6, dtype=torch.float64)
    weight, teacher = torch.randn(9, 4, dtype=torch.float64), torch.randn(9, 6, dtype=torch.float64)
    weights = torch.rand(7, dtype=torch.float64)
    leaves = [weight.requires_grad_(), weight.detach().clone().requires_grad_()]
    total, apart, _ = losses(
        hidden, OutputHead(leaves[0]), taught, teacher, rule=DistillationRule(kind), weights=weights, chunk_tokens=2
    )
    each = [
        losses(hidden[row], OutputHead(leaves[1]), taught[row], teacher, rule=DistillationRule(kind))[0]
        for row in torch.arange(7).split(1)
    ]
    expected = sum(of * own for of, own in zip(weights, each, strict=True))
    torch.testing.assert_close([total, apart], [expected, sum(each).detach()])
    assert isinstance(expected, Tensor)
    torch.testing.assert_close(torch.autograd.grad(total, leaves[0])[0], torch.autograd.grad(expected, leaves[1])[0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_most_likely_tokens_and_the_rest_bound_the_divergence_from_below(kind: DivergenceName) -> None:
    """Catches tokens of another state, padding of the vocabulary among them, and a tail that is left out: with all
    tokens the divergence is whole, with fewer a mass that the student moves into the tail still costs."""
    torch.manual_seed(0)
    taught, teacher = torch.randn(7, 6, dtype=torch.float64), torch.randn(12, 6, dtype=torch.float64)
    teacher[10:] *= 9  # rows that are no tokens
    student = torch.randn(7, 12, dtype=torch.float64).log_softmax(-1)
    labels = torch.randint(0, 10, (7,))
    options = {"labels": labels, "rows": 10, "temperature": 0.5, "chunk_tokens": 3}
    logprobs = (taught @ teacher.t() / 0.5).log_softmax(-1)
    whole, last = divergence(student, teacher=logprobs, kind=kind, beta=0.3), torch.zeros(7, dtype=torch.float64)
    for k in (1, 4, 10):
        own, top, tokens = top_logprobs_from_hidden(taught, OutputHead(teacher), k=k, **options).split([1, k, k], dim=1)
        torch.testing.assert_close(own[:, 0], logprobs[torch.arange(7), labels])
        torch.testing.assert_close((top, tokens.long()), tuple(logprobs[:, :10].topk(k)))
        of_student = student.gather(1, tokens.long())
        bound = divergence(with_tail(of_student), teacher=with_tail(top), kind=kind, beta=0.3)
        assert (bound >= last - 1e-12).all() and (bound <= whole + 1e-12).all() and (bound > 0).all()
        last = bound
    teacher = teacher[:10]
    student = student[:, :10].log_softmax(-1)
    top, tokens = top_logprobs_from_hidden(taught, OutputHead(teacher), k=10, **options)[:, 1:].split(10, dim=1)
    found = divergence(with_tail(student.gather(1, tokens.long())), teacher=with_tail(top), kind=kind)
    logprobs = (taught @ teacher.t() / 0.5).log_softmax(-1)
    torch.testing.assert_close(found, divergence(student, teacher=logprobs, kind=kind), atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("learns", [True, False])
def test_the_logits_of_all_tokens_are_never_held(kind: DivergenceName, learns: bool) -> None:
    tokens, vocabulary, chunk = 64, 50, 8
    hidden = torch.randn(tokens, 4, requires_grad=learns)
    weight = torch.randn(vocabulary, 4, requires_grad=learns)
    with LargestTensor() as largest:
        rule = DistillationRule(kind, temperature=2.0, sft_coef=1.0)
        taught, teacher = torch.randn(tokens, 6), torch.randn(vocabulary, 6)
        total, *_ = losses(hidden, OutputHead(weight), taught, teacher, rule=rule, chunk_tokens=chunk)
        if learns:
            total.backward()
    assert largest.elements == chunk * vocabulary
    assert total.requires_grad == learns


@pytest.mark.parametrize("kind", KINDS)
def test_banned_tokens_are_in_no_distribution(kind: DivergenceName) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 4, dtype=torch.float64), torch.randn(9, 4, dtype=torch.float64)
    taught, teacher = torch.randn(5, 6, dtype=torch.float64), torch.randn(9, 6, dtype=torch.float64)
    rule, labels = DistillationRule(kind, sft_coef=1.0), torch.randint(0, 7, (5,))
    results = []
    for rows, banned in ((9, (7, 8)), (7, ())):
        leaf = hidden.clone().requires_grad_()
        heads = OutputHead(weight[:rows], banned=banned), OutputHead(teacher[:rows], banned=banned)
        found = divergence_from_hidden(
            leaf, heads[0], teacher_hidden=taught, teacher_head=heads[1], labels=labels, rule=rule
        )
        results.append([*found, *torch.autograd.grad(found[0], leaf)])
    torch.testing.assert_close(*results)


def test_a_larger_vocabulary_is_cut_to_the_smaller() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    taught, teacher, labels = torch.randn(5, 4), torch.randn(7, 4), torch.randint(0, 7, (5,))
    rule = DistillationRule("jensen_shannon")
    assert rule == DistillationRule("jensen_shannon", beta=0.5, temperature=1.0, sft_coef=0.0)
    more, less = (losses(hidden, OutputHead(rows), taught, teacher, labels, rule)[0] for rows in (weight, weight[:7]))
    assert torch.equal(more, less)
    (gradient,) = torch.autograd.grad(more, weight)
    assert gradient.shape == weight.shape and (gradient[7:] == 0).all() and (gradient[:7] != 0).any()


def test_tokens_must_be_the_same() -> None:
    with pytest.raises(ValueError, match="same tokens, got 3, 2 and 3"):
        losses(torch.randn(3, 4), OutputHead(torch.randn(9, 4)), torch.randn(2, 4), torch.randn(9, 4))


def test_a_long_bfloat16_batch_sums_its_gradients_in_float32() -> None:
    """512 chunks that add 1/2: bfloat16 would stop growing at 128."""
    weight, bias = (torch.zeros(*shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((2, 1), (2,)))
    ones, certain = torch.ones(512, 1, dtype=torch.bfloat16), torch.tensor([[100.0], [-100.0]]).bfloat16()
    losses(ones, OutputHead(weight, bias), ones, certain, chunk_tokens=1)[0].backward()
    for learned in (weight, bias):
        assert learned.grad is not None and learned.grad.flatten().tolist() == [-256.0, 256.0]
