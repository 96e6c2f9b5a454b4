"""A sampler on ranks of its own: it generates with the actor's weights, which it receives after each update.

Where the actor samples on the ranks that train it, engines/hybrid.py is used. Here the ranks that sample have no
training model: the actor's first rank describes it. All ranks of both enter `inference` and `snapshot`, exchange the
versions of their weights, and transfer them if these differ; after each transfer the actor's forward checks them.

Inference weights stay in memory between rollouts, unless `rollout.keep_weights` is false, and so do KV cache and CUDA
graphs where no other role computes. What a snapshot samples with is never written to again.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.rules import require
from hybrid_rlhf.engines.hybrid import BUCKET_ELEMENTS, HybridEngine
from hybrid_rlhf.engines.residency.rules import ResidencyRules, RoleResidency
from hybrid_rlhf.engines.sampling_engine import groups_of, rollout_backend, rollout_drafter
from hybrid_rlhf.engines.separate.layout import HeldWeights, Interval, NeededWeights, TrainedModel
from hybrid_rlhf.engines.separate.received import ReceivedWeights
from hybrid_rlhf.engines.separate.routes import RoutePlan
from hybrid_rlhf.engines.separate.transfer import WeightTransfer, compare_checksums
from hybrid_rlhf.engines.weight_check import WeightCheck, logprob_limit
from hybrid_rlhf.generation.backends.native import NativeBackend
from hybrid_rlhf.generation.batching.requests import DecodeWork
from hybrid_rlhf.generation.drafting.drafter import Drafter
from hybrid_rlhf.generation.engine import GenerationEngine
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.generation.weights.conversion import InferenceWeights
from hybrid_rlhf.generation.weights.describe import NotDescribed
from hybrid_rlhf.models.pretrained.loading import DTYPES
from hybrid_rlhf.runtime.world import World, shared_user_errors

T = TypeVar("T")
_CHECKED_SYNCS = 2
"""First syncs with checksums."""


@dataclass(frozen=True)
class _Introduction:
    """Exchanged by all ranks at the start."""

    host: str
    held: Mapping[str, Interval] | None
    """Of a rank with the actor."""
    model: TrainedModel | None
    """Of the actor's first rank."""


