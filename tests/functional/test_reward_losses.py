"""Listwise and labelled losses against their formulas in plain numbers, and by differences."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from hybrid_rlhf.functional.losses import LossSum, pairwise_reward_loss
from hybrid_rlhf.functional.reward_losses import labelled_reward_loss, listwise_reward_loss


def worse_of(ranks: list[list[int]]) -> Tensor:
    """[N, N] of the lists one below the other."""
    flat = [(number, rank) for number, ranks_ in enumerate(ranks) for rank in ranks_]
    return torch.tensor([[a == b and i < j for b, j in flat] for a, i in flat])


def plackett_luce(scores: list[float], ranks: list[int]) -> float:
    """-log of the chance that answers are drawn in the order of their ranks, which differ."""
    left = [score for _, score in sorted(zip(ranks, scores, strict=True))]
    total = 0.0
    while left:
        total -= left[0] - math.log(sum(math.exp(score) for score in left))
        left = left[1:]
    return total


def test_listwise_is_plackett_luce_over_lists_of_any_length() -> None:
    torch.manual_seed(0)
    ranks = [[2, 1, 3, 4], [1, 2], [3, 1, 2]]
    scores = torch.randn(9, dtype=torch.float64)
    found = listwise_reward_loss(scores, worse=worse_of(ranks), lists=3)
    parts = [scores[:4], scores[4:6], scores[6:]]
    expected = sum(plackett_luce(part.tolist(), rank) for part, rank in zip(parts, ranks, strict=True))
    assert float(found.total) == pytest.approx(expected)
    assert float(found.count) == 3


def test_ties_are_not_ordered() -> None:
    """Two firsts above a last: each is chosen from itself and the last, and neither from the other."""
    scores = torch.tensor([0.5, 2.0, -1.0], requires_grad=True)
    found = listwise_reward_loss(scores, worse=worse_of([[1, 1, 2]]), lists=1)
    assert found.total.item() == pytest.approx(math.log1p(math.exp(-1.5)) + math.log1p(math.exp(-3.0)))
    (gradient,) = torch.autograd.grad(found.total, [scores])
    alone = 1 / (1 + math.exp(1.5))
    assert float(gradient[0]) == pytest.approx(-alone), "the other first has no part in it"
    # one first above two lasts, which have no order either
    last = listwise_reward_loss(scores.detach(), worse=worse_of([[2, 1, 2]]), lists=1)
    assert float(last.total) == pytest.approx(-2.0 + math.log(math.exp(0.5) + math.exp(2.0) + math.exp(-1.0)))


def test_derivatives_are_those_by_differences() -> None:
    torch.manual_seed(1)
    scores = torch.randn(7, dtype=torch.float64, requires_grad=True)
    worse, labels = worse_of([[2, 1, 2, 3], [1, 3, 2]]), torch.tensor([1.0, 0, 0.3, 1, 0, 0.9, 0.5]).double()
    assert torch.autograd.gradcheck(lambda s: listwise_reward_loss(s, worse=worse, lists=2).total, [scores])
    assert torch.autograd.gradcheck(lambda s: labelled_reward_loss(s, labels=labels).total, [scores])


def test_labelled_is_binary_cross_entropy() -> None:
    scores, labels = [0.7, -0.2, 3.0, -1.0], [1.0, 0.0, 0.25, 0.0]
    found = labelled_reward_loss(torch.tensor(scores), labels=torch.tensor(labels))
    expected = binary_cross_entropy_with_logits(torch.tensor(scores), torch.tensor(labels), reduction="sum")
    torch.testing.assert_close(found.total, expected)
    told = {name: float(value) for name, value in found.stats.items()}
    assert told == pytest.approx({"accuracy": 3, "good": 1, "chosen_score": 0.7, "rejected_score": 1.8})
    assert float(found.count) == 4
    assert all(value.dtype is torch.float32 for value in found.stats.values())


def test_low_precision_is_computed_in_float32() -> None:
    """Scores near 256, where a step of bfloat16 is 2."""
    scores, worse = (256 + 2 * torch.arange(3.0)).bfloat16().requires_grad_(), worse_of([[2, 1, 3]])
    losses: list[Callable[[Tensor], LossSum]] = [
        lambda x: listwise_reward_loss(x, worse=worse, lists=1),
        lambda x: labelled_reward_loss(x, labels=torch.zeros(3)),
        lambda x: pairwise_reward_loss(x[:2], rejected=x[1:], margin=x[:2] / 512, centering_coef=0.1),
    ]
    for loss in losses:
        low, exact = loss(scores), loss(scores.double())
        torch.testing.assert_close(low.total, exact.total.float(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(low.stats, {name: value.float() for name, value in exact.stats.items()})
        assert low.count.dtype is torch.float32
        assert not any(tensor.requires_grad for tensor in (low.count, *low.stats.values()))


def test_empty_batches_are_0_and_keep_their_graph() -> None:
    scores = torch.randn(1, requires_grad=True)
    for loss in (
        listwise_reward_loss(scores, worse=torch.zeros(1, 1, dtype=torch.bool), lists=0),
        labelled_reward_loss(scores[:0], labels=torch.zeros(0)),
    ):
        assert float(loss.total) == 0 and float(loss.count) == 0
        assert torch.autograd.grad(loss.total, [scores])[0].tolist() == [0.0]


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"worse must be \[N, N\]"):
        listwise_reward_loss(torch.zeros(3), worse=torch.zeros(3, 1, dtype=torch.bool), lists=1)
    with pytest.raises(ValueError, match="labels .* shape of scores"):
        labelled_reward_loss(torch.zeros(3), labels=torch.zeros(1))
