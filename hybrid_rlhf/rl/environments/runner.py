"""Runs episodes of a class with `reset` and `step`: the actor and the environment alternate.

Random numbers of a turn are keyed by prompt, sample and turn, so an episode is the same on any number of ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
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
from hybrid_rlhf.data.images.expansion import RowImages
from hybrid_rlhf.data.images.references import ImageReference
from hybrid_rlhf.data.rows.placing import place_images
from hybrid_rlhf.generation.sampling import SamplingParams, derive_seed
from hybrid_rlhf.loop.user_code import describe_error
from hybrid_rlhf.rl.environments.calls import CallFailure
from hybrid_rlhf.rl.environments.environment import (
    Content,
    Environment,
    EnvironmentFactory,
    StepResult,
    read_environment,
)
from hybrid_rlhf.rl.environments.episodes import EpisodeRunner, Turns, environment_row, is_finite_number, next_turn
from hybrid_rlhf.rl.environments.observations import ObservationEncoder
from hybrid_rlhf.rl.environments.tools import with_tools
from hybrid_rlhf.rl.images import ImageCatalogue, digests_of
from hybrid_rlhf.rl.types import Episode
from hybrid_rlhf.runtime.observability.logs import shortened
from hybrid_rlhf.runtime.world import World, shared_user_errors
from hybrid_rlhf.serving.packages import require_packages

_LONGEST_REASON = 500
"""Characters: an error may quote content with the bytes of images."""


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
        images: ImageCatalogue,
    ) -> None:
        """Take the environments, settings and images.

        Raises:
            UserError: when the chat template cannot show observations.
        """
        super().__init__(config, rollout, device)
        self._factory = factory
        self._tokenizer = tokenizer
        self._images = images
        self._refusal = images.rules.refusal
        self.shows_images = factory.shows_images
        if not (self._refusal or self.shows_images or images.has_data):
            self._refusal = "an environment that shows images must have shows_images = True: set it"
        self._turns = ObservationEncoder(tokenizer, max_observation_tokens=config.max_observation_tokens)

    def play(
        self, prompt: Mapping[str, Any], params: SamplingParams, sample: int, turns: Turns
    ) -> Future[list[Episode]]:
        """Start an episode; its environment is called between its turns. Environments are created at once, in order."""
        episode, row = Episode(list(prompt["input_ids"]), images=digests_of(prompt)), environment_row(prompt)
        if episode.images:
            row["images"] = self._images.of_prompt(prompt)
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
        episode.failure = await self._open(episode, opening, row, getattr(environment, "tools", None))
        if episode.failure is not None:
            return [episode]  # a turn would answer the prompt of the row, which is not the task
        for turn in range(self._config.max_turns):
            turn_params = self._turn_params(episode, params, sample, turn, turns)
            completion = await next_turn(turns, episode.ids, turn_params, self._references(episode))
            episode.add_turn(completion)
            text = completion_text(completion.token_ids, self._tokenizer)
            step = _read_step(await self._calls.result(partial(environment.step, text)))
            if isinstance(step, CallFailure):
                episode.failure = step.reason
                break
            episode.add_reward(step.reward)
            # An episode whose last turn is truncated did not end by itself, even if the environment is done.
            episode.stopped = step.done and completion.finish_reason == "stop"
            if step.done:
                break
            is_last = turn + 1 == self._config.max_turns
            if is_last or not await self._observe(episode, step.observation or "", turns):
                await self._truncate(episode, environment)
                break
        return [episode]

    async def _open(
        self, episode: Episode, opening: object, row: Mapping[str, Any], offered: Tools | None
    ) -> str | None:
        """Begin an episode with the prompt that reset returned, with the tools of the environment, None for that of the
        row; return why that fails."""
        if opening is None:
            return None
        if isinstance(opening, CallFailure):
            return opening.reason
        messages = [{"role": "user", "content": opening}] if _is_content(opening) else opening
        if not _are_messages(messages):
            return f"reset must return messages, a text or None, it returned {shortened(repr(opening))}"
        try:
            read, images = await self._read("reset", cast(list[Message], messages), self._references(episode))
            tools = row_tools("the row", dict(row))
            offers = [*(tools or []), *offered] if offered else tools
            ids = encode_prompt(read, self._tokenizer, tools=offers, images=images)
            if offered and ids == encode_prompt(read, self._tokenizer, images=images):
                ids = encode_prompt(with_tools(read, offered), self._tokenizer, images=images)
        except UserError as error:
            return shortened(str(error), _LONGEST_REASON)
        limit = self._rollout.max_prompt_tokens
        if not 0 < len(ids) <= limit:
            return f"reset returned {len(ids)} tokens, rollout.max_prompt_tokens is {limit}"
        episode.prompt = ids
        episode.images = [] if images is None else images.digests
        return None

    async def _observe(self, episode: Episode, observation: Content, turns: Turns) -> bool:
        """Append an observation to the episode; false if it leaves no tokens for a turn of the actor."""
        last = episode.ids[-1]
        end = last if last in turns.stop_token_ids else None
        try:
            (read,), images = await self._read("step", [{"role": "tool", "content": observation}])
            text = self._turns.fitting(read["content"])
            ids = self._turns.observation_ids(text, end_token=end, images=images)
        except UserError as error:  # a template may reject the observation
            episode.failure = shortened(str(error), _LONGEST_REASON)
            return False
        if len(ids) >= self._tokens_left(episode, turns):
            return False
        episode.add_observation(ids)
        episode.cut_observations += text != read["content"]
        episode.images = [*episode.images, *([] if images is None else images.digests)]
        return True

    async def _truncate(self, episode: Episode, environment: Environment) -> None:
        """Add the reward of an environment for an episode that its limits have ended."""
        truncated = getattr(environment, "truncated", None)
        if not callable(truncated) or episode.failure is not None:
            return
        reward = await self._calls.result(truncated)
        if isinstance(reward, CallFailure):
            episode.failure = reward.reason
        elif not is_finite_number(reward):
            episode.failure = f"truncated must return a finite number as reward, it returned {shortened(repr(reward))}"
        else:
            episode.add_reward(float(reward))

    def _references(self, episode: Episode) -> list[ImageReference]:
        """The images of an episode so far."""
        return [self._images.reference(digest) for digest in episode.images]

    async def _read(
        self, name: str, messages: Sequence[Message], of_row: Sequence[ImageReference] = ()
    ) -> tuple[list[Message], RowImages | None]:
        """Messages that a method returned, with marks of their images, and these; None for a model that reads none.

        Raises:
            UserError: for invalid messages, or an image that cannot be read.
        """
        read = with_ordered_results(name, [read_message(name, message, with_images=True) for message in messages])
        (sources,) = place_images(name, {"images": list(of_row)}, read, refusal=self._refusal)
        layout = self._images.rules.layout
        if layout is None or not sources:
            return read, None if layout is None else RowImages(layout, [])
        # the loop of all episodes must not wait for a decoder
        return read, await asyncio.to_thread(self._images.read, name, sources)

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
    if not _is_content(observation) and not (done and observation is None):
        what = "a text or a list of parts"
        return CallFailure(f"step must return {what} as observation, it returned {shortened(repr(observation))}")
    return StepResult(observation, float(reward), bool(done))


def _are_messages(opening: object) -> bool:
    return (
        isinstance(opening, list)
        and bool(opening)
        and all(
            isinstance(turn, dict)
            and turn.get("role") in ROLES
            and (_is_content(turn.get("content")) or "tool_calls" in turn)
            for turn in opening
        )
    )


def _is_content(value: object) -> bool:
    """True for text, and for parts, which `read_message` checks."""
    if isinstance(value, list) and all(isinstance(part, dict) and "role" not in part for part in value):
        return bool(value) and all(_is_content(part.get("text", "")) for part in value)
    return isinstance(value, str) and is_text(value)


def build_runner(
    config: EnvironmentConfig | None,
    *,
    rollout: RolloutConfig,
    tokenizer: PreTrainedTokenizerBase,
    world: World,
    samples: bool = True,
    images: ImageCatalogue | None = None,
) -> EpisodeRunner | None:
    """The runner of the configured environment; None without one (a completion is then one turn). Every rank calls.

    Args:
        config: the environment.
        rollout: how completions are sampled.
        tokenizer: tokenizer of the actor.
        world: all ranks.
        samples: true if this rank runs episodes.
        images: reads images that episodes show; none: there are none.

    Raises:
        UserError: when the environment cannot be loaded or shows images that the actor does not read, the chat template
            cannot show observations, or the address of programs is taken.
    """
    if config is None:
        return None
    images = images or ImageCatalogue()
    if config.path is None:
        require_packages("rollout.endpoint" if config.program is None else "environment.program")
        from hybrid_rlhf.rl.environments.programs import ProgramRunner, read_program  # they import those packages

        with shared_user_errors(world):
            program = None if config.program is None else read_program(config)
        return ProgramRunner(
            program, config, rollout=rollout, tokenizer=tokenizer, world=world, samples=samples, images=images
        )
    with shared_user_errors(world):
        factory = read_environment(config)
        if factory.shows_images and images.rules.refusal:
            raise UserError(f"environment.path: {config.path} shows images: {images.rules.refusal}")
    return EnvironmentRunner(factory, config, rollout=rollout, tokenizer=tokenizer, device=world.device, images=images)