@dataclass(frozen=True)
class _State:
    """Exchanged by all ranks before a sync."""

    version: int
    """Of the actor's weights, or of those that this rank would sample with; -1: it has none."""
    lacks_frozen: bool = False
    forces: bool = False
    """Whether other weights may have the same version."""


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
        self.drafter: Drafter | None = None
        self.work = DecodeWork()
        self.weight_sync_seconds = self.weight_check_seconds = 0.0
        self.max_logprob_diff = math.inf  # of ranks outside of `union`, which compare nothing
        self.sent_bytes = 0
        """By this rank in the last sync."""
        self._check_weights, self._syncs, self._version = check_weights, 0, -1
        if residency is None:
            rules = ResidencyRules.of_rollout(self._rollout, cuda=world.device.type == "cuda")
            residency = rules.sampler(shares_ranks=False)
        self._keeps = residency.stays("inference weights")
        # with a policy lag every snapshot has a cache of its own
        self._keeps_cache = residency.stays("KV cache") and not self._rollout.policy_lag
        self._held_version, self._forces = -1, False
        self._inference: InferenceWeights | None = None
        self._received: ReceivedWeights | None = None
        self._decoder: Decoder | None = None
        self._backend: NativeBackend | None = None
        if union.is_member:
            self._plan(max_logprob_diff)

    def _plan(self, max_logprob_diff: float | None) -> None:
        """Exchange the layouts, and plan the transfer of all weights and that of trained ones."""
        actor, union, rollout = self._actor, self._union, self._rollout
        self._held = None if actor is None else HeldWeights(actor.lm, actor.world)
        with shared_user_errors(union):
            _check_rollout(rollout)
            model = _described(actor) if actor is not None and actor.world.is_main else None
        each = union.all_gather_objects(
            _Introduction(socket.gethostname(), None if self._held is None else self._held.intervals, model)
        )
        self._actor_ranks = [rank for rank, of_rank in enumerate(each) if of_rank.held is not None]
        (self._model,) = (of_rank.model for of_rank in each if of_rank.model is not None)
        dtype = DTYPES.get(rollout.dtype, self._model.dtype)
        quantised = rollout.quantization is not None
        self.max_logprob_diff = logprob_limit(max_logprob_diff, self._model.dtype, dtype, quantised=quantised)
        self._check = WeightCheck(union, max_logprob_diff, quantised=quantised, remedy="leave placement.sampler out")
        with shared_user_errors(union):
            needs = self._plan_inference_weights(dtype) if self.world.is_member else None
        needed = {rank: need for rank, need in enumerate(union.all_gather_objects(needs)) if need is not None}
        dtypes = next(iter(needed.values())).dtypes
        plan = RoutePlan(
            {rank: of_rank.held for rank, of_rank in enumerate(each) if of_rank.held is not None},
            {rank: need.runs for rank, need in needed.items()},
            [of_rank.host for of_rank in each],
        )
        self._transfers = {
            everything: WeightTransfer(
                union,
                plan.buckets(
                    self._model.weights,
                    sends=lambda tensor, everything=everything: everything or tensor.trained,  # type: ignore[misc]
                    bucket_elements=BUCKET_ELEMENTS,
                ),
                dtypes,
            )
            for everything in (True, False)
        }
        if self._inference is not None:
            self._received = ReceivedWeights(dtypes, self.device, in_place=self._inference.in_place)

    def _plan_inference_weights(self, dtype: torch.dtype) -> NeededWeights:
        rollout = self._rollout
        try:
            self._inference = InferenceWeights(
                self._model.described,
                world=self.generation_world,
                dtype=dtype,
                in_place=self._keeps and not rollout.policy_lag,
                quantization=rollout.quantization,
            )
        except NotDescribed as error:
            raise _without_inference_weights(error) from error
        self.drafter = rollout_drafter(rollout, self._model.described.architecture)
        return NeededWeights.of(self._model, self._inference, dtype)

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
        return self._version if self._actor is None else self._actor.weight_version

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
        generation = self._generation(self._backend, stop_token_ids, tokenizer)
        del decoder
        try:
            yield generation
        finally:
            self.work = generation.work
            generation.detach_backend()
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
            RuntimeError: on every rank, when the next sync may write into these weights.
        """
        if self._keeps and not self._rollout.policy_lag:
            raise RuntimeError("a snapshot needs weights that the next sync leaves as they are: set async_sampling")
        decoder = self._synced_decoder()
        if decoder is None:
            return None
        return self._generation(rollout_backend(decoder, self._rollout, cuda_graphs=False), stop_token_ids, tokenizer)

    @contextlib.contextmanager
    def other_weights(self) -> Iterator[None]:
        """See SamplingEngine; the next sync after it transfers weights too. Enough on the actor's ranks."""
        self._forces = True
        try:
            yield
        finally:
            self._forces = True

    def _generation(
        self,
        backend: NativeBackend,
        stop_token_ids: tuple[int, ...] | None,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> GenerationEngine:
        return GenerationEngine(
            backend,
            stop_token_ids=self._model.stop_token_ids if stop_token_ids is None else stop_token_ids,
            tokenizer=tokenizer,
            weight_version=self._version,
            drafter=self.drafter,
        )

    def _synced_decoder(self) -> Decoder | None:
        """The decoder of the actor's current weights; none on a rank that does not sample."""
        if not self._union.is_member:
            return None
        self.weight_sync_seconds = self.weight_check_seconds = 0.0
        start = time.perf_counter()
        states = self._union.all_gather_objects(
            _State(
                self._held_version if self._actor is None else self._actor.weight_version,
                self._received is not None and not self._received.has_frozen,
                self._forces,
            )
        )
        self._forces = False
        self._version = self._agreed_version(states)
        forced = any(state.forces for state in states)
        if forced or any(state.version != self._version for state in states):
            self._sync(everything=any(state.lacks_frozen for state in states))
        self.weight_sync_seconds += time.perf_counter() - start
        return self._decoder

    def _agreed_version(self, states: list[_State]) -> int:
        versions = {rank: states[rank].version for rank in self._actor_ranks}
        first = self._actor_ranks[0]
        for rank, version in versions.items():
            if version != versions[first]:
                own, other = self._union.members[first], self._union.members[rank]
                raise UserError(
                    f"ranks of the actor must have made the same updates, rank {own} has made {versions[first]}, rank "
                    f"{other} {version}: resume from a checkpoint"
                )
        return versions[first]

    def _sync(self, *, everything: bool) -> None:
        """Transfer and check the weights; `everything`: the frozen ones too."""
        transfer = self._transfers[everything]
        self._syncs += 1
        checked = self._check_weights or self._syncs <= _CHECKED_SYNCS
        self._held_version = -1  # until the weights are complete and checked
        if self._held is not None:
            transfer.send(self._held, checked=checked)
        if self._inference is not None and self._received is not None:
            if not self._inference.in_place:
                self._release()
            self._decoder = self._inference.build(self._received.assembled(transfer.receive(checked=checked)))
            if self._backend is not None:
                self._backend.sync_weights(self._decoder)
        self.sent_bytes = transfer.sent_bytes
        if checked:
            compare_checksums(self._union, transfer.checksums, update=self._version)
        start = time.perf_counter()
        self._compare_logprobs()
        seconds = time.perf_counter() - start
        self.weight_check_seconds = seconds
        self.weight_sync_seconds -= seconds  # the caller times both
        if self._actor is None:
            self._held_version = self._version

    def _compare_logprobs(self) -> None:
        actor, vocab_size = self._actor, self._model.described.architecture.vocab_size

        def states() -> list[Tensor] | None:
            found = None if actor is None else actor.probe.states(vocab_size)
            return self._of_actor(None if found is None else [state.cpu() for state in found])

        expected = self._of_actor(None if actor is None else actor.probe.logprobs(vocab_size).cpu())
        assert expected is not None
        self._check(self._decoder, expected, states, updates=self._version)

    def _of_actor(self, value: T | None) -> T | None:
        """The value of the actor's first rank, on every rank."""
        return self._union.broadcast_object(value, source=self._actor_ranks[0])

    def close(self) -> None:
        """Free inference weights, KV cache and CUDA graphs; no collective runs."""
        self._release()

    def _release(self) -> None:
        """Free inference weights, KV cache and CUDA graphs; a snapshot keeps its own."""
        self._release_cache()
        self._decoder, self._held_version = None, -1

    def _release_cache(self) -> None:
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()


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


def _described(actor: HybridEngine) -> TrainedModel:
    try:
        return TrainedModel.of(actor.lm)
    except NotDescribed as error:
        raise _without_inference_weights(error) from error


def _without_inference_weights(reason: NotDescribed) -> UserError:
    return UserError(
        f"placement.sampler needs inference weights, the actor's model has none ({reason}): leave placement.sampler out"
    )
