"""oneDNN's products against torch's, forward and backward, in every form that training has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybrid_rlhf.functional import operations
from hybrid_rlhf.functional.operations import linear

EVERY = {"x": True, "weight": True, "bias": True}


def inputs(shape: tuple[int, ...], outputs: int, *, bias: bool, learns: dict[str, bool]) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(0)

    def noise(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    made = {"x": noise(*shape), "weight": noise(outputs, shape[-1]), "bias": noise(outputs) if bias else None}
    return {
        name: None if tensor is None else tensor.requires_grad_(learns.get(name, False))
        for name, tensor in made.items()
    }


def passed(function: object, shape: tuple[int, ...], outputs: int, **how: object) -> dict[str, Tensor]:
    """Output and gradients."""
    given = inputs(shape, outputs, **how)  # type: ignore[arg-type]
    output = function(*given.values())  # type: ignore[operator]
    if output.requires_grad:
        (output * torch.arange(output.numel()).cos().view_as(output)).sum().backward()
    grads = {name: tensor.grad for name, tensor in given.items() if tensor is not None and tensor.grad is not None}
    return {"output": output.detach(), **grads}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Notes each product that goes to oneDNN."""
    seen: list[int] = []
    own = operations.onednn_linear

    def note(*arguments: Tensor) -> Tensor:
        seen.append(len(arguments))
        return own(*arguments)

    monkeypatch.setattr(operations, "onednn_linear", note)
    return seen


@pytest.mark.parametrize(
    ("shape", "outputs", "bias", "learns", "calls"),
    [
        ((300, 192), 130, True, EVERY, 3),
        ((1, 300, 192), 130, False, EVERY, 3),
        ((3, 100, 192), 130, True, {"weight": True, "bias": True}, 2),  # the first layer's input needs none
        ((3, 100, 192), 130, True, {"x": True}, 2),  # under adapters weights rest
        ((2, 150, 192), 130, True, {}, 1),
        ((1, 4096), 1100, False, EVERY, 3),  # a single row
    ],
)
def test_products_and_gradients_are_those_of_torch(
    counted: list[int], shape: tuple[int, ...], outputs: int, bias: bool, learns: dict[str, bool], calls: int
) -> None:
    how = {"bias": bias, "learns": learns}
    ours = passed(linear, shape, outputs, **how)
    theirs = passed(torch.nn.functional.linear, shape, outputs, **how)
    assert len(counted) == calls, "these are large enough"
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].shape == tensor.shape
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=2e-4)


def test_strided_inputs_and_gradients(counted: list[int]) -> None:
    wide = torch.randn(192, 600)
    x, weight = wide.t()[::2], torch.randn(192, 260).t()[::2]
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    output = linear(x, weight)
    output.sum().backward()  # its gradient is one number, expanded
    torch.testing.assert_close(output, x @ weight.t(), rtol=1e-5, atol=2e-4)
    torch.testing.assert_close(x.grad, weight.sum(dim=0).expand_as(x), rtol=1e-5, atol=2e-4)
    torch.testing.assert_close(weight.grad, x.sum(dim=0).expand_as(weight), rtol=1e-5, atol=2e-4)
    assert len(counted) == 3


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_what_onednn_is_no_help_with_stays_torchs_own(counted: list[int]) -> None:
    large, weight = torch.randn(300, 192), torch.randn(130, 192)
    alike = torch.nn.functional.linear
    for rows, dtype in ((0, torch.float32), (8, torch.float32), (300, torch.float64), (300, torch.bfloat16)):
        given = large[:rows].to(dtype), weight.to(dtype)
        assert torch.equal(linear(*given), alike(*given)), "too small, or of another dtype"
    operations.use_backend("torch")
    try:
        assert torch.equal(linear(large, weight), alike(large, weight)), "switched off"
    finally:
        operations.use_backend("onednn")
    with torch.backends.mkldnn.flags(enabled=False):
        assert torch.equal(linear(large, weight), alike(large, weight))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(large, weight).dtype == torch.bfloat16
    assert not counted
