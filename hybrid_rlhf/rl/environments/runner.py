"""Runs episodes of a class with `reset` and `step`: the actor and the environment alternate.

Random numbers of a turn are keyed by prompt, sample and turn, so an episode is the same on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.values import is_text
from hybrid_rlhf.configs.sections.environment import EnvironmentConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.data.chat.conversation import completion_text, encode_prompt
from hybrid_rlhf.data.chat.messages import ROLES, Message, Tools, read_message, row_tools, with_ordered_results
from hybrid_rlhf.generation.sampling import SamplingParams, derive_seed
from hybrid_rlhf.loop.user_code import describe_error
from hybrid_rlhf.rl.environments.calls import CallFailure
from hybrid_rlhf.rl.environments.environment import Environment, EnvironmentFactory, StepResult, read_environment
from hybrid_rlhf.rl.environments.episodes import EpisodeRunner, Turns, environment_row, is_finite_number, next_turn
from hybrid_rlhf.rl.environments.observations import ObservationEncoder
from hybrid_rlhf.rl.environments.tools import with_tools
from hybrid_rlhf.rl.types import Episode
from hybrid_rlhf.runtime.observability.logs import shortened
from hybrid_rlhf.runtime.world import World, shared_user_errors
from hybrid_rlhf.serving.packages import require_packages


class EnvironmentRunner(EpisodeRunner):
    """Runs a class with `reset` and `step`."""

    in_lock_step = True

    def __init__(
        self,
        factory: EnvironmentFactory,
        config: EnvironmentConfig,
        *,
        rollout: RolloutConfig,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device,
    ) -> None:
        """Take the environments and settings.

        Raises:
            UserError: when the chat template cannot show observations.
        """
        super().__init__(config, rollout, device)
        self._factory = factory
        self._tokenizer = tokenizer
        self._turns = ObservationEncoder(tokenizer, max_observation_tokens=config.max_observation_tokens)

    def play(
        self, prompt: Mapping[str, Any], params: SamplingParams, sample: int, turns: Turns
    ) -> Future[list[Episode]]:
        """Start an episode; its environment is called between its turns. Environments are created at once, in order."""
        episode, row = Episode(list(prompt["input_ids"])), environment_row(prompt)
        try:
            environment = self._factory.make()
        except Exception as error:  # noqa: BLE001 - the user's own code
            episode.failure = describe_error(error)
            ended: Future[list[Episode]] = Future()
            ended.set_result([episode])
            return ended
        return self._calls.run(self._play(episode, environment, row, params, sample, turns))

    async def _play(self, episode: Episode, environment: Environment, *turns: Any) -> list[Episode]:
        """An episode, after which its environment is closed."""
        try:
            return await self._alternate(episode, environment, *turns)
        finally:
            close = getattr(environment, "close", None)
            closed = None if close is None else await self._calls.result(close)
            if isinstance(closed, CallFailure):
                episode.failure = episode.failure or closed.reason

    async def _alternate(
        self,
        episode: Episode,
        environment: Environment,
        row: dict[str, Any],
        params: SamplingParams,
        sample: int,
        turns: Turns,
    ) -> list[Episode]:
        opening = await self._calls.result(partial(environment.reset, row))
        opening = self._read_opening(opening, row, getattr(environment, "tools", None))
        if isinstance(opening, CallFailure):
            episode.failure = opening.reason
            return [episode]  # a turn would answer the prompt of the row, which is not the task
        episode.prompt = opening or episode.prompt
        for turn in range(self._config.max_turns):
            completion = await next_turn(turns, episode.ids, self._turn_params(episode, params, sample, turn, turns))
            episode.add_turn(completion)
            text = completion_text(completion.token_ids, self._tokenizer)
            step = _read_step(await self._calls.result(partial(environment.step, text)))
            if isinstance(step, CallFailure):
                episode.failure = step.reason
                break
            episode.add_reward(step.reward)
            # An episode whose last turn is truncated did not end by itself, even if the environment is done.
            episode.stopped = step.done and completion.finish_reason == "stop"
            is_last = step.done or turn + 1 == self._config.max_turns
            if is_last or not self._observe(episode, step.observation or "", turns):
                break
        return [episode]

    def _read_opening(
        self, opening: object, row: Mapping[str, Any], offered: Tools | None
    ) -> list[int] | None | CallFailure:
        """Token ids of the prompt that reset returned, with the tools of the environment; None for the row's prompt."""
        if opening is None or isinstance(opening, CallFailure):
            return opening
        messages = [{"role": "user", "content": opening}] if isinstance(opening, str) else opening
        if not _are_messages(messages):
            return CallFailure(f"reset must return messages, a text or None, it returned {shortened(repr(opening))}")
        try:
            read = [read_message("reset", message) for message in cast(list[Message], messages)]
            read = with_ordered_results("reset", read)
            tools = row_tools("the row", dict(row))
            ids = encode_prompt(read, self._tokenizer, tools=[*(tools or []), *offered] if offered else tools)
            if offered and ids == encode_prompt(read, self._tokenizer):
                ids = encode_prompt(with_tools(read, offered), self._tokenizer)
        except UserError as error:
            return CallFailure(str(error))
        limit = self._rollout.max_prompt_tokens
        if not 0 < len(ids) <= limit:
            return CallFailure(f"reset returned {len(ids)} tokens, rollout.max_prompt_tokens is {limit}")
        return ids

    def _observe(self, episode: Episode, observation: str, turns: Turns) -> bool:
        """Append an observation to the episode; false if it leaves no tokens for a turn of the actor."""
        last = episode.ids[-1]
        end = last if last in turns.stop_token_ids else None
        try:
            ids = self._turns.observation_ids(observation, end_token=end)
        except UserError as error:  # a template may reject the observation
            episode.failure = str(error)
            return False
        if len(ids) >= self._tokens_left(episode, turns):
            return False
        episode.add_observation(ids)
        return True

    def _turn_params(
        self, episode: Episode, params: SamplingParams, sample: int, turn: int, turns: Turns
    ) -> SamplingParams:
        left = self._tokens_left(episode, turns)
        limit = min(left, self._config.max_turn_tokens or left)
        seed = derive_seed(params.seed or 0, sample, turn)
        return replace(params, n=1, max_new_tokens=limit, seed=seed, stop=self._factory.stop_strings)

    def _tokens_left(self, episode: Episode, turns: Turns) -> int:
        """Number of tokens that the episode may still have."""
        left = self._rollout.sampling.max_new_tokens - len(episode.token_ids)
        positions = turns.max_positions
        return left if positions is None else min(left, positions - len(episode.ids))


