"""The gradient of a PPO update is one number a weight: ranks, ZeRO stages, micro-batches and padding do not change it.

Rows as multi-turn rollouts have them: random lengths, responses that are empty, and gaps in a response where somebody
else speaks. A gradient is read off the weights after an update by AdamW with lr and eps of 10^6 each, which subtracts
it; so the whole way through the engine is compared, and by a norm over all weights.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rlhf.algorithms.experience import Experience, Layout, Sequences
from hybrid_rlhf.algorithms.ppo import PPOUpdater
from hybrid_rlhf.algorithms.rollout import Roles
from hybrid_rlhf.configs.batch_plan import MicroBatches
from hybrid_rlhf.configs.ppo import AlgorithmConfig, RolloutConfig
from hybrid_rlhf.configs.sections import ModelConfig, OptimizerConfig, ZeroConfig
from hybrid_rlhf.engines.builder import EngineSpec, build_actor, build_engine
from hybrid_rlhf.engines.partition import whole_tensors
from hybrid_rlhf.runtime.world import World
from tests.engines.ranks import run_ranks

SEEDS = (0, 1, 2)
TOLERANCE = 1e-5
PADDED, PACKED = "eager", "auto"
PLAIN = (0, PADDED, MicroBatches(rows=9, tokens=8192))
CUTS = (MicroBatches(rows=2, tokens=8192), MicroBatches(rows=None, tokens=24))
Case = tuple[int, str, MicroBatches]
"""ZeRO stage, attention, what passes at once."""
CASES: list[Case] = [
    (stage, attention, CUTS[(stage + shift) % 2])
    for stage, (shift, attention) in product(range(4), enumerate((PACKED, PADDED)))
]
ALGORITHM = AlgorithmConfig(
    epochs=2, kl_in="loss", kl_estimator="k3", entropy_coef=0.1, clip_low=0.9, clip_high=20.0, value_clip=0.5
)


def experience(seed: int) -> Experience:
    """Random in everything; some responses are empty, and some have gaps."""
    chance = torch.Generator().manual_seed(seed)
    rows, prompt, response = 9, 8, 14
    time = torch.arange(prompt + response)
    starts = torch.randint(1, prompt, (rows, 1), generator=chance)
    lengths = torch.randint(0, response, (rows, 1), generator=chance)
    lengths[seed] = 0
    attention = time < starts + lengths
    answered = attention & (time >= starts) & (torch.rand(rows, len(time), generator=chance) > 0.3)

    def normal(scale: float, mean: float = 0.0) -> torch.Tensor:
        return mean + scale * torch.randn(rows, len(time), generator=chance)

    values = normal(1.0)
    old, reference = normal(0.5, -5.5), normal(0.5, -5.5)
    sequences = Sequences(
        torch.randint(3, 200, attention.shape, generator=chance), attention, answered, old, old, lengths[:, 0] > 3
    )
    return Experience(
        sequences, old, reference, values, torch.zeros(rows), normal(1.0), normal(1.0), values + normal(1.0)
    )


def gradients(world: World, path: str, cases: list[Case]) -> dict[tuple[int, int, str], torch.Tensor]:
    """For each case and seed the gradients of actor and critic in a row, on rank 0."""
    optimizer = OptimizerConfig(lr=1e6, eps=1e6, schedule="constant", warmup_fraction=0.0, max_grad_norm=0.0)
    found = {}
    for number, ((stage, attention, micro), seed) in enumerate(product(cases, SEEDS)):
        spec = EngineSpec("actor", path, ModelConfig(attention=attention), ZeroConfig(stage=stage), 0, optimizer)  # type: ignore[arg-type]
        actor, critic = build_actor(spec, world), build_engine(replace(spec, role="critic"), world)
        roles: Any = Roles(actor, critic, None, None)  # type: ignore[arg-type]
        rows = experience(seed)
        layout = Layout.plan(
            rows.sequences, mini_batches=1, micro_batches=replace(micro, padded=attention == PADDED), rank=world.rank,
            ranks=world.size, seed=[number],
        )  # fmt: skip
        before = [value for engine in (actor, critic) for _, value in whole_tensors(engine.lm, world)]
        PPOUpdater(roles, ALGORITHM, rollout=RolloutConfig(max_new_tokens=14)).update(rows, [layout], kl_coef=0.3)
        after = [value for engine in (actor, critic) for _, value in whole_tensors(engine.lm, world)]
        if world.is_main:
            parts = [(a.double() - b.double()).flatten() for a, b in zip(before, after, strict=True) if a is not None]
            found[seed, stage, f"{attention} {micro}"] = torch.cat(parts)
    return found


@pytest.fixture(scope="module")
def expected(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, torch.Tensor]:
    """One rank, no ZeRO, padded rows in one micro-batch."""
    folder = tmp_path_factory.mktemp("plain")
    found = run_ranks(gradients, 1, folder, str(model_folder), [PLAIN])[0]
    return {seed: gradient for (seed, *_), gradient in found.items()}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_an_update_does_not_depend_on_how_it_is_cut(
    ranks: int, model_folder: Path, tmp_path: Path, expected: dict[int, torch.Tensor]
) -> None:
    cases = CASES if ranks < 4 else CASES[ranks % 3 :: 3]
    found = run_ranks(gradients, ranks, tmp_path, str(model_folder), cases)[0]
    assert len(found) == len(cases) * len(SEEDS)
    for (seed, *case), gradient in found.items():
        size = float(expected[seed].norm())
        assert size > 0.1
        error = float((gradient - expected[seed]).norm()) / size
        assert error < TOLERANCE, (case, seed, error)
