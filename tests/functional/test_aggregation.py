from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid_rlhf.functional.losses import (
    accepted_completions,
    clipped_surrogate,
    correction_weights,
    length_weights,
    sampler_ratio,
)
from tests.support.strategies import masked_batch, poisoned

fast = settings(max_examples=50, deadline=None)


@fast
@given(masked_batch(tensors=2), st.booleans())
def test_weights_turn_the_mean_over_tokens_into_the_mean_that_is_named(
    batch: tuple[list[Tensor], Tensor], all_kept: bool
) -> None:
    """Over all tokens, or over the kept ones alone."""
    (values, chance), mask = batch
    kept = mask if all_kept else mask & (chance > 0)
    tokens, rows = float(mask.sum()), float(len(mask))
    some = {} if all_kept else {"kept": chance > 0, "kept_tokens": float(kept.sum())}
    means = [float(row[real].mean()) if real.any() else 0.0 for row, real in zip(values, kept, strict=True)]
    expected = {
        "token": float(values[kept].sum()) / max(float(kept.sum()), 1),
        "sequence": sum(means) / rows,
        "fixed": float(values[kept].sum()) / (7 * rows),
    }
    for name, wanted in expected.items():
        weights = length_weights(mask, normalization=name, tokens=tokens, sequences=rows, max_tokens=7, **some)  # type: ignore[arg-type]
        found = float((weights * values * kept).sum()) / max(tokens, 1)
        assert found == pytest.approx(wanted, abs=1e-5)


@fast
@given(masked_batch(tensors=2))
def test_correction_weights_are_ratios_cut_or_masked(batch: tuple[list[Tensor], Tensor]) -> None:
    (old, sampled), mask = batch
    ratio = sampler_ratio(poisoned(old, mask), sampler_logprobs=poisoned(sampled, mask), mask=mask)
    expected = (old - sampled).exp().to(ratio)
    torch.testing.assert_close(ratio[mask], expected[mask])
    truncated = correction_weights(ratio, how="truncate", clip=1.5, low=0.0)
    torch.testing.assert_close(truncated[mask], expected.clamp(max=1.5)[mask])
    masked = correction_weights(ratio, how="mask", clip=1.5, low=0.9)
    kept = (expected <= 1.5) & (expected >= 0.9)
    torch.testing.assert_close(masked[mask], torch.where(kept, expected, 0.0)[mask])
    same = sampler_ratio(old, sampler_logprobs=old, mask=mask)
    assert (correction_weights(same, how="mask", clip=1.0, low=1.0) == 1).all(), "on policy nothing is corrected"


@fast
@given(masked_batch(tensors=2))
def test_a_ratio_of_completions_is_the_product_of_its_tokens_or_their_geometric_mean(
    batch: tuple[list[Tensor], Tensor],
) -> None:
    (old, sampled), mask = batch
    given_ratios = {"sampler_logprobs": poisoned(sampled, mask), "mask": mask}
    token = sampler_ratio(poisoned(old, mask), **given_ratios)
    product = sampler_ratio(poisoned(old, mask), **given_ratios, of="sequence")
    geometric = sampler_ratio(poisoned(old, mask), **given_ratios, of="geometric")
    accepted = accepted_completions(token, mask=mask, low=0.8, high=1.25)
    for row, real in enumerate(mask):
        ratios = token[row, real].double()
        torch.testing.assert_close(product[row].double(), ratios.prod().expand(mask.shape[1]), rtol=1e-4, atol=1e-6)
        mean = ratios.log().mean().exp() if len(ratios) else torch.tensor(1.0).double()
        torch.testing.assert_close(geometric[row].double(), mean.expand(mask.shape[1]), rtol=1e-4, atol=1e-6)
        assert bool(accepted[row]) == all(0.8 <= ratio <= 1.25 for ratio in ratios.tolist())


def test_only_weights_of_sequences_give_the_gradient_of_the_trained_policy() -> None:
    """Completions of two tokens from another policy: the mean gradient over samples, beside that of the expected reward
    by enumeration."""
    generator = torch.Generator().manual_seed(0)
    vocabulary, samples = 3, 40_000
    first, second = (
        torch.randn(vocabulary, generator=generator),
        torch.randn(vocabulary, vocabulary, generator=generator),
    )
    theta = torch.cat([first[None], second]).requires_grad_()
    sampler = (theta + 0.5 * torch.randn(theta.shape, generator=generator)).detach()
    rewards = torch.randn(vocabulary, vocabulary, generator=generator)

    def logprobs_of(table: Tensor, tokens: Tensor) -> Tensor:
        logs = table.log_softmax(dim=1)
        return torch.stack([logs[0, tokens[:, 0]], logs[1 + tokens[:, 0], tokens[:, 1]]], dim=1)

    every = torch.cartesian_prod(torch.arange(vocabulary), torch.arange(vocabulary))
    value = (logprobs_of(theta, every).sum(dim=1).exp() * rewards.flatten()).sum()
    (exact,) = torch.autograd.grad(value, theta)
    chances = logprobs_of(sampler, every).sum(dim=1).exp()
    counts = torch.multinomial(chances, samples, replacement=True, generator=generator).bincount(minlength=len(every))
    old = logprobs_of(theta, every)
    mask = torch.ones_like(old)

    def errors(weights: Tensor) -> Tensor:
        """Distance of the estimate from the exact gradient, in standard errors."""
        gradients = []
        for row in range(len(every)):
            one = slice(row, row + 1)
            loss = clipped_surrogate(
                old[one] - old[one].detach(),
                advantages=rewards.flatten()[one, None].expand(1, 2),
                mask=mask[one],
                clip_low=0.2,
                clip_high=0.2,
                weights=weights[one],
            )
            gradients.append(-torch.autograd.grad(loss.total, theta, retain_graph=True)[0])
        stacked = torch.stack(gradients)
        share = (counts / samples)[:, None, None]
        mean = (share * stacked).sum(dim=0)
        deviation = ((share * stacked.square()).sum(dim=0) - mean.square()).sqrt()
        return (mean - exact).abs() / (deviation / samples**0.5)

    def corrected(of: str) -> Tensor:
        ratio = sampler_ratio(old, sampler_logprobs=logprobs_of(sampler, every), mask=mask, of=of)  # type: ignore[arg-type]
        return correction_weights(ratio, how="truncate", clip=1e6, low=0.0)

    assert float(errors(corrected("sequence")).max()) < 4
    for weights in (torch.ones_like(old), corrected("token"), corrected("geometric")):
        assert float(errors(weights).max()) > 10
