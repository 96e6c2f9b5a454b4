"""Episodes: the actor and its environments take turns, all live episodes of a rank together.

A turn's random numbers are keyed by the prompt, the sample and the turn, so that an episode is the same on any number
of ranks.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.algorithms.environments.calls import Calls, Failed
from hybrid_rlhf.algorithms.environments.environment import Environment, MakeEnvironment, Step
from hybrid_rlhf.algorithms.environments.turns import Turns
from hybrid_rlhf.algorithms.episodes import Episode
from hybrid_rlhf.algorithms.user_code import told
from hybrid_rlhf.configs.environment import EnvironmentConfig
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rollout import RolloutConfig
from hybrid_rlhf.configs.values import is_text
from hybrid_rlhf.data.chat import answer_text, encode_prompt
from hybrid_rlhf.data.messages import ROLES, Message, read_message, row_tools
from hybrid_rlhf.generation.engine import GenerationEngine
from hybrid_rlhf.generation.sampling import Completion, SamplingParams, derive_seed
from hybrid_rlhf.runtime.logs import LOGGER_NAME, shortened
from hybrid_rlhf.runtime.timers import Timers
from hybrid_rlhf.runtime.world import World

logger = logging.getLogger(LOGGER_NAME)


@dataclass
class _Game:
    """An episode with whom it is played."""

    row: dict[str, Any]
    episode: Episode
    params: SamplingParams
    sample: int
    environment: Environment | None = None
    """None on ranks that only help to generate."""
    live: bool = True
    observation: str | None = None
    """What the actor has still to be told."""


class Player:
    """Plays episodes."""

    def __init__(
        self,
        make: MakeEnvironment,
        config: EnvironmentConfig,
        *,
        rollout: RolloutConfig,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device,
    ) -> None:
        """Get ready.

        Raises:
            UserError: when the tokenizer's template has no place for observations.
        """
        self._make, self._config, self._rollout = make, config, rollout
        self._tokenizer = tokenizer
        self._turns = Turns(tokenizer, max_observation_tokens=config.max_observation_tokens)
        self._calls = Calls(timeout_seconds=config.timeout_seconds, device=device)

    def play(
        self,
        generation: GenerationEngine,
        prompts: Sequence[Mapping[str, Any]],
        requests: Sequence[SamplingParams],
        together: World,
        timers: Timers,
    ) -> list[list[Episode]]:
        """Episodes from prompts to their ends.

        Args:
            generation: the actor's.
            prompts: rows of `load_prompt_data`.
            requests: for each how it is sampled, with a seed.
            together: ranks that generate together; the first has the environments.
            timers: of generation and environment.

        Returns:
            the n episodes of each prompt. With on_failure stop, once one has failed the others are as they were then.
        """
        games = [
            _Game(_row(prompt), Episode(list(prompt["input_ids"]), rewards=[]), params, sample)
            for prompt, params in zip(prompts, requests, strict=True)
            for sample in range(params.n)
        ]
        self._begin(games, together, timers)
        for turn in range(self._config.max_turns):
            live = [game for game in games if game.live and (turn == 0 or self._hear(game, generation))]
            failed = any(game.episode.failure for game in games)
            if (turn and not live) or (failed and self._config.on_failure == "stop"):
                break
            with timers("generation"):
                answers = generation.generate(
                    [game.episode.ids for game in live], [self._of_turn(game, turn, generation) for game in live]
                )
            self._step(live, [completion for (completion,) in answers], together, timers)
        rest = iter([game.episode for game in games])
        return [[next(rest) for _ in range(params.n)] for params in requests]

    def require_whole(self, episodes: Sequence[Episode], world: World) -> None:
        """Judge the failures in a rollout; alike on every rank.

        Raises:
            UserError: for any, unless they count as 0.
        """
        reasons = [episode.failure for episode in episodes if episode.failure is not None]
        if not reasons:
            return
        where = f"in {len(reasons)} of {len(episodes)} episodes: {reasons[0]}"
        if self._config.on_failure == "stop":
            raise UserError(
                f"environment {self._config.path} failed {where}; mend it, or set environment.on_failure to zero"
            )
        if world.is_main:
            logger.warning("environment %s gives 0 and ends %s", self._config.path, where)

    def _begin(self, games: Sequence[_Game], together: World, timers: Timers) -> None:
        """Make the environments, and take the prompts that they begin with."""
        openings = self._asked(
            lambda: [self._opening(game) for game in games],
            lambda place, opening: self._read_opening(opening, games[place].row),
            together,
            timers,
        )
        for game, prompt in zip(games, openings, strict=True):
            if isinstance(prompt, Failed):
                game.episode.failure = prompt.reason
            elif prompt is not None:
                game.episode.prompt = prompt

    def _opening(self, game: _Game) -> Callable[[], Any]:
        try:
            game.environment = self._make()
        except Exception as error:  # noqa: BLE001 - the user's own code
            failed = Failed(told(error))
            return lambda: failed
        return partial(game.environment.reset, game.row)

    def _step(self, games: Sequence[_Game], completions: Sequence[Completion], together: World, timers: Timers) -> None:
        """Add a turn of the actor to each episode, and what its environment makes of it."""
        for game, completion in zip(games, completions, strict=True):
            game.episode.say(completion)
            game.live = game.episode.failure is None
        playing = [pair for pair in zip(games, completions, strict=True) if pair[0].live]
        steps = self._asked(
            lambda: [self._turn(*pair) for pair in playing], lambda _, answer: _read_step(answer), together, timers
        )
        for (game, completion), step in zip(playing, steps, strict=True):
            if isinstance(step, Failed):
                game.episode.failure, game.live = step.reason, False
                continue
            game.episode.earn(step.reward)
            # A turn that was cut short is no end, whatever the environment makes of it.
            game.episode.stopped = step.done and completion.finish_reason == "stop"
            game.live, game.observation = not step.done, step.observation

    def _turn(self, game: _Game, completion: Completion) -> Callable[[], Any]:
        assert game.environment is not None
        return partial(game.environment.step, answer_text(completion.token_ids, self._tokenizer))

    def _asked(
        self,
        calls: Callable[[], list[Callable[[], Any]]],
        read: Callable[[int, Any], Any],
        together: World,
        timers: Timers,
    ) -> list[Any]:
        """What calls return, or Failed, as read by place; made on the first of the ranks that generate together."""
        answers = []
        if together.is_main:
            with timers("environment"):
                found = self._calls(calls())
                answers = [x if isinstance(x, Failed) else read(place, x) for place, x in enumerate(found)]
        return together.all_gather_objects(answers)[0]

    def _read_opening(self, opening: object, row: Mapping[str, Any]) -> list[int] | None | Failed:
        """What reset returned for a row, as a prompt's tokens."""
        if opening is None:
            return None
        messages = [{"role": "user", "content": opening}] if isinstance(opening, str) else opening
        if not _are_messages(messages):
            return Failed(f"reset must return messages, a text or None, it returned {shortened(repr(opening))}")
        try:
            read = [read_message("reset", message) for message in cast(list[Message], messages)]
            ids = encode_prompt(read, self._tokenizer, tools=row_tools("the row", dict(row)))
        except UserError as error:
            return Failed(str(error))
        longest = self._rollout.max_prompt_tokens
        if not 0 < len(ids) <= longest:
            return Failed(f"reset returned {len(ids)} tokens, rollout.max_prompt_tokens is {longest}")
        return ids

    def _hear(self, game: _Game, generation: GenerationEngine) -> bool:
        """Tell the actor what it is to answer; false where there is no room for that and an answer."""
        last = game.episode.ids[-1]
        end = last if last in generation.stop_token_ids else None
        try:
            ids = self._turns.observation_ids(game.observation or "", end_token=end)
        except UserError as error:  # a template may refuse what it does not like
            game.episode.failure, game.live = str(error), False
            return False
        game.live = len(ids) < self._room(game.episode, generation)
        if game.live:
            game.episode.hear(ids)
        return game.live

    def _of_turn(self, game: _Game, turn: int, generation: GenerationEngine) -> SamplingParams:
        room = self._room(game.episode, generation)
        longest = min(room, self._config.max_turn_tokens or room)
        seed = derive_seed(game.params.seed or 0, game.sample, turn)
        return replace(game.params, n=1, max_new_tokens=longest, seed=seed, stop_strings=self._make.stop_strings)

    def _room(self, episode: Episode, generation: GenerationEngine) -> int:
        """Tokens that may still follow."""
        room = self._rollout.max_new_tokens - len(episode.token_ids)
        positions = generation.max_positions
        return room if positions is None else min(room, positions - len(episode.ids))


def _read_step(answer: object) -> Step | Failed:
    if not isinstance(answer, tuple) or len(answer) != 3:
        return Failed(f"step must return (observation, reward, done), it returned {shortened(repr(answer))}")
    observation, reward, done = answer
    if not isinstance(done, (bool, np.bool_)):
        return Failed(f"step must return done as True or False, it returned {shortened(repr(done))}")
    if isinstance(reward, bool) or not isinstance(reward, Real) or not math.isfinite(reward):
        return Failed(f"step must return a finite number as reward, it returned {shortened(repr(reward))}")
    if not _is_said(observation) and not (done and observation is None):
        return Failed(f"step must return a text as observation, it returned {shortened(repr(observation))}")
    return Step(observation, float(reward), bool(done))


def _are_messages(opening: object) -> bool:
    return (
        isinstance(opening, list)
        and bool(opening)
        and all(
            isinstance(turn, dict)
            and turn.get("role") in ROLES
            and (_is_said(turn.get("content")) or "tool_calls" in turn)
            for turn in opening
        )
    )


def _is_said(said: object) -> bool:
    return isinstance(said, str) and is_text(said)


def _row(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the data as an environment reads it."""
    return {**json.loads(prompt["columns"]), "prompt": json.loads(prompt["prompt"])}
