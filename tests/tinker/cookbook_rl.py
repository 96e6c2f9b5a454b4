"""The cookbook's RL loop, unmodified, in an environment that rewards low tokens. Run as: MODEL LOG_FOLDER [LOSS]."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import chz
import tinker
from tinker_cookbook.rl import train
from tinker_cookbook.rl.types import ActionExtra, Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult

REWARDED_BELOW = 130


class LowTokens(Env):
    async def initial_observation(self) -> tuple[tinker.ModelInput, list[int]]:
        return tinker.ModelInput.from_ints([5, 6, 7]), [2]

    async def step(self, action: list[int], *, extra: ActionExtra | None = None) -> StepResult:
        return StepResult(
            reward=sum(token < REWARDED_BELOW for token in action) / len(action),
            episode_done=True,
            next_observation=tinker.ModelInput.from_ints([]),
            next_stop_condition=[2],
        )


class Group(EnvGroupBuilder):
    async def make_envs(self) -> Sequence[Env]:
        return [LowTokens() for _ in range(16)]


class Groups(RLDataset):
    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        return [Group(), Group()]

    def __len__(self) -> int:
        return 25


@chz.chz
class Builder(RLDatasetBuilder):
    async def __call__(self) -> tuple[RLDataset, None]:
        return Groups(), None


if __name__ == "__main__":
    config = train.Config(
        log_path=sys.argv[2],
        model_name=sys.argv[1],
        recipe_name="test",
        dataset_builder=Builder(),
        learning_rate=4e-2,
        max_tokens=4,
        lora_rank=4,
        save_every=5,
        eval_every=0,
        loss_fn=sys.argv[3] if len(sys.argv) > 3 else "importance_sampling",
        rollout_json_export=False,
    )
    asyncio.run(train.main(config))
