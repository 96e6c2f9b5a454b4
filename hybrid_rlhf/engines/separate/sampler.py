"""A sampler on ranks of its own: it generates with the actor's weights, which it receives after each update.

Where the actor samples on the ranks that train it, engines/hybrid.py is used. Here the ranks that sample have no
training model, and take the weights from a plane (plane.py). All ranks of both enter `inference` and `snapshot`, and
`sync_ahead` where other models compute after the actor's last update; after each transfer the actor's forward checks
the weights.

Inference weights stay in memory between rollouts, unless `rollout.keep_weights` is false, and so do KV cache and CUDA
graphs where no other role computes. With a policy lag of 1 the next sync writes into the weights of a snapshot, which
has sampled by then; with a larger one each snapshot has its own weights and cache, and no CUDA graphs.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.rules import require
from hybrid_rlhf.engines.checks.weight_check import Rerouted, TrainingProbe, WeightCheck, logprob_limit
from hybrid_rlhf.engines.hybrid import HybridEngine
from hybrid_rlhf.engines.residency.rules import ResidencyRules, RoleResidency
from hybrid_rlhf.engines.sampling_engine import check_closed, groups_of, rollout_backend
from hybrid_rlhf.engines.separate.plane import PlaneSettings, TransferTimes, WeightPlane
from hybrid_rlhf.generation.backends.native import NativeBackend
from hybrid_rlhf.generation.batching.requests import DecodeWork
from hybrid_rlhf.generation.engine import GenerationEngine
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.models.pretrained.loading import DTYPES
from hybrid_rlhf.runtime.world import World

T = TypeVar("T")


class SeparateSampler:
    """Samples for an actor on other ranks; see SamplingEngine."""

    def __init__(
        self,
        actor: HybridEngine | None,
        *,
        world: World,
        union: World,
        rollout: RolloutConfig | None = None,
        max_logprob_diff: float | None = None,
        check_weights: bool = False,
        residency: RoleResidency | None = None,
    ) -> None:
        """Plan the transfer; every rank of the run calls, after `create_groups`.

        Args:
            actor: none on ranks that do not train it.
            world: the ranks that sample, none of which trains the actor.
            union: those and the actor's.
            rollout: how it generates; none: the defaults.
            max_logprob_diff: see faults.max_logprob_diff.
            check_weights: see faults.check_weights.
            residency: where its memory lies in each phase; none: as the rollout says, on ranks without other roles.

        Raises:
            UserError: on every rank of `union`, when the model has no inference weights, or the rollout needs what a
                sampler on ranks of its own does not have.
        """
        self.world, self._union, self._actor = world, union, actor
        self._rollout = rollout or RolloutConfig()
        # with a policy lag it samples while frozen roles read, perhaps in groups of the same ranks
        self.generation_world = world.split(self._rollout.tensor_parallel, own=self._rollout.policy_lag > 0)
        self.work = DecodeWork()
        self.weight_sync_seconds = self.weight_check_seconds = 0.0
        self.max_logprob_diff = math.inf  # of ranks outside of `union`, which compare nothing
        if residency is None:
            rules = ResidencyRules.of_rollout(self._rollout, cuda=world.device.type == "cuda")
            residency = rules.sampler(shares_ranks=False)
        self._keeps = residency.stays("inference weights")
        # with a larger policy lag every snapshot has weights and a cache of its own
        self._keeps_cache = residency.stays("KV cache") and self._rollout.policy_lag <= 1
        self._snapshot: GenerationEngine | None = None
        self._backend: NativeBackend | None = None
        self.plane: WeightPlane | None = None
        """None on a rank with neither actor nor sampler."""
        if union.is_member:
            self.plane = self._planned(max_logprob_diff, check_weights=check_weights)

    def _planned(self, max_logprob_diff: float | None, *, check_weights: bool) -> WeightPlane:
        """The plane of the actor's weights, and what they are checked with."""
        union, rollout = self._union, self._rollout
        _check_rollout(rollout)
        settings = PlaneSettings(
            "actor",
            "placement.sampler",
            dtype=DTYPES.get(rollout.dtype),
            in_place=self._keeps and rollout.policy_lag <= 1,
            quantization=rollout.quantization,
            check_weights=check_weights,
        )
        group = self.generation_world if self.world.is_member else None
        plane = WeightPlane(self._actor, settings, union=union, group=group, release=self._release_cache)
        quantised, model = rollout.quantization is not None, plane.model
        self.max_logprob_diff = logprob_limit(max_logprob_diff, model.dtype, plane.dtype, quantised=quantised)
        self._check = WeightCheck(union, max_logprob_diff, quantised=quantised, remedy="leave placement.sampler out")
        return plane

    @property
    def device(self) -> torch.device:
        """See SamplingEngine."""
        return self.world.device

    @property
    def groups(self) -> tuple[int, int | None]:
        """See SamplingEngine."""
        return groups_of(self.world, self.generation_world)

    @property
    def weight_version(self) -> int:
        """See SamplingEngine; -1 before the first sync."""
        if self._actor is not None:
            return self._actor.weight_version
        return -1 if self.plane is None else self.plane.version

    @contextlib.contextmanager
    def inference(
        self, *, stop_token_ids: tuple[int, ...] | None = None, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> Iterator[GenerationEngine | None]:
        """See SamplingEngine.

        Raises:
            UserError: on every rank of actor and sampler, when weights arrive damaged or compute something else than
                those that train.
        """
        self.work = DecodeWork()
        decoder = self._synced_decoder()
        if decoder is None:
            yield None
            return
        if self._backend is None:
            self._backend = rollout_backend(decoder, self._rollout)
        self._backend.capture_in_runs()
        generation = self._generation(self._backend, stop_token_ids, tokenizer)
        del decoder
        try:
            yield generation
        finally:
            self.work = generation.work
            generation.close()
            if not self._keeps_cache:
                self._release_cache()
            if not self._keeps:
                self._release()

    def snapshot(
        self, *, stop_token_ids: tuple[int, ...], tokenizer: PreTrainedTokenizerBase | None = None
    ) -> GenerationEngine | None:
        """See SamplingEngine.

        Raises:
            UserError: as `inference`.
            RuntimeError: without a policy lag, or when an earlier snapshot with the same weights is not closed.
        """
        lag = self._rollout.policy_lag
        if self._keeps and not lag:
            raise RuntimeError("a snapshot needs weights that the next sync leaves as they are: set async_sampling")
        if lag == 1:
            check_closed(self._snapshot)
        decoder = self._synced_decoder()
        if decoder is None:
            return None
        if lag != 1:
            backend = rollout_backend(decoder, self._rollout, cuda_graphs=False)
            return self._generation(backend, stop_token_ids, tokenizer, keeps_backend=False)
        if self._backend is None:
            self._backend = rollout_backend(decoder, self._rollout)
        self._backend.capture_between_runs()
        self._snapshot = self._generation(self._backend, stop_token_ids, tokenizer)
        return self._snapshot

    @contextlib.contextmanager
    def other_weights(self) -> Iterator[None]:
        """See SamplingEngine; the next sync after it transfers weights too. Enough on the actor's ranks."""
        self._force()
        try:
            yield
        finally:
            self._force()

    def _generation(
        self,
        backend: NativeBackend,
        stop_token_ids: tuple[int, ...] | None,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        keeps_backend: bool = True,
    ) -> GenerationEngine:
        plane = self.plane
        assert plane is not None, "called on ranks that sample only"
        return GenerationEngine(
            backend,
            stop_token_ids=plane.model.stop_token_ids if stop_token_ids is None else stop_token_ids,
            tokenizer=tokenizer,
            weight_version=plane.version,
            keeps_backend=keeps_backend,
        )

    def sync_ahead(self) -> contextlib.AbstractContextManager[TransferTimes | None]:
        """Around what other models compute after the actor's last update before a rollout: its weights travel
        meanwhile, and the rollout finds them. Every rank of actor and sampler enters; of none where the weights wait
        for the rollout, as they have no memory before it, or older ones still sample."""
        if self.plane is None or self._rollout.policy_lag or not self._keeps:
            return contextlib.nullcontext()
        return self.plane.ahead()

    def _synced_decoder(self) -> Decoder | None:
        """The decoder of the actor's current weights; none on a rank that does not sample."""
        if self.plane is None:
            return None
        self.weight_sync_seconds = self.weight_check_seconds = 0.0
        start = time.perf_counter()
        decoder = self.plane.current(self._verify)
        self.weight_sync_seconds = time.perf_counter() - start - self.weight_check_seconds
        return decoder

    def _verify(self, decoder: Decoder | None) -> None:
        """Use new weights, and compare their log-probs with those of the actor's forward."""
        plane, actor = self.plane, self._actor
        assert plane is not None
        if self._backend is not None and decoder is not None:
            self._backend.sync_weights(decoder)
        start = time.perf_counter()
        vocab_size = plane.model.described.architecture.vocab_size
        probe = _SentProbe(plane, None if actor is None else TrainingProbe(actor, vocab_size))
        self._check(decoder, probe, updates=plane.version)
        self.weight_check_seconds = time.perf_counter() - start

    def _force(self) -> None:
        if self.plane is not None:
            self.plane.force()

    def _release(self) -> None:
        """Free inference weights, KV cache and CUDA graphs; a snapshot of a larger policy lag keeps its own."""
        self._release_cache()
        if self.plane is not None:
            self.plane.release()

    def _release_cache(self) -> None:
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()


class _SentProbe:
    """The Probe of an actor on the ranks of its sampler too; no actor: of another rank."""

    def __init__(self, plane: WeightPlane, probe: TrainingProbe | None) -> None:
        self._plane, self._probe = plane, probe

    def logprobs(self) -> Tensor:
        """See Probe."""
        return self._of_trained(None if self._probe is None else self._probe.logprobs().cpu())

    def rerouted(self, routes: Tensor) -> Rerouted:
        """See Probe."""
        found = None if self._probe is None else self._probe.rerouted(routes)
        return self._of_trained(None if found is None else replace(found, logprobs=found.logprobs.cpu()))

    def states(self) -> list[Tensor] | None:
        """See Probe."""
        found = None if self._probe is None else self._probe.states()
        return self._plane.of_trained(None if found is None else [state.cpu() for state in found])

    def _of_trained(self, value: T | None) -> T:
        sent = self._plane.of_trained(value)
        assert sent is not None, "the first rank that trains has a value"
        return sent


def _check_rollout(rollout: RolloutConfig) -> None:
    """Raise UserError for settings of a sampler on the actor's ranks."""
    require(
        rollout.backend == "auto",
        f"placement.sampler needs inference weights, got rollout.backend {rollout.backend}: give auto, or leave "
        "placement.sampler out",
    )
    require(
        not rollout.offload_states,
        "rollout.offload_states makes room for sampling on the actor's ranks, got placement.sampler: leave one out",
    )
