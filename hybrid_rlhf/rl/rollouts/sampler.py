"""Prompts to completions: each tensor-parallel group samples part of the prompts, and every rank gets all completions.

Samples with the actor's current weights between updates, or with a copy of them in a thread while the actor trains.
Weights and completions are gathered by collectives in the main thread only; the sampling thread runs none. One caller
samples at a time: an evaluation in the main thread waits for a rollout in the thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.engines.hybrid import HybridEngine
from hybrid_rlhf.generation.batching.requests import DecodeWork
from hybrid_rlhf.generation.engine import GenerationEngine
from hybrid_rlhf.generation.sampling import Completion, SamplingParams, derive_seed
from hybrid_rlhf.rl.batch import Rollout
from hybrid_rlhf.rl.environments import EnvironmentRunner
from hybrid_rlhf.rl.environments.episodes import Episode, as_rollout
from hybrid_rlhf.runtime.background import BackgroundCall
from hybrid_rlhf.runtime.observability.progress import ProgressLog
from hybrid_rlhf.runtime.observability.timers import Timers
from hybrid_rlhf.runtime.world import shared_user_errors

_COMPARED_COMPLETIONS = 16
"""Completions of a rollout, at least, for which experts are recorded if they are not replayed."""
Samples = list[list[Completion]] | list[list[Episode]]
"""Samples of each prompt."""
_CLOSING_SECONDS = 10.0
"""Longer than a decoding step takes."""


@dataclass(frozen=True)
class _RankPrompts:
    """Prompts that this rank samples."""

    total: int
    """Number of prompts of all ranks."""
    places: list[int]
    """Positions of this rank's prompts among all."""
    rows: list[Mapping[str, Any]]
    requests: list[SamplingParams]
    recorded: list[bool]
    """Whether the experts of its completions are recorded, if the model has any."""


@dataclass(frozen=True)
class SamplingCost:
    """Time and work of sampling in a thread."""

    seconds: float = 0.0
    work: DecodeWork = DecodeWork()
    """What decoding did on this rank."""


@dataclass(frozen=True)
class Pending:
    """A rollout that a thread is sampling."""

    prompts: _RankPrompts
    generation: GenerationEngine
    call: BackgroundCall[tuple[Samples, SamplingCost]]


def cancel(rollouts: Sequence[Pending]) -> None:
    """Stop the threads of pending rollouts, and wait for them."""
    for pending in rollouts:
        pending.generation.close()
    deadline = time.monotonic() + _CLOSING_SECONDS
    for pending in rollouts:
        pending.call.has_ended(max(0.0, deadline - time.monotonic()))


