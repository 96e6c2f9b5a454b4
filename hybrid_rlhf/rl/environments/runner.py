"""Runs episodes: the actor and its environments alternate, with all unfinished episodes of a rank in one batch.

Random numbers of a turn are keyed by prompt, sample and turn, so an episode is the same on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.values import is_text
from hybrid_rlhf.configs.sections.environment import EnvironmentConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.data.chat.conversation import completion_text, encode_prompt
from hybrid_rlhf.data.chat.messages import ROLES, Message, read_message, row_tools
from hybrid_rlhf.generation.engine import GenerationEngine
from hybrid_rlhf.generation.sampling import Completion, SamplingParams, derive_seed
from hybrid_rlhf.loop.user_code import describe_error
from hybrid_rlhf.rl.batch import Episode
from hybrid_rlhf.rl.environments.calls import CallFailure
from hybrid_rlhf.rl.environments.environment import Environment, EnvironmentFactory, StepResult
from hybrid_rlhf.rl.environments.episodes import EpisodeJob, EpisodeRunner, Turns, environment_row, is_finite_number
from hybrid_rlhf.rl.environments.observations import ObservationEncoder
from hybrid_rlhf.runtime.background import BackgroundWorkers
from hybrid_rlhf.runtime.observability.logs import shortened
from hybrid_rlhf.runtime.observability.timers import Timers
from hybrid_rlhf.runtime.world import World, solo_world


@dataclass
class _RunningEpisode:
    """An episode with its environment."""

    row: dict[str, Any]
    episode: Episode
    params: SamplingParams
    sample: int
    records_routes: bool = False
    environment: Environment | None = None
    """None on ranks that only take part in generation."""
    running: bool = True
    observation: str | None = None
    """Observation that is not yet appended to the episode."""


class _Calling(NamedTuple):
    """Who calls environments."""

    together: World
    """The ranks that wait for the results; the first one calls."""
    timers: Timers


class EnvironmentRunner(EpisodeRunner):
    """Runs a class with `reset` and `step`."""

    def __init__(
        self,
        make: EnvironmentFactory,
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
        self._make = make
        self._tokenizer = tokenizer
        self._turns = ObservationEncoder(tokenizer, max_observation_tokens=config.max_observation_tokens)
        self._alone = _Calling(solo_world(device), Timers(torch.device("cpu")))
        self._workers: BackgroundWorkers | None = None

    def run(self, job: EpisodeJob) -> list[list[Episode]]:
        """Run the episodes; all unfinished ones take a turn together."""
        generation = job.generation
        entries = [
            _RunningEpisode(environment_row(prompt), Episode(list(prompt["input_ids"])), params, sample, records)
            for prompt, params, records in zip(job.prompts, job.requests, job.record_routes, strict=True)
            for sample in range(params.n)
        ]
        calling = _Calling(job.together, job.timers)
        self._begin(entries, calling)
        ended = 0
        for turn in range(self._config.max_turns):
            running = [entry for entry in entries if entry.running and (turn == 0 or self._observe(entry, generation))]
            failed = any(entry.episode.failure for entry in entries)
            if (turn and not running) or (failed and self._config.on_failure == "stop"):
                break
            with job.timers("generation"):
                completions = generation.generate(
                    [entry.episode.ids for entry in running],
                    [self._turn_params(entry, turn, generation) for entry in running],
                    record_routes=[entry.records_routes for entry in running],
                    on_completed=lambda _: job.on_completed(0),
                )
            self._step(running, [completion for (completion,) in completions], calling)
            before = ended
            ended = sum(not entry.running for entry in entries)
            job.on_completed(ended - before)
        episodes = iter([entry.episode for entry in entries])
        return [[next(episodes) for _ in range(params.n)] for params in job.requests]

    def play(
        self,
        prompt: Mapping[str, Any],
        params: SamplingParams,
        sample: int,
        turns: Turns,
        *,
        record_routes: bool,
        on_ended: Callable[[Episode], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        """Start an episode; its environment is called by a fixed number of threads, as many as environment.threads for
        functions."""
        episode = Episode(list(prompt["input_ids"]))
        entry = _RunningEpisode(environment_row(prompt), episode, params, sample, record_routes)
        if self._workers is None:
            self._workers = BackgroundWorkers(self._config.threads, name="environments")
        workers = self._workers

        def begin() -> None:
            self._begin([entry], self._alone)
            ask(0)

        def ask(turn: int) -> None:
            if not entry.running or turn == self._config.max_turns or (turn and not self._observe(entry, turns)):
                on_ended(entry.episode)
                return
            turns.ask(
                entry.episode.ids,
                self._turn_params(entry, turn, turns),
                turn=turn,
                record_routes=entry.records_routes,
                on_finished=lambda completion: workers.call(partial(reported, partial(step, turn, completion))),
            )

        def step(turn: int, completion: Completion) -> None:
            self._step([entry], [completion], self._alone)
            ask(turn + 1)

        def reported(call: Callable[[], None]) -> None:
            try:
                call()
            except BaseException as error:  # noqa: BLE001 - raised again in the main thread
                on_error(error)

        workers.call(partial(reported, begin))

    def _begin(self, entries: Sequence[_RunningEpisode], job: _Calling) -> None:
        """Create the environments, and reset them to obtain the prompts."""
        openings = self._call(
            lambda: [self._opening(entry) for entry in entries],
            lambda place, opening: self._read_opening(opening, entries[place].row),
            job,
        )
        for entry, prompt in zip(entries, openings, strict=True):
            if isinstance(prompt, CallFailure):
                entry.episode.failure = prompt.reason
            elif prompt is not None:
                entry.episode.prompt = prompt

    def _opening(self, entry: _RunningEpisode) -> Callable[[], Any]:
        try:
            entry.environment = self._make()
        except Exception as error:  # noqa: BLE001 - the user's own code
            failed = CallFailure(describe_error(error))
            return lambda: failed
        return partial(entry.environment.reset, entry.row)

    def _step(self, entries: Sequence[_RunningEpisode], completions: Sequence[Completion], job: _Calling) -> None:
        """Add a turn of the actor to each episode, and step its environment."""
        for entry, completion in zip(entries, completions, strict=True):
            entry.episode.add_turn(completion)
            entry.running = entry.episode.failure is None
        pairs = [pair for pair in zip(entries, completions, strict=True) if pair[0].running]
        steps = self._call(lambda: [self._turn(*pair) for pair in pairs], lambda _, result: _read_step(result), job)
        for (entry, completion), step in zip(pairs, steps, strict=True):
            if isinstance(step, CallFailure):
                entry.episode.failure = step.reason
                entry.running = False
                continue
            entry.episode.add_reward(step.reward)
            # An episode whose last turn is truncated did not end by itself, even if the environment is done.
            entry.episode.stopped = step.done and completion.finish_reason == "stop"
            entry.running = not step.done
            entry.observation = step.observation

    def _turn(self, entry: _RunningEpisode, completion: Completion) -> Callable[[], Any]:
        assert entry.environment is not None
        return partial(entry.environment.step, completion_text(completion.token_ids, self._tokenizer))

    def _call(
        self, calls: Callable[[], list[Callable[[], Any]]], read: Callable[[int, Any], Any], job: _Calling
    ) -> list[Any]:
        """Results of calls, as `read(index, result)` converts them, or CallFailure; called on the group's main rank."""
        results = []
        if job.together.is_main:
            with job.timers("environment"):
                returned = self._calls(calls())
                results = [x if isinstance(x, CallFailure) else read(place, x) for place, x in enumerate(returned)]
        return job.together.all_gather_objects(results)[0]

    def _read_opening(self, opening: object, row: Mapping[str, Any]) -> list[int] | None | CallFailure:
        """Token ids of the prompt that reset returned; None for the row's prompt."""
        if opening is None:
            return None
        messages = [{"role": "user", "content": opening}] if isinstance(opening, str) else opening
        if not _are_messages(messages):
            return CallFailure(f"reset must return messages, a text or None, it returned {shortened(repr(opening))}")
        try:
            read = [read_message("reset", message) for message in cast(list[Message], messages)]
            ids = encode_prompt(read, self._tokenizer, tools=row_tools("the row", dict(row)))
        except UserError as error:
            return CallFailure(str(error))
        limit = self._rollout.max_prompt_tokens
        if not 0 < len(ids) <= limit:
            return CallFailure(f"reset returned {len(ids)} tokens, rollout.max_prompt_tokens is {limit}")
        return ids

    def _observe(self, entry: _RunningEpisode, generation: GenerationEngine | Turns) -> bool:
        """Append the observation to the episode; false if it leaves no tokens for a turn of the actor."""
        last = entry.episode.ids[-1]
        end = last if last in generation.stop_token_ids else None
        try:
            ids = self._turns.observation_ids(entry.observation or "", end_token=end)
        except UserError as error:  # a template may reject the observation
            entry.episode.failure = str(error)
            entry.running = False
            return False
        entry.running = len(ids) < self._tokens_left(entry.episode, generation)
        if entry.running:
            entry.episode.add_observation(ids)
        return entry.running

    def _turn_params(self, entry: _RunningEpisode, turn: int, generation: GenerationEngine | Turns) -> SamplingParams:
        left = self._tokens_left(entry.episode, generation)
        limit = min(left, self._config.max_turn_tokens or left)
        seed = derive_seed(entry.params.seed or 0, entry.sample, turn)
        return replace(entry.params, n=1, max_new_tokens=limit, seed=seed, stop=self._make.stop_strings)

    def _tokens_left(self, episode: Episode, generation: GenerationEngine | Turns) -> int:
        """Number of tokens that the episode may still have."""
        left = self._rollout.sampling.max_new_tokens - len(episode.token_ids)
        positions = generation.max_positions
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
