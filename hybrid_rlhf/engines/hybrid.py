"""The actor's engine: it trains under ZeRO, and inside `inference()` it generates.

On entry a weight sync builds inference weights from the training weights, bucket by bucket: gathered from ZeRO-3's
partitions, adapters merged in, split to this rank's part of tensor parallelism, fused. Training weights are only read,
so training continues bit for bit. On exit all memory is released. A model without inference weights generates through
its Hugging Face module, with all its weights gathered; DeepSpeed's module hooks are removed for that time, since they
would release and gather the weights of each layer again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.rules import require
from hybrid_rlhf.engines.checks.element_check import ElementCheck
from hybrid_rlhf.engines.checks.weight_check import TrainingProbe, WeightCheck, logprob_limit
from hybrid_rlhf.engines.deepspeed_internals import zero3_hooks_removed
from hybrid_rlhf.engines.engine import AbsentEngine, EngineFacts, EngineOptions, ModelEngine, Role
from hybrid_rlhf.engines.partition import base_parameters, full_weights, gathered, has_partitions
from hybrid_rlhf.engines.residency.offload import OffloadedStates
from hybrid_rlhf.engines.residency.rules import ResidencyRules, RoleResidency
from hybrid_rlhf.engines.sampling_engine import (
    check_closed,
    groups_of,
    rollout_backend,
    rounds_otherwise,
)
from hybrid_rlhf.generation.architecture.model_description import ModelDescription
from hybrid_rlhf.generation.backends.backend import GenerationBackend
from hybrid_rlhf.generation.backends.module import ModuleBackend, ModuleSupport
from hybrid_rlhf.generation.backends.native import NativeBackend
from hybrid_rlhf.generation.batching.requests import DecodeWork
from hybrid_rlhf.generation.engine import GenerationEngine, default_stop_token_ids
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.generation.weights.inference_weights import InferenceWeights, architecture_of, plan_inference_weights
from hybrid_rlhf.models.lora import has_lora, lora_merged
from hybrid_rlhf.models.pretrained.loading import DTYPES
from hybrid_rlhf.models.routers.replay import RouterReplay
from hybrid_rlhf.runtime.world import World

BUCKET_ELEMENTS = 2**26
"""Most elements gathered at once, unless one weight alone is larger."""


@dataclass(frozen=True)
class _KeptBackend:
    """Inference weights, KV cache and CUDA graphs that stay in memory between rollouts, or snapshots."""

    weight_version: int
    """Of the training weights at the last sync; -1 forces the next one."""
    backend: NativeBackend


class HybridEngine(ModelEngine):
    """A ModelEngine of an actor that can also generate."""

    def __init__(
        self,
        role: Role,
        engine: DeepSpeedEngine,
        world: World,
        options: EngineOptions | None = None,
        *,
        rollout: RolloutConfig | None = None,
        max_logprob_diff: float | None = None,
        samples: bool = True,
        residency: RoleResidency | None = None,
    ) -> None:
        """Wrap an engine; every rank must call.

        Args:
            role: its name.
            engine: the actor's.
            world: the ranks that train it.
            options: see EngineOptions.
            rollout: how it generates; none: the defaults.
            max_logprob_diff: see faults.max_logprob_diff.
            samples: whether it generates; false: only a sampler on other ranks does (engines/separate/), and this one
                has no inference weights.
            residency: where its memory lies in each phase; none: as the rollout says.

        Raises:
            UserError: when tensor_parallel, quantization, routing_replay, async_sampling or partial needs inference
                weights and the model has none, or its experts cannot be replayed.
        """
        super().__init__(role, engine, world, options)
        self._rollout = rollout or RolloutConfig()
        if residency is None:
            rules = ResidencyRules.of_rollout(self._rollout, cuda=world.device.type == "cuda")
            residency = rules.actor(int(engine.zero_optimization_stage()), samples=samples)
        self._offloads_states = residency.visits("optimizer") or residency.visits("gradients")
        # with a larger policy lag several snapshots are open at a time, each with weights of its own
        self._keeps = residency.stays("inference weights") and self._rollout.policy_lag <= 1
        self._snapshot: GenerationEngine | None = None
        self.generation_world = world.split(self._rollout.tensor_parallel if samples else 1)
        """The ranks that generate together, from the same prompts."""
        self.weight_sync_seconds = 0.0
        """Time of the last weight sync, offloading and release of memory included, without the check."""
        self.weight_check_seconds = 0.0
        """Time of the check after it."""
        self.work = DecodeWork()
        """What decoding did on this rank in the last rollout."""
        self._host_states = OffloadedStates(engine, world.device)
        self._elements = ElementCheck(self.lm)
        dtype = next(self.lm.parameters()).dtype
        inference_dtype = DTYPES.get(self._rollout.dtype, dtype)
        quantization = self._rollout.quantization
        self._check = WeightCheck(world, max_logprob_diff, quantised=quantization is not None)
        self.max_logprob_diff = logprob_limit(
            max_logprob_diff, dtype, inference_dtype, quantised=quantization is not None
        )
        """Largest mean difference of log-probs between sampler and trainer, in nats, beyond which a run stops."""
        self.rounds_otherwise = rounds_otherwise(self._rollout, dtype)
        """Whether log-probs of the sampler, by whatever ranks sample, have other precision than those of training."""
        self._kept: _KeptBackend | None = None
        self._module_support: ModuleSupport | None = None
        self._inference_weights: InferenceWeights | None = None
        architecture = self._plan_inference_weights(inference_dtype) if samples else architecture_of(self.lm)
        self._samples = samples
        self._follow_routes(architecture)

    def _plan_inference_weights(self, dtype: torch.dtype) -> ModelDescription | None:
        """Plan them, and what needs them; none for a model that has none."""
        rollout = self._rollout
        if rollout.backend == "auto":
            self._inference_weights = plan_inference_weights(
                self.lm,
                [name for name, _ in base_parameters(self.lm)],
                world=self.generation_world,
                dtype=dtype,
                in_place=self._keeps,
                quantization=rollout.quantization,
            )
        if self._inference_weights is None and rollout.policy_lag:
            raise UserError(
                f"rollout.async_sampling copies the inference weights, {type(self.lm).__name__} has none: set "
                "--rollout.async_sampling null"
            )
        require(
            self._inference_weights is not None or rollout.partial is None,
            "rollout.partial continues completions with inference weights, "
            f"{type(self.lm).__name__} has none: leave it out",
        )
        return None if self._inference_weights is None else self._inference_weights.architecture

    def _follow_routes(self, architecture: ModelDescription | None) -> None:
        """Have the training forward compare its experts with recorded ones, or use these."""
        replays = self._rollout.routing_replay
        kind = None if architecture is None or not architecture.expert_layers else architecture.experts
        if kind is None:
            require(
                not replays,
                "rollout.routing_replay needs a mixture of experts with inference weights, "
                f"{type(self.lm).__name__} has none: leave it out",
            )
            return
        require(
            not replays or kind.weighs_any_choice,
            "rollout.routing_replay needs routers with a weight for every choice of experts, those of "
            f"{type(self.lm).__name__} are 0 for some: leave it out",
        )
        module: Any = self.module
        module.replay = RouterReplay(self.lm, experts=kind.count, replays=replays)

    @property
    def deepspeed_engine(self) -> DeepSpeedEngine:
        """See ModelEngine."""
        self._host_states.wait()
        return self._engine

    @property
    def groups(self) -> tuple[int, int | None]:
        """See SamplingEngine."""
        return groups_of(self.world, self.generation_world)

    @property
    def facts(self) -> EngineFacts:
        """See ModelEngine."""
        return replace(super().facts, max_logprob_diff=self.max_logprob_diff, rounds_otherwise=self.rounds_otherwise)

    @contextlib.contextmanager
    def inference(
        self, *, stop_token_ids: tuple[int, ...] | None = None, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> Iterator[GenerationEngine]:
        """Generate with the current weights. Every rank must enter, and the ranks of one `generation_world` must
        generate from the same prompts.

        Args:
            stop_token_ids: tokens that end every completion; none: the model's own EOS tokens.
            tokenizer: for stop strings.

        Raises:
            RuntimeError: when a sampler on other ranks generates.
        """
        if not self._samples:
            raise RuntimeError("an actor whose sampler has ranks of its own does not generate: use the sampler")
        stop = default_stop_token_ids(self.lm) if stop_token_ids is None else stop_token_ids
        was_training = self.module.training
        self.weight_sync_seconds = self.weight_check_seconds = 0.0
        start = time.perf_counter()
        with contextlib.ExitStack() as stack:
            if self._offloads_states:
                stack.enter_context(self._host_states.on_host())
            backend: GenerationBackend
            if self._inference_weights is not None:
                backend = self._synced_backend()
                backend.capture_in_runs()
            else:
                backend = stack.enter_context(self._module_backend())
            self.module.eval()
            generation = GenerationEngine(
                backend,
                stop_token_ids=stop,
                tokenizer=tokenizer,
                weight_version=self.weight_version,
                keeps_backend=self._kept is not None,
            )
            self.weight_sync_seconds += time.perf_counter() - start
            del backend
            try:
                yield generation
            finally:
                left = time.perf_counter()
                self.work = generation.work
                generation.close()
                self.module.train(was_training)
        self.weight_sync_seconds += time.perf_counter() - left

    def snapshot(
        self, *, stop_token_ids: tuple[int, ...], tokenizer: PreTrainedTokenizerBase | None = None
    ) -> GenerationEngine:
        """An engine with a copy of the current weights, for another thread while training changes them; every rank
        must call.

        With a policy lag of 1 the copy is kept: the next snapshot, or `inference` after this one has sampled, writes
        newer weights into it, and CUDA graphs, which hold its addresses, are captured once per batch size, while no
        thread samples. With a larger lag each snapshot has its own copy, and no CUDA graphs.

        Args:
            stop_token_ids: tokens that end every completion.
            tokenizer: for stop strings.

        Raises:
            RuntimeError: when an earlier snapshot with the same weights is not closed.
        """
        self.weight_sync_seconds = self.weight_check_seconds = 0.0
        start = time.perf_counter()
        if self._keeps:
            check_closed(self._snapshot)
            backend = self._synced_backend()
        else:
            backend = rollout_backend(self._build_decoder(views=False), self._rollout, cuda_graphs=False)
        self.weight_sync_seconds += time.perf_counter() - start
        backend.capture_between_runs()
        self._snapshot = GenerationEngine(
            backend,
            stop_token_ids=stop_token_ids,
            tokenizer=tokenizer,
            weight_version=self.weight_version,
            keeps_backend=self._keeps,
        )
        return self._snapshot

    @contextlib.contextmanager
    def other_weights(self) -> Iterator[None]:
        """While other weights than those of training are in place, under the same version: kept ones are synced."""
        self._force()
        try:
            yield
        finally:
            self._force()

    def _force(self) -> None:
        if self._kept is not None:
            self._kept = replace(self._kept, weight_version=-1)

    def _synced_backend(self) -> NativeBackend:
        """The backend of the current weights; synced only if they have changed, or were not kept."""
        kept = self._kept
        if kept is not None and kept.weight_version == self.weight_version:
            return kept.backend
        self._kept = None
        assert self._inference_weights is not None, "called for models with inference weights only"
        if kept is not None and not self._inference_weights.in_place:
            kept.backend.close()  # its weights are freed before newer ones are built
            kept = None
        decoder = self._build_decoder(views=not self._rollout.policy_lag)
        if kept is None:
            backend = rollout_backend(decoder, self._rollout)
        else:
            backend = kept.backend
            backend.sync_weights(decoder)
        if self._keeps:
            self._kept = _KeptBackend(self.weight_version, backend)
        return backend

    def _build_decoder(self, *, views: bool) -> Decoder:
        """The decoder of the current weights, checked; `views`: it may share the memory of training weights."""
        assert self._inference_weights is not None, "called for models with inference weights only"
        weights = full_weights(self.lm, bucket_elements=BUCKET_ELEMENTS)
        decoder = self._inference_weights.build(
            (weight.name, value, weight.is_persistent if views else weight.is_copy)
            for weight, value in self._elements(weights, seed=self.weight_version)
        )
        start = time.perf_counter()
        self._check(
            decoder,
            TrainingProbe(self, decoder.architecture.vocab_size),
            updates=self.weight_version,
            elements=self._elements.worst,
        )
        seconds = time.perf_counter() - start
        self.weight_check_seconds += seconds
        self.weight_sync_seconds -= seconds  # the caller times both
        return decoder

    @contextlib.contextmanager
    def _module_backend(self) -> Iterator[ModuleBackend]:
        """The Hugging Face module with all its weights gathered and adapters merged."""
        with contextlib.ExitStack() as stack:
            if has_partitions(self.lm):
                stack.enter_context(zero3_hooks_removed(self._engine))
                stack.enter_context(gathered(list(self.lm.parameters())))
            if has_lora(self.lm):
                stack.enter_context(lora_merged(self.lm))
            backend = ModuleBackend(self.lm, max_batch_rows=self._rollout.max_decode_rows, support=self._module_support)
            self._module_support = backend.support
            yield backend


class AbsentActor(AbsentEngine):
    """An actor on a rank that does not have it, and so does not sample."""

    def __init__(self, role: Role, world: World, facts: EngineFacts, *, tensor_parallel: int = 1) -> None:
        """Take the ranks of the actor, its facts, and how many ranks generate together."""
        super().__init__(role, world, facts)
        self.generation_world = world.split(tensor_parallel)
        self.work = DecodeWork()
        self.weight_sync_seconds = self.weight_check_seconds = 0.0
        self.max_logprob_diff, self.rounds_otherwise = facts.max_logprob_diff, facts.rounds_otherwise

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.world.device

    @property
    def groups(self) -> tuple[int, int | None]:
        """See SamplingEngine."""
        return groups_of(self.world, self.generation_world)

    @contextlib.contextmanager
    def inference(
        self, *, stop_token_ids: tuple[int, ...] | None = None, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> Iterator[None]:
        """See HybridEngine; there is no generation on this rank."""
        yield None

    def snapshot(self, *, stop_token_ids: tuple[int, ...], tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """See HybridEngine; there is no generation on this rank."""

    def other_weights(self) -> contextlib.AbstractContextManager[None]:
        """See HybridEngine."""
        return contextlib.nullcontext()
