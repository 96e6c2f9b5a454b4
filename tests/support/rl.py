"""The parts of an RL step over real engines on one rank, of tiny models, and rollouts of random tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from hybrid_rlhf.configs.algorithms import GRPOConfig, PPOConfig
from hybrid_rlhf.configs.sections.algorithm import KLConfig, PenaltiesConfig
from hybrid_rlhf.configs.sections.environment import EnvironmentConfig
from hybrid_rlhf.configs.sections.model import LoraConfig, ModelConfig
from hybrid_rlhf.configs.sections.rewards import RewardComponentConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.configs.sections.training import MicroBatches, OptimizerConfig, ZeroConfig
from hybrid_rlhf.data.chat.conversation import encode_prompt
from hybrid_rlhf.engines.builder import EngineSpec, build_actor, build_engine
from hybrid_rlhf.rl.algorithms.grpo import GRPO
from hybrid_rlhf.rl.algorithms.ppo import PPO
from hybrid_rlhf.rl.environments import build_runner
from hybrid_rlhf.rl.mini_batches import MiniBatchPlan
from hybrid_rlhf.rl.parts import RLParts
from hybrid_rlhf.rl.rewards import CompletionTexts, Reward, RewardReport
from hybrid_rlhf.rl.rewards.models import ModelReward
from hybrid_rlhf.rl.roles import Roles
from hybrid_rlhf.rl.rollouts.advantages import ScoreScaling
from hybrid_rlhf.rl.rollouts.sampler import RolloutSampler
from hybrid_rlhf.rl.sharing import LocalRows
from hybrid_rlhf.rl.types import Batch, Rollout
from hybrid_rlhf.runtime.observability.timers import Timers
from hybrid_rlhf.runtime.world import World
from tests.support.tiny import tiny_tokenizer

PROMPTS = [{"input_ids": [5, 6, 7]}, {"input_ids": [9, 8]}, {"input_ids": [4, 4, 4, 4]}, {"input_ids": [11, 3]}]
ALGORITHM = PPOConfig(kl=KLConfig(coef=0.1), penalties=PenaltiesConfig(missing_eos=0.5), epochs=2, mini_batches=1)
SAMPLING = RolloutConfig(prompts_per_step=4, sampling=SamplingParams(n=2, max_new_tokens=10, temperature=0.8))
COMPLETIONS = CompletionTexts(
    [[{"role": "user", "content": f"question {row}"}] for row in range(5)],
    ["a", "bb", "ccc", "", "eeeee"],
    {"target": [1, 2, None, 4, 5]},
)
MICRO_BATCH_ROWS: list[list[int | None]] = [[4, 0], [2, None], [1, 3]]
"""Rows of each micro-batch; None: a row of padding."""


def build_parts(
    world: World,
    paths: dict[str, str],
    *,
    algorithm: PPOConfig = ALGORITHM,
    lora_rank: int = 0,
    reward: Reward | None = None,
    sampling: RolloutConfig = SAMPLING,
) -> RLParts:
    """PPO's parts, over the models of `paths`; without a reward that of the reward model."""

    def spec(role: Any, path: str, lr: float | None) -> EngineSpec:
        optimizer = None if lr is None else OptimizerConfig(lr=lr, schedule="constant", warmup_fraction=0.0)
        adapters = LoraConfig(rank=lora_rank) if role == "actor" and lora_rank else None
        return EngineSpec(role, paths[path], ModelConfig(), ZeroConfig(), 0, optimizer, adapters)

    if reward is None:
        component = RewardComponentConfig(model=paths["reward"])
        reward = Reward([ModelReward(component, build_engine(spec("reward", "reward", None), world))], world)
    roles = Roles(
        world,
        build_actor(spec("actor", "actor", 1e-2), world, rollout=sampling),
        reward,
        build_engine(spec("critic", "reward", 1e-2), world),
        None if lora_rank else build_engine(spec("reference", "reference", None), world),
    )
    stops = tuple(range(3, 20))
    return _parts(world, roles, PPO(algorithm), sampling=sampling, stop_token_ids=stops, tokenizer=tiny_tokenizer())


def _parts(world: World, roles: Roles, algorithm: Any, *, sampling: RolloutConfig, **sampler: Any) -> RLParts:
    rollouts = RolloutSampler(roles.sampler, sampling, world=world, seed=0, timers=Timers(world.device), **sampler)
    return RLParts.of(roles, algorithm, rollouts, micro_batches=MicroBatches(2))


