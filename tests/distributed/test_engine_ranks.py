"""Engines on some of the ranks train as one process does, side by side, and a collective of others raises."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybrid_rlhf.engines.builder import build_actor
from hybrid_rlhf.engines.partition import full_tensors
from hybrid_rlhf.generation import SamplingParams
from hybrid_rlhf.runtime.world import World, create_groups
from tests.support.engines import PROMPTS, actor_spec, train_step
from tests.support.ranks import run_ranks

STAGES = {(1, 2): 3, (0, 1, 2, 3): 2, (3,): 3, (0, 2, 3): 1}
"""ZeRO stages of engines by their ranks; three ranks have unequal shares of four rows, so theirs is not 3."""
Result = tuple[float, dict[str, torch.Tensor], list[list[int]]]


def _train(world: World, path: Path, stage: int, lora: int) -> Result:
    spec = actor_spec(path, stage=stage, lora=lora)
    assert spec.optimizer is not None
    # with a large eps an update is proportional to the gradient
    engine = build_actor(replace(spec, optimizer=replace(spec.optimizer, lr=1.0, eps=100.0)), world)
    loss = [train_step(engine, world) for _ in range(2)][-1]
    with engine.inference() as generation:
        sampled = generation.generate(PROMPTS, SamplingParams(max_new_tokens=6, temperature=0.0))
    weights = {name: tensor for name, tensor in full_tensors(engine.lm, world) if tensor is not None}
    return loss, weights, [completion.token_ids for (completion,) in sampled]


def _train_parts(world: World, path: Path, lora: int) -> dict[tuple[int, ...], Result]:
    """One engine per part, at the same time; updates alternate on the ranks that have several."""
    create_groups(STAGES)
    worlds = {ranks: world.part(ranks) for ranks in STAGES}
    found = {}
    for ranks, part in worlds.items():
        if part.is_member:
            result = _train(part, path, STAGES[ranks], lora)
            if part.is_main:
                found[ranks] = result
    merged: dict[tuple[int, ...], Result] = {}
    for of_rank in world.all_gather_objects(found):
        merged |= of_rank
    return merged


@pytest.mark.parametrize("lora", [pytest.param(0, marks=pytest.mark.faults), pytest.param(4, marks=pytest.mark.slow)])
def test_engines_on_parts_of_the_ranks_train_alike(world: World, model_folder: Path, tmp_path: Path, lora: int) -> None:
    loss, weights, sampled = _train(world, model_folder, 0, lora)
    for part, other in run_ranks(_train_parts, 4, tmp_path, model_folder, lora)[0].items():
        assert other[0] == pytest.approx(loss, rel=1e-5), part
        assert other[2] == sampled, part
        for name, tensor in weights.items():
            torch.testing.assert_close(other[1][name], tensor, rtol=1e-4, atol=1e-5, msg=f"{name} on {part}")


def _reach_out(world: World) -> list[str]:
    """What collectives of other ranks raise, inside and outside a part."""
    part = world.part((0, 2))
    errors = []
    if part.is_member:
        with part.as_default():
            assert dist.get_world_size() == 2
            assert dist.get_rank() == part.rank
            part.barrier()
            with pytest.raises(RuntimeError) as raised:
                world.barrier()
            errors.append(str(raised.value))
    else:
        with pytest.raises(RuntimeError) as raised:
            part.barrier()
        errors.append(str(raised.value))
    world.barrier()
    assert world.part((0, 2)).group is part.group
    return errors


def test_a_collective_that_others_never_enter_raises(tmp_path: Path) -> None:
    inside, outside, _ = run_ranks(_reach_out, 3, tmp_path)
    assert "inside a model on ranks [0, 2]" in inside[0]
    assert "none of them" in outside[0]
