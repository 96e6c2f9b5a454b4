"""Kernels of mixtures of experts, each against its twin in torch, and the engine on them against itself without.

See test_kernels.py about where they run, and in which dtypes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_rlhf.generation import ops
from hybrid_rlhf.generation.architecture.model_description import Activation, Experts
from hybrid_rlhf.generation.model import experts as experts_module
from hybrid_rlhf.generation.model.experts import RoutedExperts
from hybrid_rlhf.generation.ops import gpu as kernels
from hybrid_rlhf.generation.ops.rows import ACTIVATIONS
from tests.generation.references import assert_fits
from tests.support.marks import faults
from tests.support.triton_kernels import HALF, count_launches

pytest.importorskip("triton")

ROUTERS = {
    "softmax": Experts(count=6, per_token=2),
    "softmax of many": Experts(count=40, per_token=3, normalise=True, scale=1.5),
    "softmax in groups": Experts(count=12, per_token=3, groups=4, chosen_groups=2, group_scores=1),
    "softmax of many chosen": Experts(count=70, per_token=4, router="softmax_of_chosen", scale=0.5),
    "sigmoid": Experts(count=24, per_token=5, router="sigmoid", normalise=True),
    "sigmoid in groups": Experts(
        count=24, per_token=3, router="sigmoid", groups=3, chosen_groups=2, normalise=True, scale=2.5
    ),
    "sigmoid in groups, as it is": Experts(count=8, per_token=2, router="sigmoid", groups=4, chosen_groups=2),
    "sigmoid of chosen": Experts(count=20, per_token=1, router="sigmoid_of_chosen", weighs_inputs=True),
    "sparsemixer": Experts(count=18, per_token=2, router="sparsemixer", near=0.6),
}


def routed_experts(
    kind: Experts, dtype: torch.dtype = torch.float32, *, hidden: int = 56, inner: int = 40, **more: Any
) -> RoutedExperts:
    """With random weights; `gated` and `biased`: what experts have, `mine`: of a rank."""
    gated, biased = more.pop("gated", True), more.pop("biased", False)
    mine = more.pop("mine", range(kind.count))
    scale = {"router": 1.0, "up": hidden**-0.5, "down": inner**-0.5}
    units = 2 * inner if gated else inner
    shapes = {"router": (kind.count, hidden), "up": (kind.count, units, hidden), "down": (kind.count, hidden, inner)}
    weights = {name: (torch.randn(shape) * scale[name]).to(dtype) for name, shape in shapes.items()}
    biases = {f"{name}_bias": torch.randn(shape[:-1]).to(dtype) for name, shape in shapes.items()}
    for name in ("up", "down"):
        weights[name] = weights[name][mine.start : mine.stop]
        biases[f"{name}_bias"] = biases[f"{name}_bias"][mine.start : mine.stop]
    if more.pop("transposed", False):
        weights |= {name: weights[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("up", "down")}
    given = {"correction": None, "product": None, **(biases if biased else {}), **more}
    return RoutedExperts(kind, **weights, mine=mine, **given)


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("name", ROUTERS)
def test_experts_are_chosen_as_torch_does(name: str, dtype: torch.dtype, tokens: int, on_the_device: None) -> None:
    torch.manual_seed(0)
    kind = ROUTERS[name]
    count = kind.count
    experts = routed_experts(
        kind,
        dtype,
        hidden=300,
        correction=torch.randn(count) if "groups" in name or count == 24 else None,
        scale=torch.rand(count) if count in (6, 24) and kind.router == "softmax" else None,
        router_bias=torch.randn(count).to(dtype) if kind.router == "softmax_of_chosen" else None,
    )
    x = torch.randn(tokens, 300).to(dtype) * 0.1
    weights, index = experts.route(x)
    found, chosen = experts.route(x, kernels)
    assert torch.equal(chosen.long(), index)
    torch.testing.assert_close(found, weights, atol=1e-5, rtol=1e-4)


def test_of_equal_choices_the_first_is_taken(on_the_device: None) -> None:
    kind = Experts(count=20, per_token=3)
    weights, chosen = kernels.choose_experts(torch.zeros(2, 20), kind)
    assert chosen.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 20))


PRODUCTS = {
    "plain": (Experts(count=6, per_token=2), {}),
    "many, of which few are chosen": (Experts(count=40, per_token=2), {}),
    "one": (Experts(count=1, per_token=1), {}),
    "with biases": (Experts(count=6, per_token=4, router="softmax_of_chosen"), {"biased": True}),
    "clamped": (Experts(count=6, per_token=2, router="softmax_of_chosen", clamp=0.5), {"biased": True}),
    "without gates": (Experts(count=6, per_token=3, router="sigmoid"), {"gated": False, "inner": 88}),
    "with weighed inputs": (Experts(count=4, per_token=1, router="sigmoid_of_chosen", weighs_inputs=True), {}),
    "transposed": (Experts(count=6, per_token=2), {"transposed": True, "inner": 72}),
    "of the last rank": (Experts(count=6, per_token=2), {"mine": range(4, 6)}),
    "of a rank, with biases": (Experts(count=24, per_token=2), {"mine": range(8, 16), "biased": True}),
    "sparsemixer": (Experts(count=18, per_token=2, router="sparsemixer", near=0.6), {}),
    "in half precision": (Experts(count=6, per_token=2, normalise=True), {"dtype": HALF, "biased": True}),
}


def compare(experts: RoutedExperts, x: Tensor, activation: Activation) -> None:
    """Kernels and torch."""

    def activate(both: Tensor) -> Tensor:
        if experts.up.shape[1] == experts._inner:
            return ACTIVATIONS[activation](both)
        gate, up = both.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate) * up

    routes = []
    expected = experts(x, activate, routes=routes)
    found = experts(x, activate, kernels=kernels, activation=activation, routes=routes)
    close = {"atol": 1e-5, "rtol": 1e-4} if x.dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(found, expected, **close)
    assert torch.equal(*routes) and routes[0].dtype == routes[1].dtype


@pytest.mark.parametrize("tokens", [1, 5, faults(70)])
@pytest.mark.parametrize("name", PRODUCTS)
def test_experts_compute_as_torch_does(name: str, tokens: int, on_the_device: None) -> None:
    """Few tokens have a program for each choice, others one for each expert; activations take turns."""
    torch.manual_seed(0)
    kind, given = PRODUCTS[name]
    experts = routed_experts(kind, **given)
    activation = [*ACTIVATIONS][[*PRODUCTS].index(name) % len(ACTIVATIONS)]
    compare(experts, torch.randn(tokens, 56).to(experts.up.dtype), activation)


@pytest.mark.parametrize("tokens", [3, 150])
def test_experts_without_tokens_and_with_nearly_all(tokens: int, on_the_device: None) -> None:
    """The first expert has more choices than a tile has rows, and more than are compared at once; others have none."""
    torch.manual_seed(0)
    experts = routed_experts(Experts(count=5, per_token=2), router_bias=torch.tensor([50.0, 40.0, 0.0, 45.0, -50.0]))
    compare(experts, torch.randn(tokens, 56), "silu")
    choices, scanned = 2 * tokens, ops.experts.tile_of(torch.zeros(tokens, 2), 5)["SCANNED"]
    assert tokens < 100 or (choices > 2 * scanned and tokens > ops.experts._MOST_ROWS)


def test_large_steps_take_grouped_products(on_the_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_module, "MOST_KERNEL_TOKENS", 8)
    experts = routed_experts(Experts(count=4, per_token=2))
    counts = count_launches(monkeypatch, ops.experts)
    for tokens in (8, 9):
        experts(torch.randn(tokens, 56), lambda both: both[:, :40], kernels=kernels)
        assert len(counts) == 2


_EXPERTS = """
from hybrid_rlhf.generation.ops import experts, routing
from hybrid_rlhf.generation.architecture.model_description import Experts

