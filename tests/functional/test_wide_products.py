from __future__ import annotations

import pytest
import torch

from hybrid_rlhf.functional import operations
from hybrid_rlhf.functional.distillation import OutputHead
from hybrid_rlhf.functional.logprobs import logprobs_from_hidden, token_logprobs
from hybrid_rlhf.functional.operations import add_wide_product, wide_linear

DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
LOW = [torch.bfloat16, torch.float16]


def factors(dtype: torch.dtype, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, a weight and a bias whose products are of the size of logits."""
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(11, 64), torch.randn(50, 64), torch.randn(50)
    return hidden.to(device, dtype), weight.to(device, dtype), bias.to(device, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [*LOW, torch.float32, torch.float64])
def test_products_of_low_precision_are_not_rounded(
    dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "CONVERTED_ROWS", 16)
    hidden, weight, bias = factors(dtype, device)
    exact = hidden.double() @ weight.double().t()
    for given in (None, bias):
        expected = exact if given is None else exact + given.double()
        found = wide_linear(hidden, weight, given)
        assert found.dtype is torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-5)
        out = torch.full_like(found, torch.nan)
        assert wide_linear(hidden, weight, given, out=out) is out and torch.equal(out, found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
def test_products_add_up(dtype: torch.dtype, device: str) -> None:
    hidden, weight, _ = factors(dtype, device)
    total = torch.ones(11, 50, device=device)
    add_wide_product(total, hidden, weight.t())
    exact = 1 + hidden.double() @ weight.double().t()
    rounded = device == "cpu" and dtype in LOW
    torch.testing.assert_close(total.double(), exact, atol=0.2 if rounded else 1e-4, rtol=0.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LOW)
def test_log_probs_of_a_low_precision_head_are_those_of_float32_logits(dtype: torch.dtype, device: str) -> None:
    hidden, weight, bias = factors(dtype, device)
    labels = torch.arange(11, device=device)
    low = [tensor.requires_grad_() for tensor in (hidden, weight)]
    exact = [tensor.detach().float().requires_grad_() for tensor in low]
    logits = exact[0] @ exact[1].t() + bias.float()
    expected = token_logprobs(logits[None], labels=labels[None])[0]
    found, _ = logprobs_from_hidden(hidden, weight=weight, bias=bias, labels=labels, chunk_tokens=4)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for one, other in zip(
        torch.autograd.grad(found.sum(), low), torch.autograd.grad(expected.sum(), exact), strict=True
    ):
        assert float((one.float() - other).norm() / other.norm()) < 5e-3
    rounded, _ = logprobs_from_hidden(
        hidden, weight=weight, bias=bias, labels=labels, chunk_tokens=4, float32_logits=False
    )
    assert 1e-3 < float((rounded - expected).abs().max()) < 0.2, "what rounding costs"
    head = OutputHead(weight, bias)
    torch.testing.assert_close(head.logits(hidden, 50), logits, atol=1e-4, rtol=1e-5)
    plain = OutputHead(weight, bias, float32_logits=False).logits(hidden, 50)
    assert plain.dtype is torch.float32 and torch.equal(plain, torch.nn.functional.linear(hidden, weight, bias).float())


def test_the_gradient_of_a_low_precision_head_is_that_of_float32_logits() -> None:
    hidden, weight, _ = factors(torch.bfloat16)
    labels = torch.arange(11)
    found = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    logprobs_from_hidden(found[0], weight=found[1], labels=labels, chunk_tokens=4)[0].sum().backward()
    exact = [tensor.float().requires_grad_() for tensor in (hidden, weight)]
    token_logprobs((exact[0] @ exact[1].t())[None], labels=labels[None]).sum().backward()
    for one, other in zip(found, exact, strict=True):
        assert one.grad is not None and other.grad is not None
        assert float((one.grad.float() - other.grad).norm() / other.grad.norm()) < 5e-3
