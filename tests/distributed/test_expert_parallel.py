"""Ranks that share the experts of each layer train, sample and save the model that one rank with all experts does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.model import LoraConfig, ModelConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.training import CheckpointConfig
from hybrid_rlhf.engines.averaging import WeightAverage
from hybrid_rlhf.engines.builder import EngineSpec, build_actor
from hybrid_rlhf.engines.hybrid import HybridEngine
from hybrid_rlhf.engines.partition import copy_weights, full_tensors
from hybrid_rlhf.engines.saved.checkpoints import CheckpointWriter, LoopState, load_checkpoint
from hybrid_rlhf.engines.saved.training_state import TrainingState
from hybrid_rlhf.functional.losses import sft_loss
from hybrid_rlhf.generation import SamplingParams
from hybrid_rlhf.models.expert_parallel import require_expert_parallelism
from hybrid_rlhf.models.pretrained.saving import save_model
from hybrid_rlhf.runtime.world import World, solo_world
from tests.support.engines import PROMPTS, actor_spec
from tests.support.families import variant
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_tokenizer

FAMILIES = ("qwen3_moe", "mixtral")
UPDATES = 3
Case = dict[str, Any]
"""Settings of `actor_spec`, and the number of ranks that share experts as `experts`."""


def spec_of(path: Path, experts: int = 1, checkpointing: bool = False, **settings: Any) -> EngineSpec:
    """An actor whose gradient is clipped in each update."""
    spec = actor_spec(path, **settings)
    assert spec.optimizer is not None
    model = replace(spec.model, expert_parallel=experts, gradient_checkpointing=checkpointing, router_aux_loss_coef=0.1)
    return replace(spec, model=model, optimizer=replace(spec.optimizer, lr=1e-3, max_grad_norm=0.05))


def update(engine: HybridEngine, world: World) -> tuple[float, float]:
    """One update on seven rows of different lengths; the loss of all ranks and the gradient's norm. A rank with fewer
    rows than others has a micro-batch without a loss."""
    ids = torch.randint(3, 200, (7, 12), generator=torch.Generator().manual_seed(engine.weight_version))
    real = torch.arange(12) < torch.tensor([12, 9, 4, 11, 2, 7, 12])[:, None]
    rows: list[int | None] = [*range(world.rank, len(ids), world.size)]
    rows += [None] * (-(-len(ids) // world.size) - len(rows))
    total = 0.0
    for row in rows:
        part = slice(row or 0, (row or 0) + 1)
        mask = real[part] if row is not None else torch.arange(12)[None] < 1
        wanted = mask & (torch.arange(12) > 0)
        logprobs, _ = engine(ids[part], mask, wanted)
        loss = engine.with_router_losses(sft_loss(logprobs, mask=wanted), wanted.sum(dim=1).float())
        engine.backward(loss.total, count=50)
        total += float(loss.total.detach())
    norm = engine.step().grad_norm
    assert norm is not None
    return float(world.all_reduce(torch.tensor(total))), norm


def trained(world: World, path: Path, cases: list[Case]) -> list[dict[str, Any]]:
    """Losses, gradient norms and whole weights of each case after some updates."""
    results = []
    for case in cases:
        engine = build_actor(spec_of(path, **case), world)
        updates = [update(engine, world) for _ in range(UPDATES)]
        held = {name: len(weight) for name, weight in engine.lm.named_parameters() if name.endswith("down_proj")}
        weights = {name: tensor for name, tensor in full_tensors(engine.lm, world) if tensor is not None}
        results.append({"updates": updates, "weights": weights, "parameters": engine.parameters, "held": held})
    return results


@pytest.fixture(scope="module", params=FAMILIES)
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random mixture of experts."""
    folder = tmp_path_factory.mktemp(request.param)
    variant(request.param).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, [{"stage": stage, "experts": 2} for stage in range(4)]),
        (2, [{"stage": 2, "experts": 2, "checkpointing": True}, {"stage": 3, "experts": 2, "checkpointing": True}]),
        pytest.param(4, [{"stage": stage, "experts": 2} for stage in range(4)], marks=pytest.mark.slow),
    ],
    ids=["2 ranks", "recomputed", "4 ranks"],
)
def test_shared_experts_train_as_whole_ones(mixture: Path, tmp_path: Path, ranks: int, cases: list[Case]) -> None:
    """Catches gradients of experts that are averaged, summed, clipped or counted other than those of dense weights."""
    expected = run_ranks(trained, 1, tmp_path / "one", mixture, [{}])[0][0]
    for case, result in zip(cases, run_ranks(trained, ranks, tmp_path / "shared", mixture, cases)[0], strict=True):
        torch.testing.assert_close(
            torch.tensor(result["updates"]), torch.tensor(expected["updates"]), atol=1e-5, rtol=1e-5
        )
        assert result["parameters"] == expected["parameters"], case
        assert result["weights"].keys() == expected["weights"].keys()
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(result["weights"][name], weight, atol=1e-5, rtol=1e-5, msg=f"{name} {case}")
