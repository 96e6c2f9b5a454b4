"""A copy of the critic on other ranks computes its values, after each update, and stops the run where it does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.engines.builder import build_engine
from hybrid_rlhf.engines.engine import EngineFacts, ModelEngine
from hybrid_rlhf.engines.role_model import AbsentEngine
from hybrid_rlhf.engines.separate.broadcast import WeightBroadcast
from hybrid_rlhf.engines.separate.critic_copy import CriticCopy
from hybrid_rlhf.runtime.world import World, create_groups
from tests.support.engines import actor_spec, token_rows
from tests.support.ranks import run_ranks

LAYOUTS: list[tuple[int, dict[str, Any]]] = [(1, {"stage": 3}), (2, {"lora": 4})]
"""Ranks that share a copy, and how the critic trains, on two ranks."""


def built(
    world: World, path: Path, tensor_parallel: int, settings: dict[str, Any]
) -> tuple[ModelEngine | None, CriticCopy]:
    trains, reads = (0, 1), (2, 3)
    create_groups([trains, reads])
    own, other = map(world.part, (trains, reads))
    spec = replace(actor_spec(path, lr=0.05, **settings), role="critic")
    critic = build_engine(spec, own) if own.is_member else None
    model = AbsentEngine("critic", own, EngineFacts(packs=True)) if critic is None else critic
    return critic, CriticCopy(model, world=other, tensor_parallel=tensor_parallel)


def learn(critic: ModelEngine | None) -> None:
    """One update towards values of the tokens."""
    if critic is not None:
        ids = token_rows()
        real = torch.ones_like(ids, dtype=torch.bool)
        critic.backward((critic(ids, real) - ids / 100).square().sum(), count=ids.numel() * critic.world.size)
        critic.step()


@torch.no_grad()
def compared(world: World, path: Path) -> list[list[tuple[float, float]]]:
    """By layout and updates: the largest value, and the largest difference of the copy's on this rank."""
    told = []
    ids = token_rows()
    real = torch.arange(ids.shape[1]) < torch.tensor([10, 7, 3, 9])[:, None]
    for tensor_parallel, settings in LAYOUTS:
        critic, copy = built(world, path, tensor_parallel, settings)
        rounds = []
        for _ in range(3):
            with torch.enable_grad():
                learn(critic)
            copy.sync()
            expected = world.broadcast_object(None if critic is None else critic(ids, real))
            assert expected is not None
            found = copy(ids, real) if copy.world.is_member else expected
            rounds.append((float(expected.abs().max()), float((found - expected).abs().max())))
        told.append(rounds)
    return told


def test_a_copy_computes_the_values_of_the_critic_that_trains(model_folder: Path, tmp_path: Path) -> None:
    for told in run_ranks(compared, 4, tmp_path, model_folder):
        for rounds in told:
            assert all(difference <= 1e-5 for _, difference in rounds), rounds
            assert rounds[0][0] > 1e-3 and len({largest for largest, _ in rounds}) == 3, "the critic learns"


def damaged(world: World, path: Path) -> list[str]:
    """What each rank says of weights that arrive as they were sent, and are put together wrong."""
    critic, copy = built(world, path, 2, {})
    learn(critic)
    receive = WeightBroadcast.receive

    def wrong(self: Any, **settings: Any) -> Any:
        for name, values, persistent in receive(self, **settings):
            yield name, values * (1 + 9 * (name == "score.weight")), persistent

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightBroadcast, "receive", wrong)
        with pytest.raises(UserError) as caught:
            copy.sync()
    return [str(caught.value)]


def test_a_copy_of_other_values_stops_all_ranks(model_folder: Path, tmp_path: Path) -> None:
    for (said,) in run_ranks(damaged, 4, tmp_path, model_folder):
        assert "the critic's copy must agree with its training forward" in said and "after update 1" in said
