"""Runs episodes of a class with `reset` and `step`: the actor and the environment alternate.

Random numbers of a turn are keyed by prompt, sample and turn, so an episode is the same on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
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
from hybrid_rlhf.data.chat.messages import ROLES, Message, read_message, row_tools, with_ordered_results
from hybrid_rlhf.generation.sampling import Completion, SamplingParams, derive_seed
from hybrid_rlhf.loop.user_code import describe_error
from hybrid_rlhf.rl.environments.calls import CallFailure
from hybrid_rlhf.rl.environments.environment import Environment, EnvironmentFactory, StepResult
from hybrid_rlhf.rl.environments.episodes import EpisodeRunner, Turns, environment_row, is_finite_number, next_turn
from hybrid_rlhf.rl.environments.observations import ObservationEncoder
from hybrid_rlhf.rl.types import Episode
from hybrid_rlhf.runtime.observability.logs import shortened


@dataclass
class _RunningEpisode:
    """An episode with its environment."""

    row: dict[str, Any]
    episode: Episode
    params: SamplingParams
    sample: int
    environment: Environment | None = None
    running: bool = True
    observation: str | None = None
    """Observation that is not yet appended to the episode."""


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
        entry = _RunningEpisode(environment_row(prompt), Episode(list(prompt["input_ids"])), params, sample)
        return self._calls.run(self._play(entry, self._opening(entry), turns))

    async def _play(self, entry: _RunningEpisode, opening: Callable[[], Any], turns: Turns) -> list[Episode]:
        self._begin(entry, await self._calls.result(opening))
        for turn in range(self._config.max_turns):
            if not entry.running or (turn and not self._observe(entry, turns)):
                break
            completion = await next_turn(turns, entry.episode.ids, self._turn_params(entry, turn, turns))
            entry.episode.add_turn(completion)
            assert entry.environment is not None
            text = completion_text(completion.token_ids, self._tokenizer)
            result = await self._calls.result(partial(entry.environment.step, text))
            self._end_turn(entry, completion, result)
        return [entry.episode]

    def _opening(self, entry: _RunningEpisode) -> Callable[[], Any]:
        """Create the environment, and return the call that resets it."""
        try:
            entry.environment = self._factory.make()
        except Exception as error:  # noqa: BLE001 - the user's own code
            failed = CallFailure(describe_error(error))
            return lambda: failed
        return partial(entry.environment.reset, entry.row)

    def _begin(self, entry: _RunningEpisode, opening: object) -> None:
        """Take the prompt that reset returned."""
        prompt = opening if isinstance(opening, CallFailure) else self._read_opening(opening, entry.row)
        if isinstance(prompt, CallFailure):
            entry.episode.failure = prompt.reason
            entry.running = False  # a turn would answer the prompt of the row, which is not the task
        elif prompt is not None:
            entry.episode.prompt = prompt

    def _end_turn(self, entry: _RunningEpisode, completion: Completion, result: object) -> None:
        """Take what step returned."""
        step = result if isinstance(result, CallFailure) else _read_step(result)
        if isinstance(step, CallFailure):
            entry.episode.failure = step.reason
            entry.running = False
            return
        entry.episode.add_reward(step.reward)
        # An episode whose last turn is truncated did not end by itself, even if the environment is done.
        entry.episode.stopped = step.done and completion.finish_reason == "stop"
        entry.running = not step.done
        entry.observation = step.observation

    def _read_opening(self, opening: object, row: Mapping[str, Any]) -> list[int] | None | CallFailure:
        """Token ids of the prompt that reset returned; None for the row's prompt."""
        if opening is None:
            return None
        messages = [{"role": "user", "content": opening}] if isinstance(opening, str) else opening
        if not _are_messages(messages):
            return CallFailure(f"reset must return messages, a text or None, it returned {shortened(repr(opening))}")
        try:
            read = [read_message("reset", message) for message in cast(list[Message], messages)]
            read = with_ordered_results("reset", read)
            ids = encode_prompt(read, self._tokenizer, tools=row_tools("the row", dict(row)))
        except UserError as error:
            return CallFailure(str(error))
        limit = self._rollout.max_prompt_tokens
        if not 0 < len(ids) <= limit:
            return CallFailure(f"reset returned {len(ids)} tokens, rollout.max_prompt_tokens is {limit}")
        return ids

    def _observe(self, entry: _RunningEpisode, turns: Turns) -> bool:
        """Append the observation to the episode; false if it leaves no tokens for a turn of the actor."""
        last = entry.episode.ids[-1]
        end = last if last in turns.stop_token_ids else None
        try:
            ids = self._turns.observation_ids(entry.observation or "", end_token=end)
        except UserError as error:  # a template may reject the observation
            entry.episode.failure = str(error)
            entry.running = False
            return False
        entry.running = len(ids) < self._tokens_left(entry.episode, turns)
        if entry.running:
            entry.episode.add_observation(ids)
        return entry.running

    def _turn_params(self, entry: _RunningEpisode, turn: int, turns: Turns) -> SamplingParams:
        left = self._tokens_left(entry.episode, turns)
        limit = min(left, self._config.max_turn_tokens or left)
        seed = derive_seed(entry.params.seed or 0, entry.sample, turn)
        return replace(entry.params, n=1, max_new_tokens=limit, seed=seed, stop=self._factory.stop_strings)

    def _tokens_left(self, episode: Episode, turns: Turns) -> int:
        """Number of tokens that the episode may still have."""
        left = self._rollout.sampling.max_new_tokens - len(episode.token_ids)
        positions = turns.max_positions
        return left if positions is None else min(left, positions - len(episode.ids))


def _read_step(result: object) -> StepResult | CallFailure:
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
