"""Muon of the engines against an implementation from the papers, over ranks and ZeRO stages."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from hybrid_rlhf.configs.preference import PreferenceStepConfig
from hybrid_rlhf.configs.reward import RewardConfig
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.training import OptimizerConfig, ZeroConfig
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.engines.builder import build_actor, build_engine
from hybrid_rlhf.engines.deepspeed_internals import wrapped_optimizer
from hybrid_rlhf.engines.ds_config import deepspeed_config
from hybrid_rlhf.engines.partition import full_tensors
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.world import World
from tests.support.engines import actor_spec, token_rows, train_step
from tests.support.errors import user_error
from tests.support.marks import faults
from tests.support.model_types import tiny_of_type
from tests.support.ranks import run_ranks

LR = 1e-2
DECAY = 0.1
EPS = 1e-5
"""Gradients of embeddings near 0 would otherwise be amplified with their rounding errors."""
STEPS = 3
ROUNDING = 16 * 2**-24
"""Of a gradient, relative to its norm: sixteen units of float32 after some sums of tens of products."""
BOUND = STEPS * LR * 0.2 * math.sqrt(48) * 3.4445**5 * ROUNDING
"""Five Newton-Schulz steps multiply a small singular value, and the rounding in it, by 3.4445 each: 2e-5."""


def trained(world: World, path: Path, settings: dict[str, Any]) -> dict[str, Tensor]:
    """The weights after three updates, on rank 0, of a processor that multiplies float16."""
    get_accelerator().is_fp16_supported = lambda: True  # some CPUs do, and Muon's result must not depend on it
    spec = actor_spec(path, optimizer="muon", lr=LR, **settings)
    assert spec.optimizer is not None
    engine = build_actor(replace(spec, optimizer=replace(spec.optimizer, weight_decay=DECAY, eps=EPS)), world)
    for _ in range(STEPS):
        train_step(engine, world)
    return {name: value.clone() for name, value in full_tensors(engine.lm, world) if value is not None}


def orthogonalised(matrix: Tensor) -> Tensor:
    """Newton-Schulz, five steps (Jordan 2024), in float64."""
    x = matrix.double() / matrix.double().norm()
    x = x if x.shape[0] <= x.shape[1] else x.T
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


@pytest.fixture(scope="module")
def expected(model_folder: Path) -> dict[str, Tensor]:
    """The weights after three updates by Muon and AdamW, written from the papers."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    ids = token_rows()
    matrices = {n: p for n, p in model.named_parameters() if p.dim() == 2 and ".layers." in n}
    others = [p for n, p in model.named_parameters() if n not in matrices]
    adam = torch.optim.AdamW(
        [
            {"params": [p for p in others if p.dim() == 2], "weight_decay": DECAY},
            {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=LR,
        betas=(0.9, 0.95),
        eps=EPS,
    )
    momenta = {name: torch.zeros_like(weight) for name, weight in matrices.items()}
    for _ in range(STEPS):
        model.zero_grad()
        logits = model(ids).logits[:, :-1]
        functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").div(36).backward()
        adam.step()
        with torch.no_grad():
            for name, weight in matrices.items():
                gradient = weight.grad
                momenta[name] = 0.95 * momenta[name] + gradient
                nesterov = gradient + 0.95 * momenta[name]
                update = 0.2 * math.sqrt(max(weight.shape)) * orthogonalised(nesterov)
                weight.mul_(1 - LR * DECAY).sub_(LR * update)
    return {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, {"stage": 0}),
        (2, {"stage": 2}),
        (2, {"stage": 3}),
        faults(2, {"stage": 0}),
        faults(2, {"stage": 1}),
        faults(1, {"stage": 3}),
        faults(2, {"stage": 2, "offload_optimizer": True}),
        faults(2, {"stage": 3, "offload_optimizer": True, "offload_parameters": True}),
    ],
    ids=str,
)
def test_muon_is_that_of_the_papers_in_every_stage(
    ranks: int, settings: dict[str, Any], model_folder: Path, tmp_path: Path, expected: dict[str, Tensor]
) -> None:
    weights = run_ranks(trained, ranks, tmp_path, model_folder, settings)[0]
    before = AutoModelForCausalLM.from_pretrained(model_folder).state_dict()
    for name, weight in expected.items():
        assert (weight - before[name]).abs().max() > 1e-3, name
        assert (weights[name] - weight).abs().max() < BOUND, name


@pytest.mark.parametrize("stage", [0, 3])
def test_the_head_of_a_critic_has_its_own_rate(stage: int, model_folder: Path, world: World) -> None:
    spec = replace(actor_spec(model_folder, optimizer="muon", stage=stage, lr=LR), role="critic", head_lr=0.5)
    groups = wrapped_optimizer(build_engine(spec, world).deepspeed_engine).param_groups
    assert {group["lr"] for group in groups if not group["use_muon"]} == {LR, 0.5}


@pytest.mark.parametrize(
    ("kind", "section"), [(SFTConfig, ""), (RewardConfig, ""), (PreferenceStepConfig, ""), (RLConfig, "actor.")]
)
def test_muon_neither_clips_nor_trains_adapters(kind: Any, section: str) -> None:
    line = [f"--{section}optimizer.name", "muon"]
    config = parse_config(kind, line)
    assert getattr(config, "actor", config).optimizer.max_grad_norm == 0
    for more, message in (
        ([f"--{section}optimizer.max_grad_norm", "1.0"], "optimizer.max_grad_norm must be 0 with Muon, got 1.0"),
        ([f"--{section}lora.rank", "8"], f"orthogonalises updates of whole matrices, got {section}lora: leave one"),
    ):
        with user_error(message):
            parse_config(kind, line + more)


def test_what_muon_does_not_support_is_refused(tmp_path: Path, world: World) -> None:
    muon = OptimizerConfig(name="muon", max_grad_norm=0.0)
    with user_error("reduce_scatter must be false with optimizer.name muon"):
        deepspeed_config(
            zero=ZeroConfig(stage=3),
            dtype=torch.float32,
            optimizer=muon,
            overrides={"zero_optimization": {"reduce_scatter": True}},
        )
    tiny_of_type("qwen3_moe").config.save_pretrained(tmp_path)  # no weights
    with user_error("is for dense models with a list of layers, got Qwen3MoeForCausalLM"):
        build_actor(actor_spec(tmp_path, optimizer="muon"), world)
