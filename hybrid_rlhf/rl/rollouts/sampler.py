"""From prompts to completions: each tensor-parallel group samples part of the prompts, and its first rank holds the
completions.

Collectives of the run are called in the main thread only; the thread of a live batch runs only those of its
tensor-parallel group.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.engines.sampling_engine import SamplingEngine
from hybrid_rlhf.generation.batching.requests import DecodeWork
from hybrid_rlhf.generation.engine import GenerationEngine
from hybrid_rlhf.generation.sampling import Completion, SamplingParams, derive_seed, with_seed
from hybrid_rlhf.rl.environments.episodes import EpisodeRunner
from hybrid_rlhf.rl.images import ImageCatalogue, digests_of
from hybrid_rlhf.rl.rollouts.in_flight import AssignedPrompt
from hybrid_rlhf.rl.rollouts.live import LiveBatch
from hybrid_rlhf.rl.rollouts.lock_step import LockStep
from hybrid_rlhf.rl.sharing import with_columns_of_all_ranks
from hybrid_rlhf.rl.types import Episode, Rollout
from hybrid_rlhf.runtime.observability.progress import STEP_SECONDS, ProgressLog
from hybrid_rlhf.runtime.observability.timers import Timers
from hybrid_rlhf.runtime.world import World, shared_user_errors

Samples = list[list[Completion]] | list[list[Episode]]
"""Samples of each prompt."""
_ESTIMATES_FROM = 0.1
"""Completions of a batch grow together: the first that end say nothing of the remaining time."""


@dataclass(frozen=True)
class SamplingCost:
    """Time and work of a rollout, on the first rank that samples."""

    work: DecodeWork = DecodeWork()
    """Bytes read and steps made by decoding."""
    weight_sync_seconds: float = 0.0
    """Time of the weight sync, offloading and release of memory included, without the check."""
    weight_check_seconds: float = 0.0
    """Time of the check after it."""


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
        images: ImageCatalogue | None = None,
    ) -> None:
        """Take the engine that samples, the settings, all ranks of the run, and the tokens that end a completion.

        The tokenizer is needed for stop strings, `environments` for multi-turn episodes, `images` for prompts with
        images.
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
        self._images = images
        self._recorded_prompts = config.recorded_prompts(sys.maxsize)
        """Number of prompts of a rollout whose completions have their experts recorded."""
        self.live: LiveBatch | None = None
        """The batch that outlives a step; None if each rollout is sampled by a call."""

    @property
    def outlives_steps(self) -> bool:
        """True if a lag needs a batch that outlives a step: episodes run, or the engine samples while others train."""
        return self.engine.samples_while_training or self._environments is not None

    def sample(
        self,
        prompts: Sequence[Mapping[str, Any]],
        *,
        step: int,
        first: int = 0,
        greedy: bool = False,
        shown_as: str | None = None,
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
            may_be_empty: true if the step has other completions, so that an environment may fail in all episodes.
        """
        mine = self.assigned(prompts, step=step, first=first, greedy=greedy)
        if self.live is not None and self.live.lasts:
            with self.live.current():
                ticket = self.live.add(mine, self.progress(mine, step, shown_as))
                with self.timers("generation"), shared_user_errors(self.world):
                    samples = self.live.wait(ticket)
            return self.held(mine, samples, may_be_empty=may_be_empty)
        return self.complete(mine, step=step, shown_as=shown_as, may_be_empty=may_be_empty)[0]

    def complete(
        self,
        mine: Sequence[AssignedPrompt],
        waiting: Sequence[AssignedPrompt] = (),
        *,
        step: int,
        shown_as: str | None = None,
        may_be_empty: bool = False,
    ) -> tuple[Rollout, list[AssignedPrompt]]:
        """Complete this rank's prompts by the current weights, and others as far as there is room beside them. Every
        rank calls.

        Args:
            mine: prompts of this rank.
            waiting: further ones, without environments.
            step: number of the step, for the progress log.
            shown_as: as in `sample`.
            may_be_empty: as in `sample`.

        Returns:
            the rollout of `mine`, and `waiting` with their completions so far.
        """
        with self.engine.inference(**self._stop) as generation:
            samples, waiting = self._sample(generation, mine, waiting, self.progress(mine, step, shown_as))
        with contextlib.nullcontext() if self.engine.world.is_member else self.timers("generation"):
            return self.held(mine, samples, may_be_empty=may_be_empty), [*waiting]

    def open_live(self, *, rows: int) -> LiveBatch:
        """Sample in a batch that outlives a step from now on; arguments as in LiveBatch. Every rank calls."""
        self.live = self._live_batch(rows)
        return self.live

    def _live_batch(self, rows: int) -> LiveBatch:
        return LiveBatch(self.engine, self.config, stop=self._stop, rows=rows, environments=self._environments)

    def _params(self, step: int, index: int) -> SamplingParams:
        return with_seed(self.config.sampling, derive_seed(self.seed, step, index))

    def assigned(
        self, prompts: Sequence[Mapping[str, Any]], *, step: int, first: int = 0, greedy: bool = False
    ) -> list[AssignedPrompt]:
        """The prompts of a step that this rank samples; arguments as in `sample`."""
        groups, group = self.engine.groups
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
            total=sum(prompt.params.n - sum(c.finish_reason is not None for c in prompt.begun) for prompt in mine),
            unit="completions" if self.engine.world.size == 1 else f"completions on rank {self.world.rank}",
            first_seconds=None if shown_as else STEP_SECONDS,
            estimates_from=_ESTIMATES_FROM,
        )

    def _sample(
        self,
        generation: GenerationEngine | None,
        mine: Sequence[AssignedPrompt],
        waiting: Sequence[AssignedPrompt],
        progress: ProgressLog,
    ) -> tuple[Samples, Sequence[AssignedPrompt]]:
        """Samples of this rank's prompts, or episodes of an environment, and the other prompts with what they have."""
        if generation is None:
            return [], waiting
        if self._environments is not None:
            return self._played(generation, mine, self._environments, progress), waiting
        prompts = [*mine, *waiting]
        rows = [prompt.row for prompt in prompts]
        with self.timers("generation"):
            samples = generation.generate(
                [row["input_ids"] for row in rows],
                [prompt.params for prompt in prompts],
                record_routes=[prompt.recorded and generation.records_routes for prompt in prompts],
                on_completed=progress.advance,
                begun=[prompt.begun for prompt in prompts],
                until=range(len(mine)) if waiting else None,
                rows=sum(prompt.params.n for prompt in mine) if waiting else None,
                images=[] if self._images is None else list(map(self._images.of_prompt, rows)),
            )
        return samples[: len(mine)], [
            replace(prompt, begun=begun if any(completion.token_ids for completion in begun) else ())
            for prompt, begun in zip(waiting, samples[len(mine) :], strict=True)
        ]

    def _played(
        self,
        generation: GenerationEngine,
        mine: Sequence[AssignedPrompt],
        environments: EpisodeRunner,
        progress: ProgressLog,
    ) -> list[list[Episode]]:
        """Episodes of this rank's prompts, on the first of the ranks that share the model."""
        together = self.engine.generation_world
        if environments.in_lock_step:
            return LockStep(generation, environments, together, self.timers, progress.advance).play(mine)
        episodes = sum(prompt.params.n for prompt in mine)
        rows = min(episodes, self.config.max_decode_rows or episodes)
        live = self._live_batch(rows)
        if not mine:
            return []
        with self.timers("generation"), contextlib.closing(live), live.decoding(generation):
            return live.wait(live.add(mine, progress))

    def held(self, mine: Sequence[AssignedPrompt], samples: Samples, *, may_be_empty: bool = False) -> Rollout:
        """The rollout of this rank's prompts and their samples; those of one prompt are adjacent. Every rank calls."""
        world = self.world
        engine = self.engine
        cost = SamplingCost(engine.work, engine.weight_sync_seconds, engine.weight_check_seconds)
        self.cost = world.broadcast_object(cost, source=engine.world.members[0])
        rows: list[tuple[AssignedPrompt, Episode]] = []
        if engine.generation_world.is_main:
            by_prompt: Sequence[Sequence[Completion | Episode]] = samples
            pairs = zip(mine, by_prompt, strict=True)
            by_place = sorted(pairs, key=lambda pair: pair[0].place)  # stably: greedy completions come last
            rows = [(prompt, _episode(prompt, sample)) for prompt, samples in by_place for sample in samples]
        if self._environments is not None:
            played = [(prompt.place, prompt.greedy, episode) for prompt, episode in rows]
            kept = self._environments.kept(played, world, may_drop_all=may_be_empty)
            rows = [row for row, is_kept in zip(rows, kept, strict=True) if is_kept]
        places = [prompt.place for prompt, _ in rows]
        rollout = Rollout.of([episode for _, episode in rows], places, has_rewards=self._environments is not None)
        rollout = with_columns_of_all_ranks(rollout, world, {})
        return replace(rollout, index=rollout.numbered(world))


def _episode(prompt: AssignedPrompt, sample: Completion | Episode) -> Episode:
    """A sample of a prompt as an episode."""
    if isinstance(sample, Episode):
        return sample
    return Episode.of(list(prompt.row["input_ids"]), sample, digests_of(prompt.row))
