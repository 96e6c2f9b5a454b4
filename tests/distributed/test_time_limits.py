"""Every process group of a run has the time limit of its collectives, also those that DeepSpeed creates.

torch's defaults are 30 minutes for gloo and 10 for NCCL, and would end a phase that may last longer.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import distributed_c10d

from hybrid_rlhf.cli import rl
from hybrid_rlhf.configs.sections.run import FaultsConfig
from hybrid_rlhf.engines.builder import build_engine
from hybrid_rlhf.runtime import run
from hybrid_rlhf.runtime.world import World
from tests.support.engines import actor_spec
from tests.support.families import EXPERT_VARIANTS, variant
from tests.support.placements import ZERO_3, PlacementTrial, placement_workspace, run_words
from tests.support.ranks import COLLECTIVE_SECONDS, run_main, run_ranks
from tests.support.tiny import save_tiny

CPU = torch.device("cpu")
PHASE_SECONDS = 7200.0


def limits_by_group() -> dict[str, float]:
    """Seconds by name and size, of all groups of this process."""
    groups: dict[Any, Any] = distributed_c10d._world.pg_map
    return {
        f"{group.group_name} of {group.size()}": group._get_backend(CPU).options._timeout.total_seconds()
        for group in groups
    }


def main(line: list[str]) -> None:
    """A run that writes the limits of its groups before it leaves them."""
    close = run.close_world

    def recorded() -> None:
        rank = torch.distributed.get_rank()
        Path(line[0], f"limits_{rank}.json").write_text(json.dumps(limits_by_group()))
        close()

    with mock.patch.object(run, "close_world", recorded):
        rl.main(line[1:])


def engines(world: World, dense: Path, experts: Path) -> dict[str, float]:
    """Groups of tensor, expert and sequence parallel engines and of ZeRO."""
    for path, splits, stage in (
        (dense, {"tensor_parallel": 2}, 1),
        (dense, {"sequence_parallel": 2}, 3),
        (experts, {"expert_parallel": 2}, 1),
    ):
        spec = actor_spec(path, stage=stage)
        build_engine(replace(spec, model=replace(spec.model, **splits)), world)
    return limits_by_group()


def test_groups_of_engines(model_folder: Path, tmp_path: Path) -> None:
    save_tiny(tmp_path / "experts", variant(EXPERT_VARIANTS[0]))
    for limits in run_ranks(engines, 2, tmp_path, model_folder, tmp_path / "experts"):
        assert len(limits) >= 3 and set(limits.values()) == {COLLECTIVE_SECONDS}, limits


@pytest.mark.slow
def test_groups_of_a_run(model_folder: Path, tmp_path: Path) -> None:
    placement = "{sampler: {ranks: 0-1, tensor_parallel: 2}, judge: {ranks: 0-1, zero: 3}, actor: {ranks: 2-3}}"
    workspace = placement_workspace(tmp_path, model_folder)
    trial = PlacementTrial("", "ppo", 4, placement, ZERO_3)
    words = run_words(workspace, trial, tmp_path / "run")
    limit = FaultsConfig(phase_timeout_seconds=PHASE_SECONDS).collective_timeout_seconds
    run_main(__name__, 4, [str(tmp_path), *words, "--faults.phase_timeout_seconds", str(PHASE_SECONDS)])
    for rank in range(4):
        limits = json.loads((tmp_path / f"limits_{rank}.json").read_text())
        assert len(limits) >= 2 and set(limits.values()) == {limit}, limits
