"""Prompts to completions: each group of ranks that generates together samples its share, and all get the whole.

With the actor's weights as they are, between updates; or with a copy of them in a thread, while the actor learns.
Gathering weights and completions is for all ranks together, so it stays in the main thread; the thread in between has
no collectives.
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

from hybrid_rlhf.algorithms.environments import Player
from hybrid_rlhf.algorithms.episodes import Episode, as_sequences
from hybrid_rlhf.algorithms.experience import Sequences
from hybrid_rlhf.algorithms.rewards.background import Background
from hybrid_rlhf.configs.ppo import RolloutConfig
from hybrid_rlhf.engines.hybrid import HybridEngine
from hybrid_rlhf.generation.engine import GenerationEngine
from hybrid_rlhf.generation.sampling import SamplingParams, derive_seed
from hybrid_rlhf.runtime.timers import Timers

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
class _Sampled:
    """What a thread gives."""

    episodes: Episodes
    seconds: float
    decode_bytes: int
    """What decoding read."""


@dataclass(frozen=True)
class Pending:
    """Completions that a thread is sampling."""

    share: _Share
    generation: GenerationEngine
    call: Background[_Sampled]

    def cancel(self) -> None:
        """End it soon."""
        self.generation.close()
        self.call.has_ended(_CLOSING_SECONDS)


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
        player: Player | None = None,
    ) -> None:
        """Take the actor, how it samples, what ends a completion, and who plays where there are environments."""
        self._actor, self._config, self._stop, self._seed = actor, config, stop_token_ids, seed
        self._timers, self._player = timers, player
        self._one_at_a_time = threading.Lock()
        self._hidden_seconds = 0.0

    def sample(
        self, prompts: Sequence[Mapping[str, Any]], *, step: int, first: int = 0, greedy: bool = False
    ) -> Sequences:
        """Completions of all prompts, by the current weights; every rank calls.

        Args:
            prompts: rows with `input_ids`, the same on every rank.
            step: key of the random streams: prompt i of a step samples alike on any number of ranks.
            first: place in the step of the first prompt.
            greedy: after the completions of each prompt that the config asks for, one greedy one.
        """
        share = self._share(prompts, step, first, greedy)
        with self._actor.inference(stop_token_ids=self._stop) as generation:
            episodes = self._play(generation, share, self._timers)
        return self._whole(share, episodes)

    def copied(self) -> GenerationEngine:
        """The weights as they are, for `begin`; every rank calls.

        Raises:
            UserError: when the model has no layout to copy.
        """
        return self._actor.copied(stop_token_ids=self._stop)

    def begin(
        self, generation: GenerationEngine, prompts: Sequence[Mapping[str, Any]], *, step: int, greedy: bool = False
    ) -> Pending:
        """Start on what `sample` would give by the weights that were copied."""
        share, copied = self._share(prompts, step, 0, greedy), self._stream_position()

        def beside() -> _Sampled:
            with self._one_at_a_time, self._own_stream(copied):
                start, read = time.perf_counter(), generation.decode_bytes
                episodes = self._play(generation, share, Timers(torch.device("cpu")))  # does not wait for training
                return _Sampled(episodes, time.perf_counter() - start, generation.decode_bytes - read)

        return Pending(share, generation, Background(beside, device=self._actor.device))

    def finish(self, pending: Pending) -> Sequences:
        """Wait for what was begun; every rank calls, in the order of the beginnings."""
        start = time.perf_counter()
        with self._timers("generation"):
            sampled = pending.call.result()
        self._hidden_seconds += max(0.0, sampled.seconds - (time.perf_counter() - start))
        self._actor.decode_bytes = sampled.decode_bytes
        return self._whole(pending.share, sampled.episodes)

    def take_hidden_seconds(self) -> float:
        """What sampling took beside training since the last call, beyond what was waited for."""
        taken, self._hidden_seconds = self._hidden_seconds, 0.0
        return taken

    def _share(self, prompts: Sequence[Mapping[str, Any]], step: int, first: int, greedy: bool) -> _Share:
        world, config, together = self._actor.world, self._config, self._actor.generation_world
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

    def _play(self, generation: GenerationEngine, share: _Share, timers: Timers) -> Episodes:
        """The completions of this rank's prompts, or their episodes where there is an environment."""
        if self._player is not None:
            return self._player.play(generation, share.rows, share.requests, self._actor.generation_world, timers)
        with timers("generation"):
            completions = generation.generate([prompt["input_ids"] for prompt in share.rows], share.requests)
        return [
            [Episode.of_turn(prompt["input_ids"], sample) for sample in samples]
            for prompt, samples in zip(share.rows, completions, strict=True)
        ]

    def _whole(self, share: _Share, episodes: Episodes) -> Sequences:
        """The completions of all ranks, those of a prompt together."""
        world = self._actor.world
        told = list(zip(share.places, episodes, strict=True)) if self._actor.generation_world.is_main else []
        by_prompt: dict[int, list[Episode]] = defaultdict(list)
        for place, samples in (pair for part in world.all_gather_objects(told) for pair in part):
            by_prompt[place] += samples
        whole = [episode for place in range(share.prompts) for episode in by_prompt[place]]
        if self._player is not None:
            self._player.require_whole(whole, world)
        return as_sequences(whole, world.device)

    def _stream_position(self) -> torch.cuda.Event | None:
        """After which the copied weights are there."""
        return torch.cuda.current_stream().record_event() if self._actor.device.type == "cuda" else None

    @contextlib.contextmanager
    def _own_stream(self, copied: torch.cuda.Event | None) -> Iterator[None]:
        """On a GPU a stream beside that of training."""
        if copied is None:
            yield
            return
        stream = torch.cuda.Stream()
        stream.wait_event(copied)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()
