from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid_rlhf.functional.advantages import gae, shaped_rewards
from hybrid_rlhf.functional.divergences import kl_k1, kl_k2, kl_k3
from tests.functional.strategies import masked_batch, poisoned

fast = settings(max_examples=60, deadline=None)
shares = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def slow_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Eq. 16 of the paper as the double sum it is, on one compact row."""
    deltas = [
        reward + gamma * (values[t + 1] if t + 1 < len(values) else 0.0) - values[t] for t, reward in enumerate(rewards)
    ]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


@fast
@given(masked_batch(tensors=2), shares, shares)
def test_gae_is_the_double_sum_over_each_row_without_its_gaps(
    batch: tuple[list[Tensor], Tensor], gamma: float, lam: float
) -> None:
    (rewards, values), mask = batch
    advantages, returns = gae(poisoned(rewards, mask), values=poisoned(values, mask), mask=mask, gamma=gamma, lam=lam)
    for row in range(len(mask)):
        keep = mask[row]
        slow = slow_gae(rewards[row][keep].tolist(), values[row][keep].tolist(), gamma, lam)
        torch.testing.assert_close(advantages[row][keep], torch.tensor(slow, dtype=torch.float64))
    torch.testing.assert_close(returns[mask], advantages[mask] + values[mask])
    assert (advantages[~mask] == 0).all() and (returns[~mask] == 0).all()


def test_gae_at_its_limits() -> None:
    torch.manual_seed(0)
    rewards, values = torch.randn(2, 5, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    mask = torch.ones(2, 5)
    advantages, returns = gae(rewards, values=values, mask=mask, gamma=1.0, lam=1.0)
    torch.testing.assert_close(returns, rewards.flip(1).cumsum(1).flip(1))  # reward to go
    advantages, _ = gae(rewards, values=values, mask=mask, gamma=0.9, lam=0.0)
    following = torch.cat([values[:, 1:], torch.zeros(2, 1, dtype=torch.float64)], dim=1)
    torch.testing.assert_close(advantages, rewards + 0.9 * following - values)  # TD error


@fast
@given(masked_batch(), st.floats(0, 1), st.sampled_from([None, 0.5]))
def test_the_score_lands_on_the_last_response_token(
    batch: tuple[list[Tensor], Tensor], kl_coef: float, score_clip: float | None
) -> None:
    (kl,), mask = batch
    scores = torch.linspace(-2, 2, len(mask), dtype=torch.float64)
    rewards = shaped_rewards(scores=scores, kl=poisoned(kl, mask), mask=mask, kl_coef=kl_coef, score_clip=score_clip)
    for row in range(len(mask)):
        expected = [-kl_coef * value if keep else 0.0 for value, keep in zip(kl[row].tolist(), mask[row], strict=True)]
        if mask[row].any():
            score = float(scores[row])
            last = int(mask[row].nonzero().max())
            expected[last] += score if score_clip is None else max(-score_clip, min(score_clip, score))
        torch.testing.assert_close(rewards[row], torch.tensor(expected, dtype=torch.float64))


CLIPPED_PARTS = {
    "ten turns of 1": ([1.0] * 10, 10.0, [0.5] * 10),
    "ten turns of -1": ([-1.0] * 10, -10.0, [-0.5] * 10),
    "mixed signs keep them": ([8.0, -4.0, 2.0, 4.0], 10.0, [4.0, -2.0, 1.0, 2.0]),
    "what was not earned before is a part too": ([4.0, 0.0, 0.0], 20.0, [1.0, 0.0, 4.0]),
    "large parts of a small sum stay": ([30.0, -28.0], 2.0, [30.0, -28.0]),
    "the clip itself": ([2.0, 3.0], 5.0, [2.0, 3.0]),
    "nothing": ([0.0, 0.0], 0.0, [0.0, 0.0]),
}


@pytest.mark.parametrize("name", CLIPPED_PARTS)
def test_a_clip_scales_all_parts_of_a_score_alike(name: str) -> None:
    parts, score, expected = CLIPPED_PARTS[name]
    steps = len(parts)
    kl, mask = torch.full((1, steps), 0.3), torch.ones(1, steps)
    arguments = {"kl": kl, "mask": mask, "kl_coef": 0.5, "earned": torch.tensor([parts])}
    found = shaped_rewards(scores=torch.tensor([score]), score_clip=5.0, **arguments) + 0.5 * kl
    torch.testing.assert_close(found, torch.tensor([expected]), atol=1e-6, rtol=1e-6)
    assert float(found.sum()) == pytest.approx(max(-5.0, min(5.0, score)), abs=1e-5), "the sum is the clipped score"
    whole = shaped_rewards(scores=torch.tensor([score]), **arguments) + 0.5 * kl
    assert float(whole.sum()) == pytest.approx(score, abs=1e-5), "without a clip nothing is scaled"
    torch.testing.assert_close(whole[0, :-1], torch.tensor(parts[:-1]))


def test_scores_that_are_not_one_a_row_are_refused() -> None:
    with pytest.raises(ValueError, match="a score a row"):
        shaped_rewards(scores=torch.zeros(3), kl=torch.zeros(2, 4), mask=torch.ones(2, 4), kl_coef=0.1)


def test_kl_estimators_agree_with_the_exact_divergence_in_expectation() -> None:
    torch.manual_seed(0)
    policy = torch.log_softmax(torch.randn(6, dtype=torch.float64), 0)
    reference = torch.log_softmax(torch.randn(6, dtype=torch.float64), 0)
    exact = (policy.exp() * (policy - reference)).sum()
    for estimator in (kl_k1, kl_k3):  # the unbiased ones
        torch.testing.assert_close((policy.exp() * estimator(policy, ref_logprobs=reference)).sum(), exact)
    for estimator in (kl_k2, kl_k3):
        assert (estimator(policy, ref_logprobs=reference) >= 0).all()
    assert (kl_k3(policy, ref_logprobs=policy) == 0).all()
    torch.testing.assert_close(kl_k2(policy, ref_logprobs=reference), 0.5 * (policy - reference) ** 2)
