"""Losses of routers: against transformers, by hand, for every way to cut a batch, and for every type with routers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.functional.losses import sft_loss
from hybrid_rlhf.functional.masking import position_ids
from hybrid_rlhf.models.families import WITHOUT_ROUTER_LOSSES
from hybrid_rlhf.models.policy import Policy
from hybrid_rlhf.models.pretrained.loading import adapt_model
from hybrid_rlhf.models.routers.losses import ROUTER_TOTAL, RouterLoss, router_loss
from hybrid_rlhf.models.routers.modules import router_modules
from tests.support.errors import user_error
from tests.support.families import variant
from tests.support.model_types import tiny_of_type
from tests.support.models import assert_equal_gradients, padded_rows

RULE = RouterLoss(0.5, 0.25, 2)
LENGTHS = [9, 1, 5, 7]


def losses_of(policy: Policy, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """What an SFT micro-batch adds up: the loss, its count and the sums of the routers' statistics."""
    wanted = mask & (position_ids(mask) > 0)
    loss = sft_loss(policy(ids, mask, wanted)[0], mask=wanted)
    assert policy.router_losses is not None
    both = policy.router_losses.added_to(loss, wanted.sum(dim=1))
    return {"total": both.total, "count": both.count, **both.stats}


def test_one_layer_and_one_sequence_have_the_loss_and_gradient_of_transformers() -> None:
    logits = torch.randn(11, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    expected = load_balancing_loss_func((logits,), 6, 2)
    found = RULE([logits], torch.zeros(11, dtype=torch.long), torch.tensor([11]))
    torch.testing.assert_close(found.stats["router_aux_loss"][0], expected)
    z = logits.exp().sum(dim=1).log().square().mean()
    torch.testing.assert_close(found.stats["router_z_loss"][0], z)
    both = 0.5 * expected + 0.25 * z
    torch.testing.assert_close(found.total[0], both)
    ours, theirs = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (found.total[0], both))
    torch.testing.assert_close(ours, theirs)


def test_losses_are_means_over_the_tokens_of_each_sequence_and_over_layers() -> None:
    """By hand: sequence 0 sends all to expert 0, sequence 1 alternates; the second layer is uniform."""
    high = 100.0
    first = torch.tensor([[high, 0.0], [high, 0.0], [high, 0.0], [0.0, high]])
    found = RouterLoss(1.0, 0.0, 1)([first, torch.zeros(4, 2)], torch.tensor([0, 0, 1, 1]), torch.tensor([2, 2]))
    # f = p = (1, 0): 2 * 1; f = p = (1/2, 1/2): 2 * 1/2. In the uniform layer p = (1/2, 1/2) whatever f is: 1.
    torch.testing.assert_close(found.total, torch.tensor([(2.0 + 1.0) / 2, (1.0 + 1.0) / 2]))
    torch.testing.assert_close(found.stats["router_max_share"], torch.tensor([1.0, (0.5 + 1.0) / 2]))


@pytest.mark.parametrize("how", ["packed", "checkpointed", "padded", "padded on the left"])
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "granitemoe", "llama4"])
def test_sums_and_gradients_do_not_depend_on_how_a_batch_is_cut(name: str, how: str) -> None:
    """One padded batch, against micro-batches of one and three rows in each form."""
    policies = []
    for changed in (False, True):
        model = copy.deepcopy(variant(name))
        packed = changed and not how.startswith("padded")
        adapt_model(
            model,
            ModelConfig(
                attention="auto" if packed else "eager", gradient_checkpointing=changed and how == "checkpointed"
            ),
        )
        policies.append(Policy(model.train()))
        policies[-1].router_loss = RULE
    ids, mask = padded_rows(LENGTHS, left=how.endswith("left"))
    whole, cut = policies
    expected = losses_of(whole, *padded_rows(LENGTHS))
    expected["total"].backward()
    found: dict[str, Tensor] = {}
    for rows in (slice(0, 1), slice(1, 4)):
        part = losses_of(cut, ids[rows], mask[rows])
        part["total"].backward()
        found = {key: found.get(key, 0.0) + value.detach() for key, value in part.items()}
    for key, value in expected.items():
        torch.testing.assert_close(
            found[key], value.detach(), rtol=1e-4, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}"
        )
    assert_equal_gradients(whole, cut, atol=1e-4)
    assert float(expected[ROUTER_TOTAL].detach()) > 1


@pytest.mark.parametrize("name", ["aria_text", "deepseek_v3", "gpt_oss", "jetmoe", "llama", "olmoe", "phimoe", "zaya"])
def test_types_with_routers_are_found_and_have_a_logit_for_each_token_and_expert(name: str) -> None:
    model = tiny_of_type(name)
    assert bool(router_modules(model)) == (name != "llama")
    if not router_modules(model):
        return
    policy = Policy(model)
    policy.router_loss = router_loss(model, ModelConfig(router_aux_loss_coef=0.1))
    ids, mask = padded_rows(LENGTHS)
    found = losses_of(policy, ids % 128, mask)
    assert found["router_aux_loss"] > 0 and found["router_max_share"] <= found["count"]
    with torch.no_grad():
        policy(ids % 128, mask, mask)
    assert policy.router_losses is None, "without a gradient there are none"


@pytest.mark.parametrize("name", ["mixtral", "phimoe", "gemma4_text"])
def test_routers_in_training_route_as_in_evaluation(name: str) -> None:
    model = tiny_of_type(name, **({"router_jitter_noise": 0.1} if name == "mixtral" else {}))
    ids, mask = padded_rows(LENGTHS)
    with torch.no_grad():
        expected = Policy(model)(ids % 128, mask, mask)[0]
        adapt_model(model.train(), ModelConfig(gradient_checkpointing=True))
        policy = Policy(model).train()
        torch.testing.assert_close(policy(ids % 128, mask, mask)[0], expected, rtol=1e-4, atol=1e-4)
    assert router_modules(model)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    assert layers and all(layer.gradient_checkpointing and layer.training for layer in layers), "these recompute"


@pytest.mark.parametrize(
    ("stored", "settings", "expected"),
    [
        ({}, {}, None),
        ({"output_router_logits": True}, {}, (0.02, 0.0)),
        ({"output_router_logits": True}, {"router_z_loss_coef": 1e-3}, (0.02, 1e-3)),
        ({"output_router_logits": True}, {"router_aux_loss_coef": 0.0}, None),
        ({}, {"router_aux_loss_coef": 0.3}, (0.3, 0.0)),
        ({}, {"router_z_loss_coef": 0.3}, (0.0, 0.3)),
    ],
)
def test_coefficients_are_the_settings_or_those_that_the_config_uses(
    stored: dict[str, bool], settings: dict[str, float], expected: tuple[float, float] | None
) -> None:
    model = tiny_of_type("mixtral", router_aux_loss_coef=0.02, **stored)
    found = router_loss(model, ModelConfig(**settings))
    assert (found and (found.aux_coef, found.z_coef)) == expected
    assert found is None or found.per_token == 2


@pytest.mark.parametrize("name", ["llama", "qwen2", *sorted(WITHOUT_ROUTER_LOSSES)])
@pytest.mark.parametrize("key", ["router_aux_loss_coef", "router_z_loss_coef"])
def test_a_model_without_routers_is_refused(name: str, key: str) -> None:
    model = tiny_of_type(name)
    assert router_loss(model, ModelConfig()) is None
    with user_error(f"model.{key} needs a mixture of experts .* got 0.01 for a {name}: leave it out"):
        router_loss(model, ModelConfig(**{key: 0.01}))
