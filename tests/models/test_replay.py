"""Routing replay: the training forward with given experts, against experts and weights written out by hand."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.generation.architecture.hugging_face import describe
from hybrid_rlhf.generation.architecture.model_description import Experts
from hybrid_rlhf.models.policy import Policy
from hybrid_rlhf.models.pretrained.loading import adapt_model
from hybrid_rlhf.models.routers.losses import RouterLoss
from hybrid_rlhf.models.routers.modules import router_modules
from hybrid_rlhf.models.routers.replay import RouterReplay
from tests.support.families import EXPERT_VARIANTS, variant
from tests.support.models import assert_equal_gradients, padded_rows
from tests.support.routes import module_routes

LENGTHS = [9, 1, 5, 7]


def kind_of(model: PreTrainedModel) -> Experts:
    kind = describe(model)[0].experts
    assert kind is not None
    return kind


def replayed(model: PreTrainedModel, *, replays: bool = True, **settings: Any) -> Policy:
    """A policy, trained as the library prepares it."""
    adapt_model(model, ModelConfig(**settings))
    policy = Policy(model.train())
    policy.replay = RouterReplay(model, experts=kind_of(model).count, replays=replays)
    return policy


def own_routes(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    """[B, T, E, k] of each row alone, -1 on padding."""
    count, kind = len(router_modules(model)), kind_of(model)
    routes = torch.full((*ids.shape, count, kind.per_token), -1, dtype=kind.index_dtype)
    for row, (tokens, real) in enumerate(zip(ids, mask, strict=True)):
        if bool(real.any()):
            routes[row, real] = torch.from_numpy(module_routes(model, tokens[real].tolist())).to(routes.dtype)
    return routes


def random_routes(model: PreTrainedModel, mask: Tensor, *, seed: int = 0) -> Tensor:
    """As `own_routes`, by chance; every third token has none."""
    count, kind = len(router_modules(model)), kind_of(model)
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(*mask.shape, count, kind.count, generator=generator).argsort(dim=-1)
    routes = order[..., : kind.per_token].to(kind.index_dtype)
    known = mask & (torch.arange(mask.shape[1]) % 3 != 2)
    return routes.masked_fill(~known[:, :, None, None], -1)


def weights_by_hand(kind: Experts, logits: Tensor, index: Tensor) -> Tensor:
    """Weights of the experts [N, k] of logits [N, experts]."""
    logits = logits.float()
    if kind.router == "softmax_of_chosen":
        return logits.gather(1, index).softmax(dim=1) * kind.scale
    if kind.router == "sigmoid_of_chosen":
        return logits.gather(1, index).sigmoid() * kind.scale
    scores = logits.softmax(dim=1) if kind.router == "softmax" else logits.sigmoid()
    if kind.beside_mlp:  # Gemma 4's router returns probabilities in place of logits
        scores = logits
    weights = scores.gather(1, index)
    return (weights / weights.sum(dim=1, keepdim=True) if kind.normalise else weights) * kind.scale


def decision(router: nn.Module, output: tuple[Tensor, ...], kind: Experts) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [N, experts], weights and indices [N, k] of what a router returns, without the scale of each expert."""
    if kind.beside_mlp:
        probabilities, weights, index = output
        return probabilities, weights / router.per_expert_scale[index], index
    if kind.router != "sigmoid_of_chosen":
        logits, weights, index = output
        return logits, weights, index
    scores, logits = output
    assert ((scores > 0).sum(dim=1) == kind.per_token).all()
    return logits, *scores.topk(kind.per_token, dim=1)


NOT_REPLAYED = {"phimoe", "phimoe longrope", "phimoe that mixes near experts", "deepseek_v2"}
"""SparseMixer has no weight for experts far from its own best; DeepSeek-V2 none for those of other groups."""


@pytest.mark.parametrize("name", [name for name in EXPERT_VARIANTS if name not in NOT_REPLAYED])
def test_routers_weigh_the_recorded_experts_by_their_own_logits(name: str) -> None:
    """All families: indices, weights and the gradient of the logits."""
    model = variant(name)
    policy, kind = replayed(model), kind_of(model)
    outputs: list[tuple[Tensor, Tensor, Tensor]] = []
    for router in router_modules(model):
        router.register_forward_hook(lambda own, _inputs, output: outputs.append(decision(own, output, kind)))
    ids, mask = padded_rows([8])
    routes = random_routes(model, mask)
    policy(ids, mask, mask, routes=routes)
    assert len(outputs) == routes.shape[2]
    for layer, (logits, weights, index) in enumerate(outputs):
        wanted = routes[0, :, layer].long()
        known = wanted[:, 0] >= 0
        assert index[known].sort(dim=1)[0].equal(wanted[known].sort(dim=1)[0])
        expected = weights_by_hand(kind, logits, index)
        torch.testing.assert_close(weights.float(), expected, rtol=1e-4, atol=1e-5)
        factors = torch.randn(weights.shape, generator=torch.Generator().manual_seed(1))
        found, slow = (
            torch.autograd.grad((one * factors).sum(), logits, retain_graph=True)[0] for one in (weights, expected)
        )
        torch.testing.assert_close(found, slow, rtol=1e-3, atol=1e-5)
        assert found.abs().max() > 1e-4
    assert policy.replay is not None and policy.replay.agreement is not None
    same, known = policy.replay.agreement.tolist()
    assert same == known == int((routes >= 0).sum())


