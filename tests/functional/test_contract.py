"""What every masked function promises, whatever it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from hybrid_rlhf.functional.advantages import gae, shaped_rewards
from hybrid_rlhf.functional.losses import (
    LossSum,
    bounded_ratio,
    clipped_surrogate,
    kl_k1,
    kl_k2,
    kl_k3,
    ppo_value_loss,
    sft_loss,
)
from hybrid_rlhf.functional.masking import keep, masked_mean, masked_sum, masked_var, masked_whiten
from tests.support.strategies import masked_batch, poisoned

Function = Callable[[Sequence[Tensor], Tensor], Sequence[Tensor]]


def parts(loss: LossSum) -> list[Tensor]:
    return [loss.total, loss.count, *loss.stats.values()]


def policy(t: Sequence[Tensor], mask: Tensor, dual_clip: float | None) -> LossSum:
    log_ratio = keep(t[0], mask) - keep(t[1], mask)
    return clipped_surrogate(log_ratio, advantages=t[2], mask=mask, clip_low=0.2, clip_high=0.3, dual_clip=dual_clip)


LOSSES: dict[str, Callable[[Sequence[Tensor], Tensor], LossSum]] = {
    "sft_loss": lambda t, mask: sft_loss(t[0], mask=mask),
    "sft_loss by probability": lambda t, mask: sft_loss(-t[0].abs(), mask=mask, by_probability=True),
    "clipped_surrogate": lambda t, mask: policy(t, mask, None),
    "clipped_surrogate with dual clip": lambda t, mask: policy(t, mask, 1.5),
    "ppo_value_loss": lambda t, mask: ppo_value_loss(t[0], old_values=t[1], returns=t[2], mask=mask, clip=0.2),
}
FUNCTIONS: dict[str, Function] = {
    "masked_sum": lambda t, mask: [masked_sum(t[0], mask=mask), masked_sum(t[0], mask=mask, dim=1)],
    "masked_mean": lambda t, mask: [masked_mean(t[0], mask=mask), masked_mean(t[0], mask=mask, dim=0)],
    "masked_var": lambda t, mask: [masked_var(t[0], mask=mask)],
    "masked_whiten": lambda t, mask: [masked_whiten(t[0], mask=mask, shift_mean=shift) for shift in (True, False)],
    "bounded_ratio": lambda t, mask: [bounded_ratio(t[0], mask=mask)],
    "gae": lambda t, mask: gae(t[0], values=t[1], mask=mask, gamma=0.9, lam=0.8),
    "shaped_rewards": lambda t, mask: [
        shaped_rewards(scores=torch.ones(len(t[0])).to(t[0]), kl=t[0], mask=mask, kl_coef=0.1)
    ],
    **{name: lambda t, mask, loss=loss: parts(loss(t, mask)) for name, loss in LOSSES.items()},
}
every = pytest.mark.parametrize("name", FUNCTIONS)


def results(name: str, tensors: Sequence[Tensor], mask: Tensor) -> tuple[Sequence[Tensor], list[Tensor | None]]:
    """A function's outputs, and the gradient in each input of a sum that weighs every output's entries unalike."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    found = FUNCTIONS[name](leaves, mask)
    total = sum((out * torch.arange(1, out.numel() + 1).view(out.shape)).sum() for out in found if out.requires_grad)
    assert isinstance(total, Tensor)
    return found, list(torch.autograd.grad(total, leaves, allow_unused=True))


@every
@settings(max_examples=20, deadline=None)
@given(masked_batch(tensors=3))
def test_a_value_under_a_zero_mask_changes_neither_result_nor_gradient(
    name: str, batch: tuple[list[Tensor], Tensor]
) -> None:
    tensors, mask = batch
    found, gradients = results(name, [poisoned(tensor, mask) for tensor in tensors], mask)
    expected, clean = results(name, tensors, mask)
    for out, clean_out in zip(found, expected, strict=True):
        assert torch.isfinite(out).all() and torch.equal(out, clean_out)
    for gradient, clean_gradient in zip(gradients, clean, strict=True):
        assert (gradient is None) == (clean_gradient is None)
        if gradient is not None and clean_gradient is not None:
            assert torch.equal(gradient, clean_gradient)
            assert (gradient[~mask] == 0).all()


@every
def test_masks_of_numbers_are_masks_of_bools(name: str) -> None:
    torch.manual_seed(0)
    tensors, mask = torch.randn(3, 4, 5).unbind(), torch.rand(4, 5) > 0.5
    for kind in (torch.long, torch.float32):
        for found, expected in zip(
            FUNCTIONS[name](tensors, mask.to(kind)), FUNCTIONS[name](tensors, mask), strict=True
        ):
            assert torch.equal(found, expected)


@every
def test_low_precision_is_computed_in_float32_and_float64_stays(name: str) -> None:
    """Values around 256, where a step of bfloat16 is 2, would show any arithmetic in it."""
    torch.manual_seed(0)
    low = [(256 + torch.randint(0, 3, (4, 5)) * 2).bfloat16() for _ in range(3)]
    mask = torch.rand(4, 5) > 0.3
    exact = FUNCTIONS[name]([tensor.double() for tensor in low], mask)
    for number, (found, double) in enumerate(zip(FUNCTIONS[name](low, mask), exact, strict=True)):
        assert found.dtype is torch.float32
        assert number > 0 or double.dtype is torch.float64
        torch.testing.assert_close(found.double(), double.double(), rtol=1e-4, atol=1e-3)


@every
def test_a_mask_that_would_broadcast_is_refused(name: str) -> None:
    tensors = torch.randn(3, 4, 4).unbind()
    with pytest.raises(ValueError, match="mask .* shape of its values"):
        FUNCTIONS[name](tensors, torch.ones(1, 4))


@pytest.mark.parametrize("name", LOSSES)
def test_only_the_total_of_a_loss_carries_a_gradient(name: str) -> None:
    tensors = [tensor.requires_grad_() for tensor in torch.randn(3, 4, 5).unbind()]
    loss = LOSSES[name](tensors, torch.ones(4, 5))
    assert loss.total.requires_grad and loss.total.shape == loss.count.shape == ()
    assert not loss.count.requires_grad and loss.count.dtype is torch.float32
    assert all(stat.shape == () and not stat.requires_grad for stat in loss.stats.values())


@pytest.mark.parametrize("estimator", [kl_k1, kl_k2, kl_k3])
def test_divergences_are_computed_in_float32(estimator: Callable[..., Tensor]) -> None:
    logprobs, ref_logprobs = (torch.rand(2, 3).bfloat16() for _ in range(2))
    found = estimator(logprobs, ref_logprobs=ref_logprobs)
    assert found.dtype is torch.float32
    exact = estimator(logprobs.double(), ref_logprobs=ref_logprobs.double())
    assert exact.dtype is torch.float64
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)
