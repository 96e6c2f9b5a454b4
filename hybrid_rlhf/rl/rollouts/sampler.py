"""From prompts to completions: each tensor-parallel group samples part of the prompts, and its first rank holds the
completions.

The actor's current weights sample between updates, or a copy of them samples in a thread while the actor trains.
Collectives of the run are called in the main thread only; the sampling thread runs only those of its
tensor-parallel group. One call samples at a time, in the order in which the main thread makes the calls, which is the
same on every rank: an evaluation waits for all rollouts that began before it. With an order by arrival, the ranks of a
tensor-parallel group could wait for each other in different calls.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.engines.sampling_engine import SamplingEngine
from hybrid_rlhf.generation.batching.requests import DecodeWork
from hybrid_rlhf.generation.engine import GenerationEngine
from hybrid_rlhf.generation.sampling import Completion, SamplingParams, derive_seed, with_seed
from hybrid_rlhf.rl.batch import Episode, Rollout, with_columns_of_all_ranks
from hybrid_rlhf.rl.environments.episodes import EpisodeRunner
from hybrid_rlhf.rl.rollouts.live import LiveBatch, Order
from hybrid_rlhf.rl.rollouts.lock_step import LockStep
from hybrid_rlhf.rl.rollouts.partial import AssignedPrompt, RolloutPart
from hybrid_rlhf.runtime.background import BackgroundCall, SideStream
from hybrid_rlhf.runtime.observability.progress import STEP_SECONDS, ProgressLog
from hybrid_rlhf.runtime.observability.timers import Timers
from hybrid_rlhf.runtime.world import World, shared_user_errors

Samples = list[list[Completion]] | list[list[Episode]]
"""Samples of each prompt."""
_Sampled = tuple[Sequence[AssignedPrompt], Samples]
"""Prompts with their samples."""
_CLOSING_SECONDS = 10.0
"""Time for the threads to end; longer than a decoding step."""
_ESTIMATES_FROM = 0.1
"""Completions of a batch grow together: the first that end say nothing of the remaining time."""


@dataclass(frozen=True)
class SamplingCost:
    """Time and work of a rollout, on the first rank that samples."""

    seconds: float = 0.0
    """Time of sampling in a thread."""
    work: DecodeWork = DecodeWork()
    """Bytes read and steps made by decoding."""
    weight_sync_seconds: float = 0.0
    """Time of the weight sync, offloading and release of memory included, without the check."""
    weight_check_seconds: float = 0.0
    """Time of the check after it."""


@dataclass(frozen=True)
class Pending:
    """A rollout that a thread is sampling."""

    generation: GenerationEngine | None
    """None on a rank that does not sample."""
    call: BackgroundCall[tuple[_Sampled, SamplingCost]]


def cancel(rollouts: Sequence[Pending]) -> None:
    """Stop the threads of pending rollouts, and wait for them."""
    for pending in rollouts:
        if pending.generation is not None:
            pending.generation.close()
    deadline = time.monotonic() + _CLOSING_SECONDS
    for pending in rollouts:
        pending.call.has_ended(max(0.0, deadline - time.monotonic()))


class RolloutSampler:
    """Samples completions of prompts."""

    def __init__(
        self,
        engine: SamplingEngine,
        config: RolloutConfig,
        *,
        world: World,
        stop_token_ids: tuple[int, ...],
        seed: int,
        timers: Timers,
        tokenizer: PreTrainedTokenizerBase | None = None,
        environments: EpisodeRunner | None = None,
    ) -> None:
        """Take the engine that samples, the settings, all ranks of the run, and the tokens that end a completion.

        The tokenizer is needed for stop strings, `environments` for multi-turn episodes.
        """
        self.engine = engine
        self.config = config
        self.world = world
        self.seed = seed
        self.cost = SamplingCost()
        """Cost of the last rollout, the same on every rank."""
        self._stop: dict[str, Any] = {"stop_token_ids": stop_token_ids, "tokenizer": tokenizer}
        self.tokenizer = tokenizer
        self.timers = timers
        self._environments = environments
        self._stream = SideStream(world.device)
        self._samples_ahead = config.policy_lag > 0
        self._recorded_prompts = config.recorded_prompts(sys.maxsize)
        """Number of prompts of a rollout whose completions have their experts recorded."""
        self._last_ended = threading.Event()
        """Set when the last call has sampled."""
        self._last_ended.set()
        self.live: LiveBatch | None = None
        """The batch of streaming rollouts; none: each rollout is sampled by a call."""

    def sample(
        self,
        prompts: Sequence[Mapping[str, Any]],
        *,
        step: int,
        first: int = 0,
        greedy: bool = False,
        shown_as: str | None = None,
        part: RolloutPart | None = None,
        may_be_empty: bool = False,
    ) -> Rollout:
        """Completions of all prompts by the current weights, of which each rank holds its own, with the places of their
        prompts in `groups`. Every rank calls.

        Args:
            prompts: rows with `input_ids`, the same on every rank.
            step: key of the random streams; prompt i of a step has the same samples on any number of ranks.
            first: position of the first prompt in the step.
            greedy: true to add one greedy completion after the samples of each prompt.
            shown_as: name in the progress log; None: the name of the step's rollout, shown if it takes long.
            part: this group's share of a partial rollout, which returns the prompts in flight that it finishes.
            may_be_empty: true if the step has other completions, so that an environment may fail in all episodes.
        """
        mine = self.assigned(prompts, step=step, first=first, greedy=greedy, part=part)
        if self.live is not None and self.live.lasts:
            with self.live.current(step):
                ticket = self.live.add(mine, self.progress(mine, step, shown_as))
                with self.timers("generation"), shared_user_errors(self.world):
                    samples = self.live.wait(ticket)
            return self.held(mine, samples, may_be_empty=may_be_empty)
        with self._in_turn(), self.engine.inference(**self._stop) as generation, self._in_sampling_stream():
            sampled = self._sample(generation, mine, self.timers, self.progress(mine, step, shown_as), part)
        with contextlib.nullcontext() if self.engine.world.is_member else self.timers("generation"):
            return self.held(*sampled, may_be_empty=may_be_empty)

    def begin(
        self,
        prompts: Sequence[Mapping[str, Any]],
        *,
        step: int,
        greedy: bool = False,
        part: RolloutPart | None = None,
    ) -> Pending:
        """Start in a thread what `sample` would return now, with a copy of the weights. Every rank calls."""
        engine = self.engine
        generation = engine.snapshot(**self._stop)
        synced = engine.weight_sync_seconds, engine.weight_check_seconds
        sync, check = self.world.broadcast_object(synced, source=engine.world.members[0])
        self.cost = replace(
            self.cost,
            weight_sync_seconds=self.cost.weight_sync_seconds + sync,
            weight_check_seconds=self.cost.weight_check_seconds + check,
        )
        # the copy of the weights is complete after this position of the stream
        mine = self.assigned(prompts, step=step, greedy=greedy, part=part)
        copied = self._stream.position()
        turn = self._in_turn()

        def in_thread() -> tuple[_Sampled, SamplingCost]:
            with turn:
                if generation is None:
                    return ([], []), SamplingCost()
                with contextlib.closing(generation), self._stream.after(copied):
                    start = time.perf_counter()
                    timers = Timers(torch.device("cpu"))  # without synchronization with training
                    sampled = self._sample(generation, mine, timers, self.progress(mine, step), part)
                    return sampled, SamplingCost(time.perf_counter() - start, generation.work)

        return Pending(generation, BackgroundCall(in_thread, device=self.engine.device))

    def finish(self, pending: Pending) -> tuple[Rollout, SamplingCost]:
        """Wait for a pending rollout. Every rank calls, in the order of `begin`.

        Raises:
            UserError: on every rank, when generation or an environment fails on any.
        """
        with shared_user_errors(self.world):
            sampled, cost = pending.call.result()
        return self._held(sampled, cost), self.cost

    def await_in_step(self, pending: Pending) -> None:
        """Wait for a pending rollout on every rank, timed as generation of the step."""
        with self.timers("generation"):
            pending.call.has_ended(None)
            self.world.barrier()

    def assign(self, row: Mapping[str, Any], *, step: int, index: int, place: int) -> AssignedPrompt:
        """A prompt in flight, with its sampling parameters.

        Args:
            row: row of the data with `input_ids`.
            step: first key of its random streams.
            index: second key: index among the prompts of the step.
            place: value in `Rollout.groups`.
        """
        return AssignedPrompt(place, row, self._params(step, index), index < self._recorded_prompts)

    def open_live(self, *, rows: int, recorded: Mapping[int, Order]) -> LiveBatch:
        """Sample in a batch that outlives a step from now on; arguments as in LiveBatch. Every rank calls."""
        self.live = LiveBatch(
            self.engine,
            self.config,
            stop=self._stop,
            rows=rows,
            environments=self._environments,
            recorded=recorded,
        )
        return self.live

    def held(self, mine: Sequence[AssignedPrompt], samples: Samples, *, may_be_empty: bool = False) -> Rollout:
        """The rollout of this rank's prompts and their samples by the current weights. Every rank calls."""
        engine = self.engine
        cost = SamplingCost(0.0, engine.work, engine.weight_sync_seconds, engine.weight_check_seconds)
        return self._held((mine, samples), cost, may_be_empty=may_be_empty)

    def _in_turn(self) -> contextlib.AbstractContextManager[None]:
        """Reserve the next place in the order of calls; called in the main thread. The returned context waits, in any
        thread, until all earlier calls have sampled.
        """
        earlier_ended = self._last_ended
        ended = threading.Event()
        self._last_ended = ended

        @contextlib.contextmanager
        def turn() -> Iterator[None]:
            try:
                earlier_ended.wait()
                yield
            finally:
                ended.set()

        return turn()

    def _in_sampling_stream(self) -> contextlib.AbstractContextManager[None]:
        """With a policy lag, enter the stream of the sampling threads, because memory is reused only in the stream that
        allocated it, and a KV cache may outlive a call and be used in both threads."""
        return self._stream.after(self._stream.position()) if self._samples_ahead else contextlib.nullcontext()

    def _params(self, step: int, index: int) -> SamplingParams:
        return with_seed(self.config.sampling, derive_seed(self.seed, step, index))

    def assigned(
        self,
        prompts: Sequence[Mapping[str, Any]],
        *,
        step: int,
        first: int = 0,
        greedy: bool = False,
        part: RolloutPart | None = None,
    ) -> list[AssignedPrompt]:
        """The prompts of a step that this rank samples; arguments as in `sample`."""
        groups, group = self.engine.groups
        if part is not None:
            return [
                self.assign(prompts[index], step=step, index=index, place=part.first + index) for index in part.begins
            ]
        mine = [
            AssignedPrompt(place, prompts[place], self._params(step, first + place), place < self._recorded_prompts)
            for place in range(len(prompts))
            if place % groups == group
        ]
        if greedy:
            mine += [
                replace(prompt, params=replace(prompt.params, n=1, temperature=0.0), greedy=True) for prompt in mine
            ]
        return mine

    def progress(self, mine: Sequence[AssignedPrompt], step: int, shown_as: str | None = None) -> ProgressLog:
        """A log that counts the completions of this rank's prompts."""
        return ProgressLog(
            shown_as or f"rollout of step {step}",
            total=sum(prompt.params.n for prompt in mine),
            unit="completions" if self.engine.world.size == 1 else f"completions on rank {self.world.rank}",
            first_seconds=None if shown_as else STEP_SECONDS,
            estimates_from=_ESTIMATES_FROM,
        )

    def _sample(
        self,
        generation: GenerationEngine | None,
        mine: Sequence[AssignedPrompt],
        timers: Timers,
        progress: ProgressLog,
        part: RolloutPart | None = None,
    ) -> _Sampled:
        """Completions of this rank's prompts, or episodes of an environment; with a part, of the prompts that it
        finishes."""
        if generation is None:
            return [], []
        until = None
        if part is not None:
            mine, until = part.join(mine)
        requests = [prompt.params for prompt in mine]
        recorded = [prompt.recorded and generation.records_routes for prompt in mine]
        if self._environments is not None:
            return mine, self._played(generation, mine, self._environments, timers, progress)
        with timers("generation"):
            samples = generation.generate(
                [prompt.row["input_ids"] for prompt in mine],
                requests,
                record_routes=recorded,
                on_completed=progress.advance,
                begun=[prompt.begun for prompt in mine],
                until=until,
            )
        return (mine, samples) if part is None else part.hand_over(mine, samples)

    def _played(
        self,
        generation: GenerationEngine,
        mine: Sequence[AssignedPrompt],
        environments: EpisodeRunner,
        timers: Timers,
        progress: ProgressLog,
    ) -> list[list[Episode]]:
        """Episodes of this rank's prompts, on the first of the ranks that share the model."""
        together = self.engine.generation_world
        if environments.in_lock_step:
            return LockStep(generation, environments, together, timers, progress.advance).play(mine)
        episodes = sum(prompt.params.n for prompt in mine)
        rows = min(episodes, self.config.max_decode_rows or episodes)
        live = LiveBatch(self.engine, self.config, stop=self._stop, rows=rows, environments=environments, recorded={})
        if not mine:
            return []
        with timers("generation"), contextlib.closing(live), live.decoding(generation, []):
            return live.wait(live.add(mine, progress))

    def _held(self, sampled: _Sampled, cost: SamplingCost, *, may_be_empty: bool = False) -> Rollout:
        """The completions that this rank has sampled; those of one prompt are adjacent."""
        world = self.world
        engine = self.engine
        self.cost = world.broadcast_object(cost, source=engine.world.members[0])
        rows: list[tuple[AssignedPrompt, Episode]] = []
        if engine.generation_world.is_main:
            by_prompt: Sequence[Sequence[Completion | Episode]] = sampled[1]
            pairs = zip(sampled[0], by_prompt, strict=True)
            by_place = sorted(pairs, key=lambda pair: pair[0].place)  # stably: greedy completions come last
            rows = [(prompt, _episode(prompt, sample)) for prompt, samples in by_place for sample in samples]
        if self._environments is not None:
            played = [(prompt.place, prompt.greedy, episode) for prompt, episode in rows]
            kept = self._environments.kept(played, world, may_drop_all=may_be_empty)
            rows = [row for row, is_kept in zip(rows, kept, strict=True) if is_kept]
        rollout = Rollout.of([episode for _, episode in rows], has_rewards=self._environments is not None)
        rollout = replace(rollout, groups=torch.tensor([prompt.place for prompt, _ in rows], dtype=torch.long))
        rollout = with_columns_of_all_ranks(rollout, world, {})
        return replace(rollout, index=rollout.numbered(world))


def _episode(prompt: AssignedPrompt, sample: Completion | Episode) -> Episode:
    """A sample of a prompt as an episode."""
    return sample if isinstance(sample, Episode) else Episode.of(list(prompt.row["input_ids"]), sample)
