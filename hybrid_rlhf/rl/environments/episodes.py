"""Multi-turn completions: turns of the actor, with observations of an environment in between.

Sampled tokens are never tokenized again. Their ids are appended, so that training sees exactly what was sampled.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

import torch

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.environment import EnvironmentConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.generation.engine import GenerationEngine
from hybrid_rlhf.generation.sampling import Completion, SamplingParams
from hybrid_rlhf.rl.batch import Episode
from hybrid_rlhf.rl.environments.calls import EnvironmentCalls
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.observability.timers import Timers
from hybrid_rlhf.runtime.world import World


@dataclass(frozen=True)
class EpisodeJob:
    """Episodes to run from prompts to their ends."""

    generation: GenerationEngine
    """Generation engine of the actor."""
    prompts: Sequence[Mapping[str, Any]]
    """Rows of `load_prompt_data`."""
    requests: Sequence[SamplingParams]
    """Sampling parameters of each prompt, with a seed."""
    record_routes: Sequence[bool]
    """For each prompt, true if the experts of its episodes are recorded."""
    together: World
    """Tensor-parallel ranks; the first one has the environments."""
    timers: Timers
    """Timers of generation and environment."""
    on_completed: Callable[[int], None]
    """Called during the run with the number of episodes that have ended since the last call."""


class Turns(Protocol):
    """Answers the turns of one episode, while other episodes go on."""

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end every completion."""

    @property
    def max_positions(self) -> int | None:
        """Longest sequence that the model has positions for; none: no limit."""

    def ask(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        *,
        turn: int,
        record_routes: bool,
        on_finished: Callable[[Completion], None],
    ) -> None:
        """Complete all tokens of the episode so far; `on_finished` receives the turn in any thread, and must not
        wait."""


class EpisodeRunner(ABC):
    """Runs the episodes of a rollout."""

    def __init__(self, config: EnvironmentConfig, rollout: RolloutConfig, device: torch.device) -> None:
        """Take the limits of an episode, how completions are sampled, and this rank's device."""
        self._config = config
        self._rollout = rollout
        self._calls = EnvironmentCalls(
            timeout_seconds=config.timeout_seconds, device=device, threads=config.threads, retries=config.retries
        )

    @abstractmethod
    def run(self, job: EpisodeJob) -> list[list[Episode]]:
        """The n episodes of each prompt, or any number of their sequences, which then have `Episode.sample`.

        With on_failure stop, the others are incomplete once one has failed.
        """

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
        """Start an episode that takes its turns whenever its environment has answered; returns at once.

        Args:
            prompt: row of `load_prompt_data`.
            params: sampling parameters of the prompt, with a seed.
            sample: index among the samples of the prompt.
            turns: answers its turns.
            record_routes: record the experts of its tokens.
            on_ended: receives the episode, in any thread.
            on_error: receives an exception of the library, in any thread.
        """
        raise UserError("rollout.streaming samples for environment.path, got a program: leave rollout.streaming out")

    def checked(self, episodes: Sequence[tuple[int, Episode]], world: World) -> list[tuple[int, Episode]]:
        """This rank's episodes with the places of their prompts, without the sequences that have no tokens. Logs the
        failures of all ranks; every rank calls.

        Raises:
            UserError: on every rank, for any failure if on_failure is stop, or if sequences have `sample` and no rank
                has any with tokens.
        """
        reasons = [episode.failure for _, episode in episodes if episode.failure is not None]
        kept = [(place, episode) for place, episode in episodes if episode.sample is None or episode.token_ids]
        by_rank = world.all_gather_objects((reasons, len(episodes), len(kept)))
        all_reasons = [reason for reasons, _, _ in by_rank for reason in reasons]
        total = sum(count for _, count, _ in by_rank)
        if all_reasons:
            name = self._config.name
            where = f"in {len(all_reasons)} of {total} episodes: {all_reasons[0]}"
            if self._config.on_failure == "stop":
                raise UserError(f"environment {name} failed {where}; fix it, or set environment.on_failure to zero")
            if world.is_main:
                logger.warning("environment %s gives 0 and ends %s", name, where)
        if not any(count for _, _, count in by_rank):
            raise UserError(f"environment.program must make requests, none of {total} episodes has: fix it")
        return kept


def is_finite_number(value: Any) -> bool:
    """True if a value of a user's code is a reward; booleans are none."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def environment_row(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the data as environments receive it."""
    return {**json.loads(prompt["columns"]), "prompt": json.loads(prompt["prompt"])}
