"""Evaluation of SFT and preference learning by generation: the model that they train completes prompts, and these
completions are scored and measured as those of RL's held-out prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.algorithms import GRPOConfig
from hybrid_rlhf.configs.preference import PreferenceStepConfig
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.data.chat.conversation import stop_token_ids
from hybrid_rlhf.data.tokenized import load_prompt_data
from hybrid_rlhf.engines.role_model import Actor
from hybrid_rlhf.rl.algorithms.grpo import GRPO
from hybrid_rlhf.rl.metrics import evaluation_metrics
from hybrid_rlhf.rl.parts import RLParts
from hybrid_rlhf.rl.rewards import Reward
from hybrid_rlhf.rl.rewards.reward import background_part
from hybrid_rlhf.rl.roles import Roles
from hybrid_rlhf.rl.rollouts.sampler import RolloutSampler
from hybrid_rlhf.runtime.run import Run
from hybrid_rlhf.runtime.world import shared_user_errors

EVALUATION_STEP = 2**32
"""Key of the evaluation's random streams, distinct from training steps; the same at every evaluation."""


def prepare_evaluation(
    config: SFTConfig | PreferenceStepConfig, run: Run, tokenizer: PreTrainedTokenizerBase
) -> Callable[[Actor], Callable[[], dict[str, float]]]:
    """Read the prompts and import the reward of train.evaluate_by_generation, before a model is loaded.

    Returns:
        a function that takes the trained model, and returns the evaluation, which every rank calls.

    Raises:
        UserError: on every rank, for a prompt or a reward that cannot be read.
    """
    section = config.train.evaluate_by_generation
    assert section is not None
    data = replace(config.data, sources=section.sources, eval_sources=section.sources, split=None)
    prompts = load_prompt_data(
        data, tokenizer=tokenizer, seed=config.seed, world=run.world, max_prompt_tokens=section.max_prompt_tokens
    ).held_out
    with shared_user_errors(run.world):
        components = [background_part(component, run.world, run.folder) for component in section.components]
    reward = Reward(components, run.world)
    reward.require_columns(lambda: map(json.loads, prompts["columns"]))
    rows = list(prompts)

    def of_model(actor: Actor) -> Callable[[], dict[str, float]]:
        sampler = RolloutSampler(
            actor,
            section.rollout,
            world=run.world,
            stop_token_ids=stop_token_ids(tokenizer, actor.facts.eos_token_ids),
            seed=config.seed,
            timers=run.timers,
            tokenizer=tokenizer,
        )
        micro_batches = config.train.micro_batches(run.world.device.type, config.model)
        roles = Roles(run.world, actor, reward)
        parts = RLParts.of(roles, GRPO(GRPOConfig(kl=None)), sampler, micro_batches=micro_batches)

        def evaluate() -> dict[str, float]:
            rollout = sampler.sample(rows, step=EVALUATION_STEP, shown_as="evaluation")
            rollout = parts.scorer.score(rows, rollout, evaluates=True)
            return evaluation_metrics(rollout, run.world, prefix="eval", prompts=rows)

        return evaluate

    return of_model
