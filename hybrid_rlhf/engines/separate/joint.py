"""A sampler on separate ranks and the actor on its training ranks, which sample parts of the same rollouts.

At policy lag 0, the training ranks are idle while other ranks sample. Here they also sample, with their own inference
weights (engines/hybrid.py): each tensor-parallel group of both takes an equal part of the prompts. Completions are the
same as with one sampler, since they depend only on the seeds of their prompts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.engines.hybrid import HybridEngine
from hybrid_rlhf.engines.separate.sampler import SeparateSampler
from hybrid_rlhf.generation.batching.requests import DecodeWork
from hybrid_rlhf.generation.engine import GenerationEngine
from hybrid_rlhf.runtime.world import World


class JointSampler:
    """A SamplingEngine on the ranks of sampler and actor."""

    samples_while_training = False

    def __init__(self, separate: SeparateSampler, actor: HybridEngine | None, *, world: World) -> None:
        """Combine both. Every rank of the run makes this call.

        Args:
            separate: the sampler on separate ranks.
            actor: built with `samples=True` and the same tensor parallelism; none on ranks that do not train it.
            world: the ranks of both.
        """
        self.world = world
        self.device = world.device
        """Device of this rank."""
        self._separate = separate
        self._engines: list[SeparateSampler | HybridEngine] = [separate] if actor is None else [separate, actor]
        """The engines whose calls this rank makes; the last samples on it."""
        self.generation_world = self._engines[-1].generation_world
        first, group = separate.groups
        self.groups = (
            world.size // self.generation_world.size,
            group if actor is None else first + (actor.groups[1] or 0),
        )
        """Number of `generation_world`s, and the index of this rank's; the sampler's come before the actor's."""
        self.max_logprob_diff = separate.max_logprob_diff
        self.work = DecodeWork()
        self.weight_sync_seconds = self.weight_check_seconds = 0.0

    @property
    def weight_version(self) -> int:
        """Number of optimizer updates of the actor's weights; on a rank without the actor, at the last sync."""
        return self._separate.weight_version

    @contextlib.contextmanager
    def inference(
        self, *, stop_token_ids: tuple[int, ...] | None = None, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> Iterator[GenerationEngine | None]:
        """Return a context in which the current weights generate. Every rank of actor and sampler must enter.

        The actor's ranks first send weights, then build their own inference weights.

        Raises:
            UserError: as for sampler and actor.
        """
        with contextlib.ExitStack() as stack:
            for engine in self._engines:
                generation = stack.enter_context(engine.inference(stop_token_ids=stop_token_ids, tokenizer=tokenizer))
            yield generation
        self.work = self._engines[-1].work
        self.weight_sync_seconds = sum(engine.weight_sync_seconds for engine in self._engines)
        self.weight_check_seconds = sum(engine.weight_check_seconds for engine in self._engines)

    @contextlib.contextmanager
    def other_weights(self) -> Iterator[None]:
        """Context in which the model temporarily has other weights under the same version."""
        with contextlib.ExitStack() as stack:
            for engine in self._engines:
                stack.enter_context(engine.other_weights())
            yield
