from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid_rlhf.functional.losses import (
    accepted_completions,
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
        "sequence_sum": float(values[kept].sum()) / rows,
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
