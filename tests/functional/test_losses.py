from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid_rlhf.functional.losses import (
    LossSum,
    clipped_surrogate,
    pairwise_reward_loss,
    policy_sum,
    ppo_value_loss,
    sft_loss,
)
from tests.support.strategies import masked_batch, poisoned

fast = settings(max_examples=50, deadline=None)


@fast
@given(masked_batch())
def test_sft_loss_is_the_sum_over_tokens_that_count(batch: tuple[list[Tensor], Tensor]) -> None:
    (logprobs,), mask = batch
    loss = sft_loss(logprobs, mask=mask)
    torch.testing.assert_close(loss.total, -logprobs[mask].sum())
    assert int(loss.count) == int(mask.sum())


@fast
@given(masked_batch())
def test_the_loss_by_probability_has_the_gradient_of_minus_the_probability(batch: tuple[list[Tensor], Tensor]) -> None:
    """DFT: p is a constant factor of -log p, and p d(log p) = dp."""
    (logprobs,), mask = batch
    logprobs = (-logprobs.abs()).detach().requires_grad_()
    loss = sft_loss(logprobs, mask=mask, by_probability=True)
    torch.testing.assert_close(loss.total, -(logprobs.exp() * logprobs)[mask].sum())
    torch.testing.assert_close(loss.stats["nll"], -logprobs.detach()[mask].sum())
    expected = torch.autograd.grad(-logprobs[mask].exp().sum(), logprobs, allow_unused=True)
    torch.testing.assert_close(torch.autograd.grad(loss.total, logprobs), expected)


@fast
@given(st.integers(0, 6), st.booleans(), st.sampled_from([0.0, 0.1]))
def test_pairwise_loss_is_bradley_terry(pairs: int, with_margin: bool, centering: float) -> None:
    torch.manual_seed(pairs)
    chosen, rejected = torch.randn(2, pairs, dtype=torch.float64).round()  # with ties
    margin = torch.rand(pairs, dtype=torch.float64) if with_margin else None
    loss = pairwise_reward_loss(chosen, rejected=rejected, margin=margin, centering_coef=centering)
    expected = 0.0
    for i in range(pairs):
        lead = float(chosen[i] - rejected[i]) - (float(margin[i]) if margin is not None else 0.0)
        expected += math.log1p(math.exp(-lead)) + centering * float(chosen[i] + rejected[i]) ** 2
    assert float(loss.total) == pytest.approx(expected)
    assert int(loss.count) == pairs
    told = {name: float(value) for name, value in loss.stats.items()}
    sums = {"margin": chosen - rejected, "chosen_score": chosen, "rejected_score": rejected}
    expected_stats = {name: float(values.sum()) for name, values in sums.items()}
    assert told == pytest.approx({"accuracy": int((chosen > rejected).sum()), **expected_stats})


def slow_policy_loss(
    new: float, old: float, advantage: float, low: float, high: float, dual: float | None
) -> tuple[float, bool]:
    ratio = math.exp(new - old)
    surrogate = min(ratio * advantage, max(1 - low, min(1 + high, ratio)) * advantage)
    clipped = surrogate < ratio * advantage
    if dual is not None and advantage < 0:
        surrogate = max(surrogate, dual * advantage)
    return -surrogate, clipped


@fast
@given(masked_batch(tensors=4), st.sampled_from([0.1, 0.2]), st.sampled_from([0.2, 0.3]), st.sampled_from([None, 1.5]))
def test_policy_loss_is_the_clipped_surrogate(
    batch: tuple[list[Tensor], Tensor], low: float, high: float, dual: float | None
) -> None:
    (new, old, advantages, weights), mask = batch
    loss = clipped_surrogate(
        new - old,
        advantages=advantages,
        mask=mask,
        clip_low=low,
        clip_high=high,
        dual_clip=dual,
        weights=poisoned(weights, mask),
    )
    slow = [
        slow_policy_loss(float(n), float(o), float(a), low, high, dual)
        for n, o, a in zip(new[mask], old[mask], advantages[mask], strict=True)
    ]
    weighted = [weight * value for weight, (value, _) in zip(weights[mask].tolist(), slow, strict=True)]
    assert float(loss.total) == pytest.approx(sum(weighted), abs=1e-9)
    assert float(loss.stats["clipfrac"]) == sum(clipped for _, clipped in slow)
    assert float(loss.stats["ratio"]) == pytest.approx(float((new - old)[mask].exp().sum()))
    assert float(loss.stats["approxkl"]) == pytest.approx(float(0.5 * ((new - old)[mask] ** 2).sum()), abs=1e-9)
    assert float(policy_sum(torch.ones_like(new), log_ratio=new - old, mask=mask).stats["clipfrac"]) == 0


