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
from hybrid_rlhf.data.images.expansion import IMAGE_MARK, WRITTEN
from hybrid_rlhf.data.images.references import ImageReference
from hybrid_rlhf.generation.open_batch import PromptBatch, RequestBatch, StreamedToken, Submitted, TokenSource
from hybrid_rlhf.generation.sampling import Completion, SamplingParams
from hybrid_rlhf.rl.environments.calls import EnvironmentCalls
from hybrid_rlhf.rl.types import Episode
from hybrid_rlhf.runtime.descriptors import raise_descriptors
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.world import World

_WHAT_HAPPENS = {"drop": "drops what failed", "zero": "gives 0 and ends"}
"""Effect of a failure, in the log."""


class Turns(TokenSource, Protocol):
    """Answers the turns of one episode, while other episodes go on."""

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end every completion."""

    @property
    def max_positions(self) -> int | None:
        """Longest sequence that the model has positions for; None if there is no limit."""


async def next_turn(
    turns: Turns, ids: Sequence[int], params: SamplingParams, images: Sequence[ImageReference] = ()
) -> Completion:
    """Complete all tokens of an episode so far, with its images, as one sample.

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

    submitted.set_result(turns.submit(PromptBatch([ids], [params], images=[images]), deliver))
    return await asyncio.wrap_future(ended)


class EpisodeRunner(ABC):
    """Runs the episodes of a rollout."""

    shows_images = False
    """True if episodes may have images that are not in their rows."""
    in_lock_step: ClassVar[bool]
    """True if the turns of a rollout can be decoded together, one after the other."""

    def __init__(self, config: EnvironmentConfig, rollout: RolloutConfig, device: torch.device) -> None:
        """Take the limits of an episode, how completions are sampled, and this rank's device."""
        raise_descriptors()  # an episode with a shell has five
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

    def kept(
        self, episodes: Sequence[tuple[int, bool, Episode]], world: World, *, may_drop_all: bool = False
    ) -> list[bool]:
        """Which of this rank's episodes are scored: those with tokens, and with `on_failure drop` those that have not
        failed. A prompt without its greedy episode has no baseline, and none of its episodes is. Logs the failures of
        all ranks; every rank calls.

        Args:
            episodes: the place of its prompt, true if it is greedy, and the episode, or one of its sequences.
            world: all ranks.
            may_drop_all: true if none needs to be left.

        Raises:
            UserError: on every rank, for any failure if on_failure is stop, or if no rank has any episode left.
        """
        keys = [(place, row if one.sample is None else one.sample) for row, (place, _, one) in enumerate(episodes)]
        failed = set[tuple[int, int]]()
        if self._config.on_failure == "drop":
            failed = {key for key, (*_, one) in zip(keys, episodes, strict=True) if one.failure is not None}
        kept = [bool(one.token_ids) and key not in failed for key, (*_, one) in zip(keys, episodes, strict=True)]
        bare = {place for (place, greedy, _), stays in zip(episodes, kept, strict=True) if greedy and not stays}
        kept = [stays and place not in bare for (place, *_), stays in zip(episodes, kept, strict=True)]
        reasons = [one.failure for *_, one in episodes if one.failure is not None]
        by_rank = world.all_gather_objects((reasons, len(episodes), sum(kept)))
        all_reasons = [reason for reasons, _, _ in by_rank for reason in reasons]
        if not all_reasons:
            return kept
        total = sum(count for _, count, _ in by_rank)
        what = f"environment {self._config.name}"
        where = f"in {len(all_reasons)} of {total} episodes: {all_reasons[0]}"
        if self.stops_on_failure:
            raise UserError(f"{what} failed {where}; fix it, or set environment.on_failure to drop or zero")
        if not may_drop_all and not any(count for _, _, count in by_rank):
            raise UserError(f"{what} must leave episodes to learn from, it failed {where}; fix it")
        if world.is_main:
            logger.warning("%s %s %s", what, _WHAT_HAPPENS[self._config.on_failure], where)
        return kept


def is_finite_number(value: Any) -> bool:
    """True if a value of a user's code is a reward; booleans are none."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def environment_row(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the data as environments receive it, with <image> for each image."""
    return {**json.loads(prompt["columns"]), "prompt": json.loads(prompt["prompt"].replace(IMAGE_MARK, WRITTEN))}