def _read_step(result: object) -> StepResult | CallFailure:
    if isinstance(result, CallFailure):
        return result
    if not isinstance(result, tuple) or len(result) != 3:
        return CallFailure(f"step must return (observation, reward, done), it returned {shortened(repr(result))}")
    observation, reward, done = result
    if not isinstance(done, (bool, np.bool_)):
        return CallFailure(f"step must return done as True or False, it returned {shortened(repr(done))}")
    if not is_finite_number(reward):
        return CallFailure(f"step must return a finite number as reward, it returned {shortened(repr(reward))}")
    if not _is_valid_text(observation) and not (done and observation is None):
        return CallFailure(f"step must return a text as observation, it returned {shortened(repr(observation))}")
    return StepResult(observation, float(reward), bool(done))


def _are_messages(opening: object) -> bool:
    return (
        isinstance(opening, list)
        and bool(opening)
        and all(
            isinstance(turn, dict)
            and turn.get("role") in ROLES
            and (_is_valid_text(turn.get("content")) or "tool_calls" in turn)
            for turn in opening
        )
    )


def _is_valid_text(value: object) -> bool:
    return isinstance(value, str) and is_text(value)


def build_runner(
    config: EnvironmentConfig | None,
    *,
    rollout: RolloutConfig,
    tokenizer: PreTrainedTokenizerBase,
    world: World,
    samples: bool = True,
) -> EpisodeRunner | None:
    """The runner of the configured environment; None without one (a completion is then one turn). Every rank calls.

    Args:
        config: the environment.
        rollout: how completions are sampled.
        tokenizer: tokenizer of the actor.
        world: all ranks.
        samples: true if this rank runs episodes.

    Raises:
        UserError: when the environment cannot be loaded, the chat template cannot show observations, or the address of
            programs is taken.
    """
    if config is None:
        return None
    if config.path is None:
        require_packages("rollout.endpoint" if config.program is None else "environment.program")
        from hybrid_rlhf.rl.environments.programs import ProgramRunner, read_program  # they import those packages

        with shared_user_errors(world):
            program = None if config.program is None else read_program(config)
        return ProgramRunner(program, config, rollout=rollout, tokenizer=tokenizer, world=world, samples=samples)
    with shared_user_errors(world):
        factory = read_environment(config)
    return EnvironmentRunner(factory, config, rollout=rollout, tokenizer=tokenizer, device=world.device)