class RolloutSampler:
    """Samples completions of prompts from an actor."""

    def __init__(
        self,
        actor: HybridEngine,
        config: RolloutConfig,
        *,
        stop_token_ids: tuple[int, ...],
        seed: int,
        timers: Timers,
        tokenizer: PreTrainedTokenizerBase | None = None,
        environments: EnvironmentRunner | None = None,
    ) -> None:
        """Take the actor, the sampling settings, the tokens that end a completion, and environments if there are any.

        The tokenizer is needed for stop strings.
        """
        self.actor, self._config, self._seed = actor, config, seed
        self._stop: dict[str, Any] = {"stop_token_ids": stop_token_ids, "tokenizer": tokenizer}
        self._timers, self._environments = timers, environments
        self._one_at_a_time = threading.RLock()
        self._stream: torch.cuda.Stream | None = None

    def sample(
        self,
        prompts: Sequence[Mapping[str, Any]],
        *,
        step: int,
        first: int = 0,
        greedy: bool = False,
        shown_as: str | None = None,
    ) -> Rollout:
        """Completions of all prompts, by the current weights. Every rank calls.

        Args:
            prompts: rows with `input_ids`, the same on every rank.
            step: key of the random streams; prompt i of a step has the same samples on any number of ranks.
            first: position of the first prompt in the step.
            greedy: whether to add one greedy completion after the samples of each prompt.
            shown_as: name in the progress log; none: no log.
        """
        rank_prompts = self._rank_prompts(prompts, step, first, greedy)
        with self._one_at_a_time, self.actor.inference(**self._stop) as generation:
            samples = self._sample(generation, rank_prompts, self._timers, shown_as)
        return self._gathered(rank_prompts, samples)

    def begin(self, prompts: Sequence[Mapping[str, Any]], *, step: int, greedy: bool = False) -> Pending:
        """Start sampling what `sample` would return now, in a thread, with a copy of the weights. Every rank calls."""
        generation = self.actor.snapshot(**self._stop)
        rank_prompts, copied = self._rank_prompts(prompts, step, 0, greedy), self._stream_position()

        def in_thread() -> tuple[Samples, SamplingCost]:
            with self._one_at_a_time, self._own_stream(copied):
                start = time.perf_counter()
                timers = Timers(torch.device("cpu"))  # without synchronization with training
                samples = self._sample(generation, rank_prompts, timers)
                measured = SamplingCost(time.perf_counter() - start, generation.work)
            generation.close()
            return samples, measured

        return Pending(rank_prompts, generation, BackgroundCall(in_thread, device=self.actor.device))

    def finish(self, pending: Pending) -> tuple[Rollout, SamplingCost]:
        """Wait for a pending rollout. Every rank calls, in the order of `begin`.

        Raises:
            UserError: on every rank, when generation or an environment fails on any.
        """
        with shared_user_errors(self.actor.world):
            samples, measured = pending.call.result()
        return self._gathered(pending.prompts, samples), measured

    def await_in_step(self, pending: Pending) -> None:
        """Wait for a pending rollout, timed as generation of the step."""
        with self._timers("generation"):
            pending.call.has_ended(None)

    def _rank_prompts(self, prompts: Sequence[Mapping[str, Any]], step: int, first: int, greedy: bool) -> _RankPrompts:
        world, config, together = self.actor.world, self._config, self.actor.generation_world
        mine = list(range(world.rank // together.size, len(prompts), world.size // together.size))
        sampled = [replace(config.sampling, seed=derive_seed(self._seed, step, first + index)) for index in mine]
        greedy_params = [replace(params, n=1, temperature=0.0) for params in sampled] if greedy else []
        places = mine * (2 if greedy else 1)
        recorded = len(prompts) if config.routing_replay else -(-_COMPARED_COMPLETIONS // config.sampling.n)
        return _RankPrompts(
            len(prompts),
            places,
            [prompts[place] for place in places],
            sampled + greedy_params,
            [place < recorded for place in places],
        )

    def _sample(
        self, generation: GenerationEngine, rank_prompts: _RankPrompts, timers: Timers, shown_as: str | None = None
    ) -> Samples:
        """Completions of this rank's prompts, or episodes with an environment."""
        recorded = [place and generation.records_routes for place in rank_prompts.recorded]
        if self._environments is not None:
            together = self.actor.generation_world
            return self._environments.run(
                generation, rank_prompts.rows, rank_prompts.requests, together, timers, record_routes=recorded
            )
        unit = "completions" if self.actor.world.size == 1 else "completions on rank 0"
        progress = ProgressLog(shown_as or "", total=sum(params.n for params in rank_prompts.requests), unit=unit)
        with timers("generation"):
            return generation.generate(
                [prompt["input_ids"] for prompt in rank_prompts.rows],
                rank_prompts.requests,
                record_routes=recorded,
                on_completed=None if shown_as is None else progress.advance,
            )

    def _gathered(self, rank_prompts: _RankPrompts, samples: Samples) -> Rollout:
        """Completions of all ranks as a rollout, those of a prompt adjacent."""
        world = self.actor.world
        mine: list[Any] = []
        if self.actor.generation_world.is_main:
            ids = [list(row["input_ids"]) for row in rank_prompts.rows]
            mine = list(zip(rank_prompts.places, ids, samples, strict=True))
        by_prompt: dict[int, list[tuple[list[int], Any]]] = defaultdict(list)
        for place, prompt, of_prompt in (entry for part in world.all_gather_objects(mine) for entry in part):
            by_prompt[place] += [(prompt, sample) for sample in of_prompt]
        whole = [pair for place in range(rank_prompts.total) for pair in by_prompt[place]]
        prompts, gathered = [prompt for prompt, _ in whole], [sample for _, sample in whole]
        if self._environments is None:
            # a later epoch may sample a prompt on another rank; a rank keeps its own completions when they are sampled
            if self.actor.drafter is not None and world.size > 1:
                self.actor.drafter.remember([(prompt, sample.token_ids) for prompt, sample in whole])
            return Rollout.of_completions(prompts, gathered, world.device)
        self._environments.check_failures(gathered, world)
        return as_rollout(gathered, world.device)

    def _stream_position(self) -> torch.cuda.Event | None:
        """Event after which the copy of the weights is complete; none on a CPU."""
        return torch.cuda.current_stream().record_event() if self.actor.device.type == "cuda" else None

    @contextlib.contextmanager
    def _own_stream(self, copied: torch.cuda.Event | None) -> Iterator[None]:
        """Context of a CUDA stream of its own, concurrent with training; nothing on a CPU."""
        if copied is None:
            yield
            return
        # One stream for all rollouts, because freed memory is reused only in its own stream.
        stream = self._stream = self._stream or torch.cuda.Stream()
        stream.wait_event(copied)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            stream.synchronize()