@pytest.mark.parametrize(
    ("advantage", "dual_clip", "total"),
    [(1.0, None, -1.2), (0.0, None, 0.0), (-1.0, 3.0, 3.0), (-1.0, None, math.exp(20))],
)
def test_a_ratio_that_overflows_leaves_a_clipped_loss_and_its_gradient_finite(
    advantage: float, dual_clip: float | None, total: float
) -> None:
    logprobs = torch.zeros(1, 1, requires_grad=True)
    loss = clipped_surrogate(
        logprobs + 200,
        advantages=torch.full((1, 1), advantage),
        mask=torch.ones(1, 1),
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=dual_clip,
    )
    loss.total.backward()
    assert loss.total.item() == pytest.approx(total)
    assert logprobs.grad is not None and logprobs.grad.item() == 0


def test_a_dual_clip_that_would_cut_into_the_surrogate_is_refused() -> None:
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match="dual_clip must be above 1"):
        clipped_surrogate(one, advantages=one, mask=one, clip_low=0.2, clip_high=0.2, dual_clip=1.0)


@fast
@given(masked_batch(tensors=3), st.sampled_from([None, 0.0, 0.3]))
def test_value_loss_takes_the_worse_of_plain_and_clipped(
    batch: tuple[list[Tensor], Tensor], clip: float | None
) -> None:
    (values, old, returns), mask = batch
    loss = ppo_value_loss(values, old_values=old, returns=returns, mask=mask, clip=clip)
    expected = 0.0
    for v, o, r in zip(values[mask].tolist(), old[mask].tolist(), returns[mask].tolist(), strict=True):
        held = o + max(-clip, min(clip, v - o)) if clip else v
        expected += 0.5 * max((v - r) ** 2, (held - r) ** 2)
    assert float(loss.total) == pytest.approx(expected)
    squared_error = ((returns - values)[mask] ** 2).sum()
    torch.testing.assert_close(loss.stats["squared_error"], squared_error)
    if not clip:
        assert loss.stats["clipfrac"] == 0


def losses(new: Tensor, old: Tensor, other: Tensor, mask: Tensor) -> dict[str, LossSum]:
    return {
        "sft": sft_loss(new, mask=mask),
        "policy": clipped_surrogate(new - old, advantages=other, mask=mask, clip_low=0.2, clip_high=0.2),
        "value": ppo_value_loss(new, old_values=old, returns=other, mask=mask, clip=0.2),
        "pairwise": pairwise_reward_loss(new[mask], rejected=old[mask], margin=other[mask], centering_coef=0.1),
    }


@fast
@given(masked_batch(tensors=3))
def test_no_split_of_the_rows_changes_a_loss_or_its_gradient(batch: tuple[list[Tensor], Tensor]) -> None:
    (new, old, other), mask = batch
    new.requires_grad_()
    whole = losses(new, old, other, mask)
    parts = [losses(*(t[i : i + 1] for t in (new, old, other, mask))) for i in range(len(mask))]
    for name, loss in whole.items():
        total = sum(part[name].total for part in parts)
        torch.testing.assert_close(total, loss.total)
        assert sum(int(part[name].count) for part in parts) == int(loss.count)
        for stat, value in loss.stats.items():
            torch.testing.assert_close(sum(part[name].stats[stat] for part in parts), value)
        torch.testing.assert_close(
            torch.autograd.grad(total, new, retain_graph=True), torch.autograd.grad(loss.total, new, retain_graph=True)
        )