def test_what_cannot_be_replayed_is_known() -> None:
    assert {name for name in EXPERT_VARIANTS if not kind_of(variant(name)).weighs_any_choice} == NOT_REPLAYED


def by_hand(model: PreTrainedModel, routes: Tensor) -> PreTrainedModel:
    """A Qwen3-MoE whose mixtures are loops over tokens and experts of one unpadded row with routes [T, E, k]."""
    model = copy.deepcopy(model)

    def forward(block: nn.Module, x: Tensor, *, layer: int) -> Tensor:
        states, out = x[0], []
        gate_up, down = block.experts.gate_up_proj, block.experts.down_proj
        for token, chosen in zip(states, routes[:, layer].tolist(), strict=True):
            scores = functional.linear(token, block.gate.weight).softmax(dim=0)
            if chosen[0] < 0:
                chosen = scores.topk(len(chosen))[1].tolist()
            total = sum(scores[expert] for expert in chosen)
            mixed = torch.zeros_like(token)
            for expert in chosen:
                gate, up = (gate_up[expert] @ token).chunk(2)
                mixed = mixed + scores[expert] / total * (down[expert] @ (functional.silu(gate) * up))
            out.append(mixed)
        return torch.stack(out)[None]

    for layer, decoder_layer in enumerate(model.model.layers):
        block = decoder_layer.mlp
        block.forward = MethodType(lambda self, x, layer=layer: forward(self, x, layer=layer), block)
    return model


@pytest.mark.parametrize("checkpointing", [False, True])
def test_log_probs_and_gradients_are_those_of_a_forward_by_hand(checkpointing: bool) -> None:
    """Choices by chance, which the routers would not make; every third token has none."""
    model = variant("qwen3_moe")
    ids, mask = padded_rows([9])
    routes = random_routes(model, mask)
    slow = Policy(by_hand(model, routes[0]))
    policy = replayed(model, attention="eager", gradient_checkpointing=checkpointing)
    found, expected = policy(ids, mask, mask, routes=routes)[0], slow(ids, mask, mask)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    plain = policy(ids, mask, mask)[0]
    assert (plain - expected).abs().max() > 0.1, "the recorded choices matter"
    found = policy(ids, mask, mask, routes=routes)[0]
    found.sum().backward()
    expected.sum().backward()
    assert_equal_gradients(policy, slow, atol=1e-4)
    assert all(router.weight.grad.abs().max() > 1e-3 for router in router_modules(model))


@pytest.mark.parametrize("how", ["packed", "checkpointed", "padded on the left"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3", "granitemoe", "llama4"])
def test_replay_does_not_depend_on_how_a_batch_is_laid_out(name: str, how: str) -> None:
    """Packed rows are reordered by length; router losses are computed beside."""
    model = variant(name)
    ids, mask = padded_rows(LENGTHS)
    routes = random_routes(model, mask)
    packed = not how.startswith("padded")
    cut = replayed(
        copy.deepcopy(model), attention="auto" if packed else "eager", gradient_checkpointing=how == "checkpointed"
    )
    whole = replayed(model, attention="eager")
    for policy in (whole, cut):
        policy.router_loss = RouterLoss(0.5, 0.25, 2)
    expected = whole(ids, mask, mask, routes=routes)[0]
    if how.endswith("left"):
        left_ids, left = padded_rows(LENGTHS, left=True)
        moved = torch.full_like(routes, -1)
        moved[left] = routes[mask]
        found = cut(left_ids, left, left, routes=moved)[0][left]
    else:
        found = cut(ids, mask, mask, routes=routes)[0][mask]
    torch.testing.assert_close(found, expected[mask], rtol=1e-4, atol=1e-4)
    for policy, logprobs in ((whole, expected), (cut, found)):
        assert policy.router_losses is not None
        (logprobs.sum() + policy.router_losses.total.sum()).backward()
    assert_equal_gradients(whole, cut, atol=1e-3)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "phimoe", "llama4"])
def test_agreement_counts_the_choices_that_a_perturbed_router_makes_too(name: str) -> None:
    model = variant(name)
    ids, mask = padded_rows(LENGTHS)
    routes = own_routes(model, ids, mask)
    perturbed = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for router in router_modules(perturbed):
            router.weight += 0.3 * torch.randn(router.weight.shape, generator=generator)
    others = own_routes(perturbed, ids, mask)
    expected = sum(
        len(set(one) & set(other))
        for one, other in zip(routes[mask].flatten(0, 1).tolist(), others[mask].flatten(0, 1).tolist(), strict=True)
    )
    policy = replayed(perturbed, replays=False)
    with torch.no_grad():
        plain = policy(ids, mask, mask)[0]
        found = policy(ids, mask, mask, routes=routes)[0]
    assert policy.replay.agreement.tolist() == [expected, routes[mask].numel()]
    assert 0.3 < expected / routes[mask].numel() < 0.99
    assert found.equal(plain), "it only compares"
