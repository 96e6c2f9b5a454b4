"""Weights that are split over ranks (AutoTP): updates, clipping, sampling, memory, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rlhf.configs.preference import PreferenceStepConfig
from hybrid_rlhf.configs.reward import RewardConfig
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.training import OptimizerConfig, ZeroConfig
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.engines.builder import build_actor
from hybrid_rlhf.engines.hybrid import HybridEngine
from hybrid_rlhf.engines.partition import full_tensors
from hybrid_rlhf.generation import SamplingParams
from hybrid_rlhf.models.packing import require_tensor_parallelism, use_packing
from hybrid_rlhf.planning.engine_memory import engine_memory
from hybrid_rlhf.planning.shapes import shaped_model
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.world import World
from tests.support.engines import PROMPTS, accumulate, actor_spec
from tests.support.errors import refused, user_error
from tests.support.families import variant
from tests.support.marks import faults
from tests.support.ranks import run_ranks

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2")
"""Without and with biases, norms of heads, and a head that is tied to the embeddings."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each family."""
    folder = tmp_path_factory.mktemp("families")
    for name in FAMILIES:
        variant(name).save_pretrained(folder / name)
    return folder


def updated(world: World, path: Path, settings: dict[str, Any], sampling: int = 1) -> dict[str, Any]:
    """Norms of the gradients of two clipped updates, the weights after them, and greedy completions.

    Under tensor parallelism after updates of engines with and without it, as DeepSpeed has one state for all.
    """
    optimizer = OptimizerConfig(lr=1e-2, eps=1e-2, schedule="constant", warmup_fraction=0.0, max_grad_norm=0.1)
    spec = replace(actor_spec(path, **settings), optimizer=optimizer)
    if spec.model.tensor_parallel > 1:
        whole = replace(spec, model=replace(spec.model, tensor_parallel=1))
        others = [build_actor(spec, world), build_actor(whole, world)]
        norms = [[clipped_step(other, world) for _ in range(2)] for other in others]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    engine = build_actor(spec, world, rollout=RolloutConfig(tensor_parallel=sampling))
    norms_of_engine = [clipped_step(engine, world) for _ in range(2)]
    with engine.inference(stop_token_ids=()) as generation:
        samples = generation.generate(PROMPTS, SamplingParams(max_new_tokens=6, temperature=0.0))
    return {
        "norms": norms_of_engine,
        "weights": {name: value.clone() for name, value in full_tensors(engine.lm, world) if value is not None},
        "completions": [sample[0].token_ids for sample in samples],
    }


def clipped_step(engine: HybridEngine, world: World) -> float | None:
    """One update on four rows, shared over the ranks; the norm of the gradient."""
    accumulate(engine, world)
    return engine.step().grad_norm


@pytest.mark.parametrize(
    ("family", "ranks", "settings", "sampling"),
    [
        ("qwen3", 2, {"stage": 0}, 2),
        ("qwen2", 2, {"stage": 2}, 1),
        ("gemma2", 2, {"stage": 3}, 1),
        *(
            faults(family, ranks, {"stage": stage}, 2)
            for family in FAMILIES
            for stage, ranks in ((0, 2), (1, 2), (2, 4), (3, 4))
        ),
        faults("llama", 4, {"stage": 3, "offload_optimizer": True, "offload_parameters": True}, 1),
    ],
)
def test_clipped_updates_and_samples_are_those_of_one_rank(
    family: str, ranks: int, settings: dict[str, Any], sampling: int, folders: Path, tmp_path: Path
) -> None:
    """Norms of gradients count each weight once, whether it is split or not."""
    (expected,) = run_ranks(updated, 1, tmp_path / "a", folders / family, {"stage": 0})
    results = run_ranks(updated, ranks, tmp_path / "b", folders / family, {**settings, "tensor_parallel": 2}, sampling)
    for result in results:
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert result["completions"] == expected["completions"]
    weights = results[0]["weights"]
    assert weights.keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        assert (weights[name] - weight).abs().max() < 1e-5, name


