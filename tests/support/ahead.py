"""Rollouts whose tokens are of several weights: an actor without training, and the runs that resume in tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hybrid_rlhf.configs.sections.model import LoraConfig, ModelConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.configs.sections.training import OptimizerConfig, ZeroConfig
from hybrid_rlhf.data.loaders import RowStream
from hybrid_rlhf.engines.builder import EngineSpec, build_actor
from hybrid_rlhf.engines.hybrid import HybridEngine
from hybrid_rlhf.engines.partition import set_weights
from hybrid_rlhf.rl.types import Rollout
from hybrid_rlhf.runtime.files.json_lines import read_lines
from hybrid_rlhf.runtime.files.names import METRICS_FILE
from hybrid_rlhf.runtime.world import World
from tests.support.steps import CLOCK, words
from tests.support.tiny import save_tiny, tiny_model

PROMPTS = 20
STOP_TOKEN_IDS = tuple(range(3, 40))
"""A completion ends with each token with a chance of one in seven."""


def build_sampling_actor(
    world: World, path: str, *, stage: int = 0, rank: int = 0, **rollout: Any
) -> tuple[HybridEngine, RowStream]:
    """An actor, and the order of PROMPTS prompts."""
    config = RolloutConfig(sampling=SamplingParams(n=2, max_new_tokens=8), kv_cache_gib=0.1, **rollout)
    spec = EngineSpec(
        "actor",
        path,
        ModelConfig(dtype="float32"),
        ZeroConfig(stage=stage),
        0,
        OptimizerConfig(),
        LoraConfig(rank=rank) if rank else None,
    )  # type: ignore[arg-type]
    return build_actor(spec, world, rollout=config), RowStream(PROMPTS, epochs=1, seed=0)


def change_weights(actor: HybridEngine, step: int) -> None:
    """What an update does: other values in the same memory."""
    generator = torch.Generator().manual_seed(step)
    for parameter in actor.lm.parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)
        set_weights(parameter, 0.3 * torch.randn(shape, generator=generator))
    actor._engine.global_steps += 1


def trained_logprobs(actor: HybridEngine, rollout: Rollout) -> torch.Tensor:
    """What the current weights say of sampled tokens, [N, T]."""
    with torch.no_grad():
        logprobs = actor(rollout.input_ids, rollout.attention_mask, rollout.response_mask)[0]
        return torch.where(rollout.response_mask, logprobs, 0.0)


def save_stopping_model(folder: Path) -> Path:
    """A tiny random model whose completions have many lengths, as they end with any of STOP_TOKEN_IDS."""
    model = tiny_model()
    assert model.generation_config is not None
    model.generation_config.eos_token_id = list(STOP_TOKEN_IDS)
    return save_tiny(folder, model)


def favours_short(completions: Sequence[str], **columns: Any) -> list[float]:
    """A reward."""
    return [-float(len(text)) for text in completions]


def rollout_line(folder: Path, model: Path, rows: Path, *more: str) -> list[str]:
    """The command line of four rollouts of short completions, with a checkpoint after each."""
    return [
        *f"--model.path {model} --data.sources {rows} --data.cache_dir {rows.parent}/cache".split(),
        *f"--output_dir {folder} --logging.sinks [] --data.max_eval_rows 2 --actor.optimizer.lr 1e-3".split(),
        *"--rollout.prompts_per_step 2 --rollout.sampling.max_new_tokens 8 --rollout.kv_cache_gib 0.1".split(),
        *"--algorithm.correction.method truncate --algorithm.mini_batches 1".split(),
        *"--train.max_steps 4 --train.save_every 1 --train.keep_last 9 --train.eval_every 1".split(),
        "--reward.components",
        json.dumps([{"function": f"{__file__}:favours_short"}]),
        *words(*more),
    ]


def metrics_without_times(folder: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl, as far as they do not depend on the machine."""
    lines = read_lines(folder / METRICS_FILE)
    return [{key: value for key, value in told.items() if not key.startswith(CLOCK)} for told in lines]