def sample_and_score(parts: RLParts, *, mini_batches: int = 1) -> tuple[Rollout, MiniBatchPlan]:
    """Completions of PROMPTS with scores, log-probs and values, and the plan that these were computed by."""
    return score(parts, parts.sampler.sample(PROMPTS, step=1), mini_batches=mini_batches)


def score(parts: RLParts, rollout: Rollout, *, mini_batches: int = 1) -> tuple[Rollout, MiniBatchPlan]:
    """The same for completions of PROMPTS that are there."""
    rollout = parts.scorer.score(PROMPTS, rollout)
    plan = parts.planner.plan(rollout, step=1, mini_batches=mini_batches)
    return parts.scorer.compute_logprobs(rollout, plan), plan


def collect(parts: RLParts, *, mini_batches: int = 1) -> tuple[Batch, MiniBatchPlan]:
    """A batch of completions of PROMPTS, and its mini-batches."""
    rollout, plan = sample_and_score(parts, mini_batches=mini_batches)
    return parts.estimate(rollout, kl_coef=0.1), plan


def rollout_of(attention_mask: torch.Tensor, response_mask: torch.Tensor, **known: Any) -> Rollout:
    """A rollout of these tokens, and zeros where nothing is known."""
    shape = attention_mask.shape
    zeros = torch.zeros(shape)
    return Rollout(
        **{
            "input_ids": torch.zeros(shape, dtype=torch.long),
            "attention_mask": attention_mask,
            "response_mask": response_mask,
            "sampled_logprobs": zeros,
            "drawn_logprobs": known.get("sampled_logprobs", zeros),
            "stopped": torch.ones(shape[0], dtype=torch.bool),
            "weight_versions": torch.zeros(shape, dtype=torch.long),
            "groups": torch.arange(shape[0]),
            **known,
        }
    )


def whole(rollout: Rollout, world: World) -> Rollout:
    """The rows of all ranks, on every rank."""
    index = rollout.numbered(world)
    rows = range(len(index))
    return index.fetch(rollout, [rows])(rows)


def scaled(scaling: ScoreScaling, scores: torch.Tensor) -> torch.Tensor:
    """Scores of a step, scaled."""
    if scaling.follows_scores:
        scaling.observe(scores)
    return scaling.scaled(scores)


def rewarded(
    reward: Reward, rollout: Rollout, micro_batches: Sequence[list[int | None]], texts: CompletionTexts | None = None
) -> RewardReport:
    """The report of a rollout whose rows are all on this rank; `texts` are those of its groups, None if none may
    read them."""

    def read(rows: Rollout) -> CompletionTexts:
        assert rows.groups is not None and texts is not None
        return texts.select(rows.groups.tolist())

    rows = LocalRows(rollout, range(len(rollout)))
    return reward(rows, len(rollout), lambda *_: list(micro_batches), read)


def rollout_of_rows(rows: Sequence[Sequence[int]] = ((5,),) * 5, prompt: int = 0) -> Rollout:
    """Token ids of prompts, `prompt` tokens each, with their completions."""
    mask = torch.arange(max(map(len, rows)))[None] < torch.tensor([len(row) for row in rows])[:, None]
    ids = torch.zeros(mask.shape, dtype=torch.long)
    ids[mask] = torch.tensor([token for row in rows for token in row])
    return rollout_of(mask, mask & (torch.arange(mask.shape[1]) >= prompt), input_ids=ids, stopped=mask[:, 0])


def chat_row(text: str, **columns: Any) -> dict[str, Any]:
    """A prompt as `load_prompt_data` gives it."""
    prompt = [{"role": "user", "content": text}]
    ids = encode_prompt(prompt, tiny_tokenizer())
    return {"input_ids": ids, "prompt": json.dumps(prompt), "columns": json.dumps(columns)}


def episode_parts(
    world: World,
    path: str,
    config: EnvironmentConfig,
    *,
    sampling: RolloutConfig,
    algorithm: GRPOConfig,
    stop_token_ids: tuple[int, ...],
) -> RLParts:
    """GRPO's parts: an actor with an environment and no other reward."""
    optimizer = OptimizerConfig(lr=1e-2, schedule="constant", warmup_fraction=0.0)
    spec = EngineSpec("actor", path, ModelConfig(dtype="float32"), ZeroConfig(), 0, optimizer)
    roles = Roles(world, build_actor(spec, world, rollout=sampling), Reward([], world))
    tokenizer = tiny_tokenizer()
    return _parts(
        world,
        roles,
        GRPO(algorithm),
        sampling=sampling,
        stop_token_ids=stop_token_ids,
        tokenizer=tokenizer,
        environments=build_runner(config, rollout=sampling, tokenizer=tokenizer, world=world),
    )
