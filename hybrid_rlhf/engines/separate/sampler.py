"""A sampler on separate ranks: it generates with the actor's weights, which it receives after each update.

If the actor samples on its training ranks, engines/hybrid.py is used instead. Here the sampling ranks have no training
model, and receive the weights (synced.py). All ranks of actor and sampler enter `inference`. After each sync, the
actor's forward checks the weights.

Inference weights stay in memory between rollouts, unless `rollout.keep_weights` is false. KV cache and CUDA graphs also
stay if no other role computes on these ranks. With a lag they always stay: a sync writes into the weights of a batch
that waits between two decoding steps.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.rules import require
from hybrid_rlhf.engines.residency.rules import ResidencyRules, RoleResidency
from hybrid_rlhf.engines.role_model import RoleModel
from hybrid_rlhf.engines.sampling_engine import backend_maker, groups_of
from hybrid_rlhf.engines.separate.broadcast import SyncRanks
from hybrid_rlhf.engines.separate.synced import SyncedWeights
from hybrid_rlhf.engines.weight_check import Rerouted, TrainingProbe, WeightCheck, logprob_limit
from hybrid_rlhf.generation.backends.native import NativeBackend
from hybrid_rlhf.generation.batching.requests import DecodeWork
from hybrid_rlhf.generation.engine import GenerationEngine
from hybrid_rlhf.generation.image_loading import ImageReader, ModelImages
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.models.pretrained.loading import DTYPES
from hybrid_rlhf.models.vision import ImageEncoder
from hybrid_rlhf.runtime.world import World

T = TypeVar("T")


class SeparateSampler:
    """A SamplingEngine for an actor on other ranks."""

    def __init__(
        self,
        actor: RoleModel,
        *,
        world: World,
        rollout: RolloutConfig | None = None,
        max_logprob_diff: float | None = None,
        weight_check_every: int = 1,
        check_weights: bool = False,
        residency: RoleResidency | None = None,
        images: ModelImages | None = None,
    ) -> None:
        """Plan the inference weights. Every rank of the run makes this call, after `create_groups`.

        Args:
            actor: the actor.
            world: ranks that sample; none of them trains the actor.
            rollout: settings of generation; none: the defaults.
            max_logprob_diff: faults.max_logprob_diff of the config.
            weight_check_every: faults.weight_check_every of the config.
            check_weights: faults.check_weights of the config.
            residency: location of its memory in each phase; none: as set in the rollout section, on ranks without other
                roles.
            images: reads the images of prompts; none: prompts are text.

        Raises:
            UserError: on every rank of actor and sampler, when the model has no inference weights, or a rollout setting
                needs a sampler on the actor's ranks.
        """
        self.world = world
        self.device = world.device
        """Device of this rank."""
        self._ranks = SyncRanks.of(actor.world, world)
        self._actor = actor
        self._images = images
        self._rollout = rollout or RolloutConfig()
        self.samples_while_training = self._rollout.max_lag > 0
        # it may sample while frozen roles compute, possibly in groups of the same ranks
        self.generation_world = world.split(self._rollout.tensor_parallel, own=self._rollout.max_lag > 0)
        self.groups = groups_of(world, self.generation_world)
        """Number of `generation_world`s, and the index of this rank's; None: it does not sample."""
        self.work = DecodeWork()
        self.weight_sync_seconds = self.weight_check_seconds = 0.0
        self.max_logprob_diff = math.inf  # on ranks without actor and sampler, which compare nothing
        if residency is None:
            rules = ResidencyRules.of_rollout(self._rollout, cuda=world.device.type == "cuda")
            residency = rules.sampler(shares_ranks=False)
        self._keeps = residency.stays("inference weights")
        self._keeps_cache = residency.stays("KV cache")
        self._make_backend = backend_maker(self._rollout)
        self._backend: NativeBackend | None = None
        self.weights: SyncedWeights | None = None
        """The actor's weights; none on a rank with neither actor nor sampler."""
        if self._ranks.union.is_member:
            self.weights = self._planned(max_logprob_diff, weight_check_every, check_weights=check_weights)

    def _planned(self, max_logprob_diff: float | None, check_every: int, *, check_weights: bool) -> SyncedWeights:
        """Return the actor's weights; also sets up their check."""
        rollout = self._rollout
        _check_rollout(rollout)
        weights = SyncedWeights(
            self._actor,
            ranks=self._ranks,
            group=self.generation_world if self.world.is_member else None,
            key="placement.sampler",
            dtype=DTYPES.get(rollout.dtype),
            in_place=self._keeps,
            quantization=rollout.quantization,
            check_weights=check_weights,
            has_images=self._images is not None,
            # running completions of a stream keep their cache when packed weights are built anew
            release=(lambda: None) if self.samples_while_training else self._release_cache,
        )
        quantised = rollout.quantization is not None
        training = weights.model.dtype
        self.max_logprob_diff = logprob_limit(max_logprob_diff, training, weights.dtype, quantised=quantised)
        self._check = WeightCheck(
            self._ranks.union,
            max_logprob_diff,
            quantised=quantised,
            every=check_every,
            remedy="leave placement.sampler out",
        )
        return weights

    @property
    def weight_version(self) -> int:
        """Number of optimizer updates of the actor's weights; without the actor, at the last sync, -1 before the
        first."""
        if self._actor.world.is_member:
            return self._actor.weight_version
        return -1 if self.weights is None else self.weights.version

    @contextlib.contextmanager
    def inference(
        self, *, stop_token_ids: tuple[int, ...] | None = None, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> Iterator[GenerationEngine | None]:
        """Return a context in which the current weights generate. Every rank of actor and sampler must enter.

        Raises:
            UserError: on every rank of actor and sampler, when weights arrive damaged, or their log-probs differ from
                those of the training forward.
        """
        self.work = DecodeWork()
        weights = self.weights
        if weights is None:
            yield None
            return
        self.weight_check_seconds = 0.0
        start = time.perf_counter()
        decoder = weights.current(self._verify)
        self.weight_sync_seconds = time.perf_counter() - start - self.weight_check_seconds
        if decoder is None:
            yield None
            return
        if self._backend is None:
            self._backend = self._make_backend(decoder)
        self._backend.capture_in_runs()
        generation = GenerationEngine(
            self._backend,
            stop_token_ids=weights.model.stop_token_ids if stop_token_ids is None else stop_token_ids,
            tokenizer=tokenizer,
            weight_version=weights.version,
            keeps_backend=True,
            image_reader=self._image_reader,
        )
        del decoder
        try:
            yield generation
        finally:
            self.work = generation.work
            generation.close()
            if not self._keeps_cache:
                self._release_cache()
            if not self._keeps:
                weights.release()

    @contextlib.contextmanager
    def other_weights(self) -> Iterator[None]:
        """Context in which the actor temporarily has other weights; the next syncs send them."""
        self._force()
        try:
            yield
        finally:
            self._force()

    @property
    def _image_reader(self) -> Callable[[], ImageReader] | None:
        """Reads images with the tower that arrived last; None where prompts are text."""
        images = self._images
        if images is None or self.weights is None or self.weights.tower is None:
            return None
        encoder = ImageEncoder(self.weights.tower.lm, device=self.device, cache=images.cache)
        return lambda: ImageReader(images.loader, encoder)

    def _verify(self, decoder: Decoder | None) -> None:
        """Use new weights in the backend, and compare their log-probs with those of the actor's forward if that is
        due."""
        weights = self.weights
        assert weights is not None
        if self._backend is not None and decoder is not None:
            self._backend.sync_weights(decoder)
        if not self._check.is_due():
            return
        start = time.perf_counter()
        vocab_size = weights.model.described.architecture.vocab_size
        self._check(decoder, _SentProbe(self._actor, vocab_size, self._ranks), updates=weights.version)
        self.weight_check_seconds = time.perf_counter() - start

    def _force(self) -> None:
        if self.weights is not None:
            self.weights.force()

    def _release_cache(self) -> None:
        """Release KV cache and CUDA graphs."""
        backend = self._backend
        self._backend = None
        if backend is not None:
            backend.close()


class _SentProbe(TrainingProbe):
    """A TrainingProbe on the ranks of actor and sampler: results of the actor's first rank are broadcast."""

    def __init__(self, actor: RoleModel, vocab_size: int, ranks: SyncRanks) -> None:
        super().__init__(actor, vocab_size)
        self._ranks = ranks

    def logprobs(self) -> Tensor:
        """Return the log-probs [P - 1] of all tokens except the first."""
        return self._sent(super().logprobs)

    def rerouted(self, routes: Tensor) -> Rerouted:
        """Return the result with experts [P - 1, E, k] forced for all tokens except the last."""
        return self._sent(partial(super().rerouted, routes))

    def states(self) -> list[Tensor] | None:
        """Return hidden states [P, H] before the first layer and after each; None if the layers are unknown."""
        return self._sent(super().states)

    def _sent(self, compute: Callable[[], T]) -> T:
        result = compute() if self._engine.world.is_member else None
        return self._ranks.of_source(tree_map_only(Tensor, Tensor.cpu, result))


def _check_rollout(rollout: RolloutConfig) -> None:
    """Raise UserError for settings that need a sampler on the actor's ranks."""
    require(
        rollout.backend == "auto",
        f"placement.sampler needs inference weights, got rollout.backend {rollout.backend}: give auto, or leave "
        "placement.sampler out",
    )
    require(
        not rollout.offload_states,
        "rollout.offload_states makes room for sampling on the actor's ranks, got placement.sampler: leave one out",
    )