POINTERS["*fp32"] += " logits weights gates"
POINTERS["*i32"] += " indices"
NUMBERS["fp32"] += " limit near"
SIZES = "hidden units x_stride expert_stride row_stride column_stride"
NUMBERS["i32"] += f" tokens choices first_expert experts per_token bias_stride {SIZES}"
MULTIPLES.update(SIZES.split())
KINDS.update({name: kind for kinds in (POINTERS, NUMBERS) for kind, names in kinds.items() for name in names.split()})

def route(target, model, **kind):
    kind = Experts(**kind)
    of_all = kind.router in ("softmax", "sigmoid")
    constants = dict(routing.choice_constants(kind, kind.count), CORRECTION=of_all, SCALES=of_all)
    return shared_bytes(routing._choose_kernel, constants, "*fp32", target)

def products(target, model, tokens, count, k, activation=0, gated=True, transposed=False, inputs=False):
    tile = dict(experts.tile_of(torch.empty(tokens, k), count), STEP=experts._STEP_BYTES // TYPES[model].itemsize)
    layout = {"row_stride" if transposed else "column_stride": 1}
    options = dict(num_stages=experts._STAGES)
    yield shared_bytes(experts._up_kernel, dict(tile, **layout, UNITS=experts.units_of(gated), GATED=gated,
                       ACTIVATION=activation, BIAS=activation < 0, WEIGHS=inputs), model, target, options)
    yield shared_bytes(experts._down_kernel, dict(tile, **layout, OUTPUTS=experts._OUTPUTS, BIAS=activation < 0,
                       WEIGHS=not inputs), model, target, options)

def mixture(target, kind, given):
    for model, tokens in (("*bf16", 1), ("*bf16", 256), ("*fp32", 256)):
        yield route(target, model, **kind)
        yield from products(target, model, tokens, kind["count"], kind["per_token"], **given)
"""

MIXTURES = {
    "Qwen3-30B-A3B": ({"count": 128, "per_token": 8, "normalise": True}, {}),
    "Mixtral": ({"count": 8, "per_token": 2, "normalise": True}, {}),
    "gpt-oss 20B": ({"count": 32, "per_token": 4, "router": "softmax_of_chosen"}, {"activation": -1}),
    "DeepSeek V3": (
        {"count": 256, "per_token": 8, "router": "sigmoid", "normalise": True, "groups": 8, "chosen_groups": 4},
        {},
    ),
    "Qwen1.5-MoE A2.7B": ({"count": 60, "per_token": 4}, {}),
    "Qwen3-Next": ({"count": 512, "per_token": 10, "normalise": True}, {}),
    "Llama 4 Scout": (
        {"count": 16, "per_token": 1, "router": "sigmoid_of_chosen"},
        {"transposed": True, "inputs": True},
    ),
    "Nemotron 3 Nano": (
        {"count": 128, "per_token": 6, "router": "sigmoid"},
        {"activation": 4, "gated": False},
    ),
    "Phi-3.5-MoE": ({"count": 16, "per_token": 2, "router": "sparsemixer", "near": 0.02}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "names"),
    [
        (90, ["Qwen3-30B-A3B", "gpt-oss 20B"]),
        *(faults(target, [*MIXTURES]) for target in (80, 86, 90, 100)),
    ],
)
def test_kernels_of_mixtures_compile_for_a_gpu_and_fit_into_shared_memory(target: int, names: list[str]) -> None:
    """With the tiles of published models at few tokens and at most; sizes besides those of a tile are not constants."""
    calls = ", ".join(f"*mixture({target}, {kind}, {given})" for kind, given in map(MIXTURES.__getitem__, names))
    assert_fits(_EXPERTS, calls)
