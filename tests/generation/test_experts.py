"""Experts with biases and clamped gates, as gpt-oss has them, against transformers' module."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

from hybrid_rlhf.generation.architecture.model_description import Experts
from hybrid_rlhf.generation.model.experts import RoutedExperts
from hybrid_rlhf.generation.model.layers import InferenceLinear
from hybrid_rlhf.generation.weights import picks

COUNT, HIDDEN = 6, 16
KIND = Experts(count=COUNT, per_token=2, router="softmax_of_chosen", clamp=7.0, transposed=True, alternating=True)


@pytest.fixture
def module() -> GptOssMLP:
    """Gates and up beyond the clamp on both sides."""
    torch.manual_seed(0)
    config = GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=24, num_local_experts=COUNT, num_experts_per_tok=2, swiglu_limit=7.0
    )
    module = GptOssMLP(config)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=1.0)
    return module.eval()


def experts_of(module: GptOssMLP, mine: range, *, pack: bool) -> RoutedExperts:
    """As the loader makes them."""
    weights = {name: parameter.detach() for name, parameter in module.named_parameters()}

    def picked(name: str, *, transposed: bool) -> Tensor:
        return picks.experts_of(mine, transposed=transposed, alternating="gate_up" in name)(weights[f"experts.{name}"])

    return RoutedExperts(
        KIND,
        router=weights["router.weight"],
        up=picked("gate_up_proj", transposed=True),
        down=picked("down_proj", transposed=True),
        mine=mine,
        correction=None,
        product=partial(InferenceLinear, pack=True) if pack else None,
        router_bias=weights["router.bias"],
        up_bias=picked("gate_up_proj_bias", transposed=False),
        down_bias=picked("down_proj_bias", transposed=False),
    )


def wrong_activation(both: Tensor) -> Tensor:
    raise AssertionError("these experts have an activation of their own")


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@torch.no_grad()
def test_experts_of_gpt_oss_compute_as_the_module(module: GptOssMLP, ranks: int, pack: bool) -> None:
    """The ranks' parts add up to the whole; a bias counts once."""
    x = torch.randn(40, HIDDEN)
    expected = module(x[None])[0][0]
    bounds = [COUNT * rank // ranks for rank in range(ranks + 1)]
    parts = [
        experts_of(module, range(start, stop), pack=pack)(x, wrong_activation)
        for start, stop in zip(bounds, bounds[1:], strict=False)
    ]
    torch.testing.assert_close(sum(parts), expected, atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_the_clamp_acts(module: GptOssMLP) -> None:
    """Or the test above would prove nothing of it."""
    x = torch.randn(40, HIDDEN)
    expected = module(x[None])[0][0]
    module.experts.limit = 100.0
    assert (module(x[None])[0][0] - expected).abs().max() > 1