def refused_sync(world: World, path: Path) -> str:
    """The message of a check of inference weights that no weights pass."""
    engine = build_actor(actor_spec(path, stage=0, tensor_parallel=2), world, max_logprob_diff=-1.0)
    return refused(engine.inference(stop_token_ids=()).__enter__)


def test_a_difference_is_placed_where_training_splits_weights(folders: Path, tmp_path: Path) -> None:
    """Hidden states of the rows of all ranks were compared with those of one, which ended in a traceback."""
    for said in run_ranks(refused_sync, 2, tmp_path, folders / "gemma2"):
        assert "after the weight sync of update 0, first in the head: report" in said


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [
        ("llama", 3, "must divide the number of attention heads"),
        ("llama", 4, "must divide num_key_value_heads"),
        ("gpt2", 2, "needs a plan of transformers with rows and columns"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(name: str, size: int, reason: str) -> None:
    model = variant(name)
    use_packing(model)
    with user_error(reason):
        require_tensor_parallelism(model, size)


@pytest.mark.parametrize(
    ("kind", "line", "reason"),
    [
        (
            SFTConfig,
            "--model.sequence_parallel 2",
            "got model.sequence_parallel 2 and model.tensor_parallel 2",
        ),
        (SFTConfig, "--model.quantization nf4 --lora.rank 4", "got model.quantization nf4: leave one out"),
        (RewardConfig, "--lora.rank 4", "model.tensor_parallel trains all weights, got 2 with lora: leave one of"),
        (
            PreferenceStepConfig,
            "--optimizer.name muon",
            "updates of whole matrices, got model.tensor_parallel 2: leave",
        ),
        (RLConfig, "--actor.lora.rank 4", "trains all weights, got 2 with actor.lora: leave one of the two out"),
        (RLConfig, "--rollout.backend module", "writes weights in parts, got rollout.backend module: leave"),
        (RLConfig, "--placement separation", "has all models on all ranks, got placement separation: leave one out"),
        (RLConfig, "--reference.refresh_every 5", "model.tensor_parallel 2 .*, got reference.refresh_every 5: leave"),
    ],
)
def test_settings_that_need_whole_weights_are_refused(kind: Any, line: str, reason: str) -> None:
    with user_error(reason):
        parse_config(kind, ["--model.tensor_parallel", "2", *line.split()])


def held(world: World, path: Path, stage: int) -> tuple[float, float]:
    """Bytes of this rank's weights, and of its optimizer's states and master weights after an update."""
    engine = build_actor(actor_spec(path, stage=stage, tensor_parallel=2), world)
    clipped_step(engine, world)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in engine.module.parameters())
    optimizer = engine.deepspeed_engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    states = [value for state in inner.state.values() for value in state.values() if value.dim()]
    masters = [parameter for group in inner.param_groups for parameter in group["params"]] if stage else []
    return float(weights), float(sum(tensor.numel() * tensor.element_size() for tensor in (*states, *masters)))


@pytest.mark.parametrize("stage", [0, faults(1)])
def test_a_rank_holds_the_part_of_the_weights_that_is_planned(stage: int, folders: Path, tmp_path: Path) -> None:
    path = folders / "llama"
    config = ModelConfig(dtype="float32", tensor_parallel=2)
    model = shaped_model(str(path), "causal_lm", config=config, dtype=torch.float32, lora=None, learns=True)
    plan = engine_memory(
        model,
        ZeroConfig(stage=stage),  # type: ignore[arg-type]
        OptimizerConfig(),
        dtype=torch.float32,
        ranks=2,
        overrides={},
    )
    for weights, states in run_ranks(held, 2, tmp_path, path, stage):
        assert weights == pytest.approx(plan.held.weights, rel=0.01)
        assert states == pytest.approx(plan.held.optimizer, rel=0.01)
