"""Scores of edited completions and branches by the reward components of a run, without its actor."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.rules import require
from hybrid_rlhf.data.chat.conversation import encode_completion
from hybrid_rlhf.data.chat.messages import row_tools
from hybrid_rlhf.data.tokenized import load_prompt_data
from hybrid_rlhf.loop.non_finite import json_numbers
from hybrid_rlhf.loop.setup import image_rules, start_step
from hybrid_rlhf.planning.out_of_memory import explain_out_of_memory
from hybrid_rlhf.rl.images import ImageCatalogue, ImagesOf, digests_of
from hybrid_rlhf.rl.mini_batches import MiniBatchPlanner
from hybrid_rlhf.rl.replay.recorded import RecordedStep
from hybrid_rlhf.rl.rewards import CompletionTexts, Reward
from hybrid_rlhf.rl.rewards.components import read_prompt
from hybrid_rlhf.rl.roles import build_reward_alone, place_roles
from hybrid_rlhf.rl.types import Episode, Rollout
from hybrid_rlhf.runtime.run import start_run


@dataclass(frozen=True)
class SampleScore:
    """The score of a completion."""

    score: float | None
    """Weighted sum of the components, without penalties; None if a component that fails drops the completion."""
    components: dict[str, float | None]
    """Score of each component by name, before its weight; None where it does not apply, or fails and
    does not score 0."""


def rescore(recorded: RecordedStep, index: int, completion: str, scratch: Path) -> SampleScore:
    """Score a text as a completion of a sample's prompt, in this process alone.

    Args:
        recorded: the step of the sample.
        index: index of the sample.
        completion: the text; it counts as a completion that ended by itself.
        scratch: an empty folder; the folder of the run is only read.

    Raises:
        UserError: if the run has no reward components, its data has changed, or a component stops at a failure.
    """
    row = recorded.sample(index)
    config = _alone(recorded.config, scratch)
    require(
        bool(config.reward.components),
        "rescore needs reward components, the run has none: its environment gives the scores",
    )
    require(
        "prompt_row" in row,
        f"rescore needs prompt_row in samples.jsonl, step {recorded.step} was written without it: take a newer run",
    )
    with start_run(config) as run, explain_out_of_memory(config, run):
        path, tokenizer = start_step(config, run, config.model.path)
        data = load_prompt_data(
            config.data,
            tokenizer=tokenizer,
            seed=config.seed,
            world=run.world,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
            images=image_rules(config, path, tokenizer),
        )
        prompts, images = data.train, ImageCatalogue(data.train, data.held_out) if data.has_images else None
        known = row["prompt_row"] < len(prompts)
        require(
            known and read_prompt(prompts[row["prompt_row"]]) == row["prompt"],
            f"rescore reads the run's data, row {row['prompt_row']} of it is not the sample's prompt: restore "
            "data.sources",
        )
        prompt = prompts[row["prompt_row"]]
        reward = build_reward_alone(config, run, place_roles(config, run, path), tokenizer, images)
        ids = _completion_ids(prompt, completion, tokenizer)
        planner = MiniBatchPlanner(
            replace(config.train.micro_batches(run.world.device.type), padded=not reward.packs),
            seed=config.seed,
            world=run.world,
        )
        rollout = completed(prompt["input_ids"], [ids], [True], digests_of(prompt))
        images_of = images or (lambda rollout: None)
        return score_completions(reward, rollout, prompt, images_of, tokenizer=tokenizer, planner=planner)[0]


def score_completions(
    reward: Reward,
    rollout: Rollout,
    prompt: Mapping[str, Any],
    images_of: ImagesOf,
    *,
    tokenizer: PreTrainedTokenizerBase,
    planner: MiniBatchPlanner,
) -> list[SampleScore]:
    """The score of each row of a rollout of one prompt, over all ranks. Every rank calls.

    Raises:
        UserError: if a component that stops at a failure fails.
    """
    plan = planner.plan(rollout)
    index = plan.index
    report = reward(
        index.fetch(rollout, reward.micro_batches(plan.micro_batches)),
        len(index),
        plan.micro_batches,
        lambda rows: CompletionTexts.read([prompt], rows, tokenizer),
        images_of,
        may_drop_all=True,
    )
    scores = json_numbers(report.scores)
    components = {name: json_numbers(values) for name, values in report.components.items()}
    return [
        SampleScore(
            None if row in report.dropped else score, {name: values[row] for name, values in components.items()}
        )
        for row, score in enumerate(scores)
    ]


def completed(
    prompt: Sequence[int],
    completions: Sequence[Sequence[int]],
    stopped: Sequence[bool],
    images: Sequence[str] = (),
) -> Rollout:
    """Token ids of completions of a prompt, with the digests of its images, as a rollout to be scored, without
    log-probs."""
    episodes = [
        Episode(list(prompt), list(ids), [True] * len(ids), stopped=ended, images=images)
        for ids, ended in zip(completions, stopped, strict=True)
    ]
    return Rollout.of(episodes, [0] * len(episodes))


def _alone(config: RLConfig, scratch: Path) -> RLConfig:
    """The config on one rank, in a scratch folder."""
    return replace(
        config,
        output_dir=str(scratch),
        resume="never",
        placement=None,
        model=replace(config.model, sequence_parallel=1, expert_parallel=1, tensor_parallel=1),
        rollout=replace(config.rollout, tensor_parallel=1),
        faults=replace(config.faults, check_weights=False),
    )


def _completion_ids(prompt: Mapping[str, Any], text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens of a completion to the end of its turn, as the actor would sample them."""
    turn = [{"role": "assistant", "content": text}]
    tools = row_tools("the row", json.loads(prompt["columns"]))
    encoded = encode_completion(read_prompt(prompt), turn, tokenizer, tools=tools)
    sampled = [place for place, has_loss in enumerate(encoded.loss_mask) if has_loss]
    return encoded.input_ids[sampled[0] : sampled[-1] + 1]
