from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid_rlhf.functional.advantages import gae, shaped_rewards
from hybrid_rlhf.functional.losses import KL_ESTIMATORS, kl_k1, kl_k3, kl_loss
from tests.support.strategies import masked_batch

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
    advantages, returns = gae(rewards, values=values, mask=mask, gamma=gamma, lam=lam)
    for row in range(len(mask)):
        keep = mask[row]
        slow = slow_gae(rewards[row][keep].tolist(), values[row][keep].tolist(), gamma, lam)
        torch.testing.assert_close(advantages[row][keep], torch.tensor(slow, dtype=torch.float64))
    torch.testing.assert_close(returns[mask], advantages[mask] + values[mask])
    assert (advantages[~mask] == 0).all() and (returns[~mask] == 0).all()


@fast
@given(masked_batch(), st.floats(0, 1), st.sampled_from([None, 0.5]))
def test_the_score_lands_on_the_last_response_token(
    batch: tuple[list[Tensor], Tensor], kl_coef: float, score_clip: float | None
) -> None:
    (kl,), mask = batch
    scores = torch.linspace(-2, 2, len(mask), dtype=torch.float64)
    rewards = shaped_rewards(scores=scores, kl=kl, mask=mask, kl_coef=kl_coef, score_clip=score_clip)
    for row in range(len(mask)):
        expected = [-kl_coef * value if keep else 0.0 for value, keep in zip(kl[row].tolist(), mask[row], strict=True)]
        if mask[row].any():
            score = float(scores[row])
            last = int(mask[row].nonzero().max())
            expected[last] += score if score_clip is None else max(-score_clip, min(score_clip, score))
        torch.testing.assert_close(rewards[row], torch.tensor(expected, dtype=torch.float64))


CLIPPED_PARTS = {
    "mixed signs keep them": ([-8.0, 4.0, -2.0, -4.0], -10.0, [-4.0, 2.0, -1.0, -2.0]),
    "what was not earned before is a part too": ([4.0, 0.0, 0.0], 20.0, [1.0, 0.0, 4.0]),
    "large parts of a small sum stay": ([30.0, -28.0], 2.0, [30.0, -28.0]),
    "a factor that bfloat16 would round": ([3.0, 4.0], 7.0, [15 / 7, 20 / 7]),
    "the clip itself": ([2.0, 3.0], 5.0, [2.0, 3.0]),
    "nothing": ([0.0, 0.0], 0.0, [0.0, 0.0]),
}


@pytest.mark.parametrize("name", CLIPPED_PARTS)
def test_a_clip_scales_all_parts_of_a_score_alike(name: str) -> None:
    parts, score, expected = CLIPPED_PARTS[name]
    steps = len(parts)
    kl, mask = torch.full((1, steps), 0.3), torch.ones(1, steps)
    arguments = {"kl": kl, "mask": mask, "kl_coef": 0.5, "earned": torch.tensor([parts])}
    found = shaped_rewards(scores=torch.tensor([score]).bfloat16(), score_clip=5.0, **arguments) + 0.5 * kl
    torch.testing.assert_close(found, torch.tensor([expected]), atol=1e-6, rtol=1e-6)
    assert float(found.sum()) == pytest.approx(max(-5.0, min(5.0, score)), abs=1e-5), "the sum is the clipped score"
    whole = shaped_rewards(scores=torch.tensor([score]), **arguments) + 0.5 * kl
    assert float(whole.sum()) == pytest.approx(score, abs=1e-5), "without a clip nothing is scaled"
    torch.testing.assert_close(whole[0, :-1], torch.tensor(parts[:-1]))


def test_scores_that_are_not_one_a_row_are_refused() -> None:
    with pytest.raises(ValueError, match="scores .* row of kl"):
        shaped_rewards(scores=torch.zeros(3), kl=torch.zeros(2, 4), mask=torch.ones(2, 4), kl_coef=0.1)


def distributions(*, seed: int, old_is_policy: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits of a policy over 6 tokens, and log-probs of it, of the policy that sampled and of a reference."""
    torch.manual_seed(seed)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    policy = torch.log_softmax(logits, 0)
    old, reference = (torch.log_softmax(torch.randn(6, dtype=torch.float64), 0) for _ in range(2))
    return logits, policy, policy.detach() if old_is_policy else old, reference


@pytest.mark.parametrize("old_is_policy", [True, False])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_gradient_of_the_kl_in_the_loss_is_that_of_the_exact_kl(estimator: str, old_is_policy: bool) -> None:
    """Every token counts with its probability under the policy that sampled, so that nothing is left to chance."""
    logits, policy, old, reference = distributions(seed=1, old_is_policy=old_is_policy)
    exact = (policy.exp() * (policy - reference)).sum()
    term = kl_loss(policy, old_logprobs=old, ref_logprobs=reference, estimator=estimator)  # type: ignore[arg-type]
    found = (old.exp() * term).sum()
    expected = torch.autograd.grad(exact, logits, retain_graph=True)[0]
    assert float(expected.abs().max()) > 0.1
    torch.testing.assert_close(torch.autograd.grad(found, logits)[0], expected)
    torch.testing.assert_close((policy.exp() * kl_k1(policy, ref_logprobs=reference)).sum(), exact)
    if estimator == "k3":
        torch.testing.assert_close(found, exact)


def test_k3_is_bounded_and_its_gradient_goes_on() -> None:
    """As verl: log-ratios end at +-20, values at 10; unbounded, 19.9 would give 4.4e8."""
    apart = torch.tensor([-200.0, -19.9, -3.0, 2.0, 8.0, 19.9, 200.0], requires_grad=True)
    reference = torch.zeros_like(apart)
    values = kl_k3(apart, ref_logprobs=reference)
    exact = (-apart).exp() - 1 + apart
    torch.testing.assert_close(values[3:5], exact[3:5])
    assert values.tolist()[:3] == [10.0] * 3 and values.tolist()[5:] == [10.0] * 2
    old = apart.detach()
    term = kl_loss(apart, old_logprobs=old, ref_logprobs=reference, estimator="k3")
    assert torch.equal(term, values)
    torch.testing.assert_close(torch.autograd.grad(term.sum(), apart)[0], old)


def test_the_weight_of_the_kl_in_the_loss_ends_with_that_of_the_policy_loss() -> None:
    logprobs = torch.zeros(3, requires_grad=True)
    old = torch.tensor([0.0, -1.0, -300.0])
    term = kl_loss(logprobs, old_logprobs=old, ref_logprobs=torch.full((3,), -2.0), estimator="k2")
    torch.testing.assert_close(term, 2.0 * torch.tensor([0.0, 1.0, 20.0]).exp())
    assert torch.isfinite(torch.autograd.grad(term.sum(), logprobs)[0]).all()


def test_kl_estimators_agree_with_the_exact_divergence_in_expectation() -> None:
    torch.manual_seed(0)
    policy = torch.log_softmax(torch.randn(6, dtype=torch.float64), 0)
    reference = torch.log_softmax(torch.randn(6, dtype=torch.float64), 0)
    exact = (policy.exp() * (policy - reference)).sum()
    values = {name: estimator(policy, ref_logprobs=reference) for name, estimator in KL_ESTIMATORS.items()}
    for name in ("k1", "k3"):  # the unbiased ones
        torch.testing.assert_close((policy.exp() * values[name]).sum(), exact)
    for name in ("k2", "k3"):
        assert (values[name] >= 0).all()
    assert (kl_k3(policy, ref_logprobs=policy) == 0).all()
    torch.testing.assert_close(values["k2"], 0.5 * (policy - reference) ** 2)
