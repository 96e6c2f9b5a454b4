from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from hybrid_rlhf.functional.losses import correction_weights, length_weights
from tests.support.strategies import masked_batch, poisoned

fast = settings(max_examples=50, deadline=None)


@fast
@given(masked_batch())
def test_weights_turn_the_mean_over_tokens_into_the_mean_that_is_named(batch: tuple[list[Tensor], Tensor]) -> None:
    (values,), mask = batch
    tokens, rows = float(mask.sum()), float(len(mask))
    settings = {"tokens": tokens, "sequences": rows, "max_tokens": 7}
    means = [float(row[real].mean()) if real.any() else 0.0 for row, real in zip(values, mask, strict=True)]
    expected = {
        "token": float(values[mask].sum()) / max(tokens, 1),
        "sequence": sum(means) / rows,
        "fixed": float(values[mask].sum()) / (7 * rows),
    }
    for name, wanted in expected.items():
        weights = length_weights(mask, normalization=name, **settings)  # type: ignore[arg-type]
        found = float((weights * values * mask).sum()) / max(tokens, 1)
        assert found == pytest.approx(wanted, abs=1e-5)


@fast
@given(masked_batch(tensors=2))
def test_means_may_be_over_the_kept_tokens_alone(batch: tuple[list[Tensor], Tensor]) -> None:
    (values, chance), mask = batch
    kept = mask & (chance > 0)
    settings = {
        "tokens": float(mask.sum()),
        "sequences": float(len(mask)),
        "max_tokens": 7,
        "kept": chance > 0,
        "kept_tokens": float(kept.sum()),
    }
    means = [float(row[real].mean()) if real.any() else 0.0 for row, real in zip(values, kept, strict=True)]
    expected = {
        "token": float(values[kept].sum()) / max(float(kept.sum()), 1),
        "sequence": sum(means) / len(mask),
        "fixed": float(values[kept].sum()) / (7 * len(mask)),
    }
    for name, wanted in expected.items():
        weights = length_weights(mask, normalization=name, **settings)  # type: ignore[arg-type]
        found = float((weights * values * kept).sum()) / max(float(mask.sum()), 1)
        assert found == pytest.approx(wanted, abs=1e-5)


@fast
@given(masked_batch(tensors=2))
def test_correction_weights_are_ratios_cut_or_masked(batch: tuple[list[Tensor], Tensor]) -> None:
    (old, sampled), mask = batch
    ratio = (old - sampled).exp()
    arguments = {"sampler_logprobs": poisoned(sampled, mask), "mask": mask, "clip": 1.5}
    truncated = correction_weights(poisoned(old, mask), how="truncate", **arguments)  # type: ignore[arg-type]
    torch.testing.assert_close(truncated[mask], ratio.clamp(max=1.5)[mask].to(truncated))
    masked = correction_weights(poisoned(old, mask), how="mask", **arguments)  # type: ignore[arg-type]
    kept = (ratio <= 1.5) & (ratio >= 1 / 1.5)
    torch.testing.assert_close(masked[mask], torch.where(kept, ratio, 0.0)[mask].to(masked))
    lower = correction_weights(poisoned(old, mask), how="mask", low=0.9, **arguments)  # type: ignore[arg-type]
    kept = (ratio <= 1.5) & (ratio >= 0.9)
    torch.testing.assert_close(lower[mask], torch.where(kept, ratio, 0.0)[mask].to(lower))
    same = correction_weights(old, sampler_logprobs=old, mask=mask, how="mask", clip=1.0)
    assert (same == 1).all(), "on policy nothing is corrected"
