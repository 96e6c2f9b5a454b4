"""Checkpoints to resume from: engines, loop state and random states, with a manifest written last.

A folder without a manifest is not whole and is never used.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.engines.averaging import WeightAverage
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.runtime.disk import full_disk_named
from hybrid_rlhf.runtime.run import CHECKPOINT_MANIFEST, CHECKPOINTS
from hybrid_rlhf.runtime.world import World


def save_checkpoint(
    run_folder: Path,
    step: int,
    *,
    engines: Mapping[str, ModelEngine],
    loop_state: Mapping[str, Any],
    world: World,
    average: WeightAverage | None = None,
) -> None:
    """Write run_folder/checkpoints/step_N, beside and renamed; the one before is removed after.

    Args:
        run_folder: of the run.
        step: optimizer updates or rollouts done.
        engines: by role.
        loop_state: JSON: data position, KL controller.
        world: every rank calls.
        average: the actor's moving average, if any.
    """
    target = run_folder / CHECKPOINTS / f"step_{step}"
    beside = target.with_name(f"{target.name}.partial")
    if world.is_main:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
    world.barrier()
    with full_disk_named(run_folder):
        for role, engine in engines.items():
            engine.save_state(str(beside / role))
        torch.save(_rank_state(average), beside / f"rank_{world.rank}.pt")
    world.barrier()
    if world.is_main:
        manifest = {"step": step, "world_size": world.size, "loop": dict(loop_state)}
        partial = beside / f"{CHECKPOINT_MANIFEST}.partial"
        partial.write_text(json.dumps(manifest, indent=2))
        os.replace(partial, beside / CHECKPOINT_MANIFEST)
        shutil.rmtree(target, ignore_errors=True)
        beside.rename(target)
        for old in (run_folder / CHECKPOINTS).glob("step_*"):
            if old != target:
                shutil.rmtree(old)
    world.barrier()


def load_checkpoint(
    checkpoint: Path,
    *,
    engines: Mapping[str, ModelEngine],
    world: World,
    average: WeightAverage | None = None,
) -> tuple[int, dict[str, Any]]:
    """Put engines and random states back; returns the step and the loop state.

    Raises:
        UserError: when the checkpoint is of another number of ranks.
    """
    manifest = json.loads((checkpoint / CHECKPOINT_MANIFEST).read_text())
    if manifest["world_size"] != world.size:
        raise UserError(
            f"a run resumes on the ranks it had, {checkpoint} has {manifest['world_size']}, this is {world.size}: "
            f"start {manifest['world_size']} processes"
        )
    for role, engine in engines.items():
        engine.load_state(str(checkpoint / role))
    state = torch.load(checkpoint / f"rank_{world.rank}.pt", weights_only=True)
    torch.set_rng_state(state["cpu_rng"])
    if "cuda_rng" in state:
        torch.cuda.set_rng_state(state["cuda_rng"])
    if average is not None:
        average.load_state_dict(state["average"])
    return int(manifest["step"]), manifest["loop"]


def _rank_state(average: WeightAverage | None) -> dict[str, Any]:
    state: dict[str, Any] = {"cpu_rng": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda_rng"] = torch.cuda.get_rng_state()
    if average is not None:
        state["average"] = average.state_dict()
    return state
