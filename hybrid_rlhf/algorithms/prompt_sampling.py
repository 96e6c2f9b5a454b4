"""Prompts to completions: each group of ranks that generates together samples its share, and all get the whole.

With the actor's weights as they are, between updates; or with a copy of them in a thread, while the actor learns.
Gathering weights and completions is for all ranks together, so it stays in the main thread; the thread in between has
no collectives. One samples at a time: the main thread, for an evaluation, waits until the rollout under way is done.
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

from hybrid_rlhf.algorithms.environments import Player
from hybrid_rlhf.algorithms.episodes import Episode, as_sequences
from hybrid_rlhf.algorithms.experience import Sequences
from hybrid_rlhf.algorithms.rewards.background import Background
from hybrid_rlhf.configs.rollout import RolloutConfig
from hybrid_rlhf.engines.hybrid import HybridEngine
from hybrid_rlhf.generation.engine import GenerationEngine
from hybrid_rlhf.generation.sampling import SamplingParams, derive_seed
from hybrid_rlhf.runtime.progress import ProgressLog
from hybrid_rlhf.runtime.timers import Timers
from hybrid_rlhf.runtime.world import mistakes_shared

Episodes = list[list[Episode]]
_CLOSING_SECONDS = 10.0
"""A decoding step ends well within."""


@dataclass(frozen=True)
class _Share:
    """What this rank samples."""

    prompts: int
    """Of all ranks."""
    places: list[int]
    """Of its prompts among these."""
    rows: list[Mapping[str, Any]]
    requests: list[SamplingParams]


@dataclass(frozen=True)
class Measured:
    """What sampling in a thread took."""

    seconds: float = 0.0
    decode_bytes: int = 0
    """That decoding read on this rank."""


@dataclass(frozen=True)
class Pending:
    """Completions that a thread is sampling."""

    share: _Share
    generation: GenerationEngine
    call: Background[tuple[Episodes, Measured]]


def cancel(rollouts: Sequence[Pending]) -> None:
    """End threads soon, and wait for that."""
    for pending in rollouts:
        pending.generation.close()
    deadline = time.monotonic() + _CLOSING_SECONDS
    for pending in rollouts:
        pending.call.has_ended(max(0.0, deadline - time.monotonic()))


class PromptSampler:
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
        player: Player | None = None,
    ) -> None:
        """Take the actor, how it samples, what ends a completion (stop strings need the tokenizer), and who plays where
        there are environments."""
        self.actor, self._config, self._seed = actor, config, seed
        self._stop: dict[str, Any] = {"stop_token_ids": stop_token_ids, "tokenizer": tokenizer}
        self._timers, self._player = timers, player
        self._one_at_a_time = threading.RLock()
        self._stream: torch.cuda.Stream | None = None

    def sample(
        self, prompts: Sequence[Mapping[str, Any]], *, step: int, first: int = 0, greedy: bool = False,
        shown_as: str | None = None,
    ) -> Sequences:  # fmt: skip
        """Completions of all prompts, by the current weights; every rank calls.

        Args:
            prompts: rows with `input_ids`, the same on every rank.
            step: key of the random streams: prompt i of a step samples alike on any number of ranks.
            first: place in the step of the first prompt.
            greedy: after the completions of each prompt that the config asks for, one greedy one.
            shown_as: name in the log of generation that takes longer; none: nothing is shown.
        """
        share = self._share(prompts, step, first, greedy)
        with self._one_at_a_time, self.actor.inference(**self._stop) as generation:
            episodes = self._play(generation, share, self._timers, shown_as)
        return self._whole(share, episodes)

    def begin(self, prompts: Sequence[Mapping[str, Any]], *, step: int, greedy: bool = False) -> Pending:
        """Start on what `sample` would give now, by a copy of the weights; every rank calls."""
        generation = self.actor.copied(**self._stop)
        share, copied = self._share(prompts, step, 0, greedy), self._stream_position()

        def beside() -> tuple[Episodes, Measured]:
            with self._one_at_a_time, self._own_stream(copied):
                start = time.perf_counter()
                episodes = self._play(generation, share, Timers(torch.device("cpu")))  # does not wait for training
                measured = Measured(time.perf_counter() - start, generation.decode_bytes)
            generation.close()
            return episodes, measured

        return Pending(share, generation, Background(beside, device=self.actor.device))

    def finish(self, pending: Pending) -> tuple[Sequences, Measured]:
        """Wait for what was begun; every rank calls, in the order of the beginnings.

        Raises:
            UserError: on every rank, as generation and environments say of any.
        """
        with mistakes_shared(self.actor.world):
            episodes, measured = pending.call.result()
        return self._whole(pending.share, episodes), measured

    def await_in_step(self, pending: Pending) -> None:
        """Wait, as a part of a step's time."""
        with self._timers("generation"):
            pending.call.has_ended(None)

    def _share(self, prompts: Sequence[Mapping[str, Any]], step: int, first: int, greedy: bool) -> _Share:
        world, config, together = self.actor.world, self._config, self.actor.generation_world
        mine = list(range(world.rank // together.size, len(prompts), world.size // together.size))
        drawn = [
            SamplingParams(
                max_new_tokens=config.max_new_tokens, temperature=config.temperature, top_p=config.top_p,
                top_k=config.top_k, n=config.samples_per_prompt, seed=derive_seed(self._seed, step, first + index),
            )
            for index in mine
        ]  # fmt: skip
        greedily = [replace(params, n=1, greedy=True) for params in drawn] if greedy else []
        places = mine * (2 if greedy else 1)
        return _Share(len(prompts), places, [prompts[place] for place in places], drawn + greedily)

    def _play(
        self, generation: GenerationEngine, share: _Share, timers: Timers, shown_as: str | None = None
    ) -> Episodes:
        """The completions of this rank's prompts, or their episodes where there is an environment."""
        if self._player is not None:
            return self._player.play(generation, share.rows, share.requests, self.actor.generation_world, timers)
        unit = "completions" if self.actor.world.size == 1 else "completions on rank 0"
        progress = ProgressLog(shown_as or "", total=sum(params.n for params in share.requests), unit=unit)
        with timers("generation"):
            completions = generation.generate(
                [prompt["input_ids"] for prompt in share.rows], share.requests,
                on_completed=None if shown_as is None else progress.advance,
            )  # fmt: skip
        return [
            [Episode.of_turn(prompt["input_ids"], sample) for sample in samples]
            for prompt, samples in zip(share.rows, completions, strict=True)
        ]

    def _whole(self, share: _Share, episodes: Episodes) -> Sequences:
        """The completions of all ranks, those of a prompt together."""
        world = self.actor.world
        told = list(zip(share.places, episodes, strict=True)) if self.actor.generation_world.is_main else []
        by_prompt: dict[int, list[Episode]] = defaultdict(list)
        for place, samples in (pair for part in world.all_gather_objects(told) for pair in part):
            by_prompt[place] += samples
        whole = [episode for place in range(share.prompts) for episode in by_prompt[place]]
        if self._player is not None:
            self._player.require_whole(whole, world)
        return as_sequences(whole, world.device)

    def _stream_position(self) -> torch.cuda.Event | None:
        """After which the copied weights are there."""
        return torch.cuda.current_stream().record_event() if self.actor.device.type == "cuda" else None

    @contextlib.contextmanager
    def _own_stream(self, copied: torch.cuda.Event | None) -> Iterator[None]:
        """On a GPU a stream beside that of training."""
        if copied is None:
            yield
            return
        stream = self._stream = self._stream or torch.cuda.Stream()  # memory that is freed serves its stream alone
        stream.wait_event(copied)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            stream.synchronize()
