"""Multi-turn completions: turns of the actor, with observations of an environment in between.

Sampled tokens are never tokenized again. Their ids are appended, so that training sees exactly what was sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from numbers import Real
from typing import Any, ClassVar, Protocol

import torch

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.environment import EnvironmentConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.generation.open_batch import PromptBatch, RequestBatch, StreamedToken, Submitted, TokenSource
from hybrid_rlhf.generation.sampling import Completion, SamplingParams
from hybrid_rlhf.rl.batch import Episode
from hybrid_rlhf.rl.environments.calls import EnvironmentCalls
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.world import World


class Turns(TokenSource, Protocol):
    """Answers the turns of one episode, while other episodes go on."""

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end every completion."""

    @property
    def max_positions(self) -> int | None:
        """Longest sequence that the model has positions for; none: no limit."""


async def next_turn(turns: Turns, ids: Sequence[int], params: SamplingParams) -> Completion:
    """Complete all tokens of an episode so far, as one sample.

    Raises:
        Exception: the exception that ended the sample.
    """
    ended: Future[Completion] = Future()
    submitted: Future[Submitted] = Future()

    def deliver(tokens: list[StreamedToken]) -> None:
        if not tokens:
            ended.set_exception(submitted.result().error or RuntimeError("the batch ended before a turn did"))
        for token in tokens:
            if token.completion is not None:
                ended.set_result(token.completion)

    submitted.set_result(turns.submit(PromptBatch([ids], [params]), deliver))
    return await asyncio.wrap_future(ended)


class EpisodeRunner(ABC):
    """Runs the episodes of a rollout."""

    in_lock_step: ClassVar[bool]
    """True if the turns of a rollout can be decoded together, one after the other."""

    def __init__(self, config: EnvironmentConfig, rollout: RolloutConfig, device: torch.device) -> None:
        """Take the limits of an episode, how completions are sampled, and this rank's device."""
        self._config = config
        self._rollout = rollout
        self._calls = EnvironmentCalls(
            timeout_seconds=config.timeout_seconds, device=device, threads=config.threads, retries=config.retries
        )

    @property
    def stops_on_failure(self) -> bool:
        """True if a run ends when an episode fails."""
        return self._config.on_failure == "stop"

    @abstractmethod
    def play(
        self, prompt: Mapping[str, Any], params: SamplingParams, sample: int, turns: Turns
    ) -> Future[list[Episode]]:
        """Start an episode.

        Args:
            prompt: row of `load_prompt_data`.
            params: sampling parameters of the prompt, with a seed.
            sample: index among the samples of the prompt.
            turns: answers its turns.

        Returns:
            The episode, or any number of its sequences, which then have `Episode.sample`.
        """

    def serve(self, batch: RequestBatch) -> contextlib.AbstractContextManager[None]:
        """Context around the episodes whose turns a batch answers."""
        return contextlib.nullcontext()

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
            if self.stops_on_failure:
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
