"""When a run keeps its inference layout by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rl import RewardSumConfig, RLConfig
from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.configs.sections.placement import read_placement
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.planning.phase_memory import GPU_RESERVE_GIB, Device
from hybrid_rlhf.planning.room import plan_has_room, resolve_keep_weights
from hybrid_rlhf.planning.step_memory import Planner
from hybrid_rlhf.runtime.world import World

GPU = torch.device("cuda", 0)


def config_of(folder: Path, **rollout: Any) -> RLConfig:
    sizes = {"prompts_per_step": 16, "max_prompt_tokens": 32, **rollout}
    sampling = SamplingParams(max_new_tokens=32)
    return RLConfig(
        model=ModelConfig(path=str(folder)),
        reward=RewardSumConfig(components=[str(folder)]),
        rollout=RolloutConfig(sampling=sampling, **sizes),
    )


def needed(config: RLConfig) -> float:
    """Bytes of the largest phase with the layout kept, had memory no end."""
    kept = replace(config, rollout=replace(config.rollout, keep_weights=True))
    return max(phase.total for phase in Planner(Device(GPU, 1, 2.0**50)).phases(kept))


def test_it_is_kept_where_every_phase_has_room(model_folder: Path) -> None:
    config = config_of(model_folder)
    assert plan_has_room(config, Device(GPU, 1, 2 * needed(config)))
    assert not plan_has_room(config, Device(GPU, 1, 0.9 * needed(config)))


def test_auto_asks_the_plan_on_a_gpu_and_is_off_on_a_cpu(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(model_folder)
    assert config.rollout.keep_weights == "auto"
    total = [2 * needed(config) + GPU_RESERVE_GIB * 2**30]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=total[0]))

    def decided(config: RLConfig, device: str = "cuda") -> bool | str:
        return resolve_keep_weights(config, World(0, 1, 0, 1, torch.device(device), None)).rollout.keep_weights

    assert decided(replace(config, placement=read_placement("separation"))) == "auto", "the sampler decides"
    assert decided(config) is True
    assert decided(config, "cpu") is False
    assert decided(config_of(model_folder, keep_weights=False)) is False, "what is set stays"
    assert decided(config_of(model_folder, keep_weights=True), "cpu") is True
    assert decided(config_of(model_folder, backend="module")) is False
    total[0] = GPU_RESERVE_GIB * 2**30
    assert decided(config) is False


def test_at_least_a_row_is_decoded() -> None:
    with pytest.raises(UserError, match="max_decode_rows must be 1 or more, got 0"):
        RolloutConfig(max_decode_rows=0)


def test_the_plan_follows_the_rows_that_are_decoded_together(model_folder: Path) -> None:
    def cache(rows: int | None) -> float:
        config = config_of(model_folder, prompts_per_step=512, max_decode_rows=rows)
        return Planner(Device(GPU, 1, 2.0**50)).phases(config)[0].need.cache

    row = cache(2) - cache(1)
    assert row > 0 and cache(None) == cache(1) + 511 * row and cache(100) == cache(1) + 99 * row
