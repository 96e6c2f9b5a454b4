"""A sampler on ranks of its own and the actor on those that train it, which sample parts of the same rollouts.

At policy lag 0 the ranks that train are idle while others sample. Here they sample too, with inference weights of
their own (engines/hybrid.py): each tensor-parallel group of either takes an equal part of the prompts. Completions are
those of one sampler, as they depend on their prompts' seeds alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.engines.hybrid import HybridEngine
from hybrid_rlhf.engines.separate.plane import TransferTimes
from hybrid_rlhf.engines.separate.sampler import SeparateSampler
from hybrid_rlhf.generation.batching.requests import DecodeWork
from hybrid_rlhf.generation.engine import GenerationEngine
from hybrid_rlhf.runtime.world import World


class JointSampler:
    """Samples on the ranks of sampler and actor; see SamplingEngine."""

    def __init__(self, separate: SeparateSampler, actor: HybridEngine | None, *, world: World) -> None:
        """Take both, and all their ranks; every rank of the run calls.

        Args:
            separate: on ranks of its own.
            actor: built with `samples=True` and the same tensor parallelism; none on ranks that do not train it.
            world: the ranks of both.
        """
        self.world, self._separate, self._actor = world, separate, actor
        own: SeparateSampler | HybridEngine = separate if actor is None else actor
        self._own = own
        self.generation_world = own.generation_world
        self.max_logprob_diff = separate.max_logprob_diff
        self.work = DecodeWork()
        self.weight_sync_seconds = self.weight_check_seconds = 0.0

    @property
    def groups(self) -> tuple[int, int | None]:
        """See SamplingEngine; the sampler's groups come before the actor's."""
        first, own = self._separate.groups
        count = self.world.size // self.generation_world.size
        return count, own if self._actor is None else first + (self._actor.groups[1] or 0)

    @property
    def device(self) -> torch.device:
        """See SamplingEngine."""
        return self.world.device

    @property
    def weight_version(self) -> int:
        """See SamplingEngine."""
        return self._separate.weight_version

    @contextlib.contextmanager
    def inference(
        self, *, stop_token_ids: tuple[int, ...] | None = None, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> Iterator[GenerationEngine | None]:
        """See SamplingEngine. The actor's ranks send weights first, and then build their own.

        Raises:
            UserError: as of both.
        """
        with contextlib.ExitStack() as stack:
            for engine in self._engines:
                generation = stack.enter_context(engine.inference(stop_token_ids=stop_token_ids, tokenizer=tokenizer))
            yield generation
        self.work = self._own.work
        self.weight_sync_seconds = sum(engine.weight_sync_seconds for engine in self._engines)
        self.weight_check_seconds = sum(engine.weight_check_seconds for engine in self._engines)

    def sync_ahead(self) -> contextlib.AbstractContextManager[TransferTimes | None]:
        """See SeparateSampler."""
        return self._separate.sync_ahead()

    def snapshot(
        self, *, stop_token_ids: tuple[int, ...], tokenizer: PreTrainedTokenizerBase | None = None
    ) -> GenerationEngine | None:
        """See SamplingEngine.

        Raises:
            RuntimeError: always, as the actor's ranks train while a snapshot is used.
        """
        raise RuntimeError("the actor's ranks sample only while they do not train: leave with_actor or the lag out")

    @contextlib.contextmanager
    def other_weights(self) -> Iterator[None]:
        """See SamplingEngine."""
        with contextlib.ExitStack() as stack:
            for engine in self._engines:
                stack.enter_context(engine.other_weights())
            yield

    @property
    def _engines(self) -> list[SeparateSampler | HybridEngine]:
        """Those that this rank takes part in."""
        return [engine for engine in (self._separate, self._actor) if engine is not None]
