"""The actor's engine: it trains under ZeRO, and inside `inference()` it generates.

On entry, a weight sync builds inference weights from the training weights, bucket by bucket: weights are gathered from
ZeRO-3's partitions, adapters are merged, and this rank's tensor-parallel part is selected and fused. Training weights
are only read, so training continues bit for bit. On exit, memory is released unless it is kept for the next rollout. A
model without inference weights generates through its Hugging Face module, with all weights gathered. DeepSpeed's module
hooks are then removed, since they would release and gather the weights of each layer again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.rules import require
from hybrid_rlhf.engines.deepspeed_internals import zero3_hooks_removed
from hybrid_rlhf.engines.engine import EngineFacts, EngineOptions, ModelEngine, Role
from hybrid_rlhf.engines.image_check import check_images
from hybrid_rlhf.engines.partition import BaseWeight, base_weights, full_weights, gathered, has_partitions
from hybrid_rlhf.engines.residency.offload import OffloadedStates
from hybrid_rlhf.engines.residency.rules import ResidencyRules, RoleResidency
from hybrid_rlhf.engines.role_model import AbsentEngine
from hybrid_rlhf.engines.sampling_engine import backend_maker, groups_of, rounds_otherwise
from hybrid_rlhf.engines.tower_copy import TowerCopy, TowerDescription
from hybrid_rlhf.engines.weight_check import ElementCheck, TrainingProbe, WeightCheck, logprob_limit
from hybrid_rlhf.generation.architecture.model_description import ModelDescription
from hybrid_rlhf.generation.backends.backend import GenerationBackend
from hybrid_rlhf.generation.backends.module import ModuleBackend, ModuleSupport
from hybrid_rlhf.generation.backends.native import NativeBackend
from hybrid_rlhf.generation.batching.requests import DecodeWork
from hybrid_rlhf.generation.engine import GenerationEngine, default_stop_token_ids
from hybrid_rlhf.generation.image_loading import ImageReader
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.generation.weights.inference_weights import InferenceWeights, architecture_of, plan_inference_weights
from hybrid_rlhf.models.expert_parallel import whole_experts
from hybrid_rlhf.models.families.vision import images_refused
from hybrid_rlhf.models.lora import has_lora, lora_merged
from hybrid_rlhf.models.pretrained.loading import DTYPES
from hybrid_rlhf.models.routers.replay import RouterReplay
from hybrid_rlhf.models.vision import ImageEncoder
from hybrid_rlhf.runtime.world import World

BUCKET_ELEMENTS = 2**26
"""Maximum number of elements gathered at once, unless a single weight is larger."""


class HybridEngine(ModelEngine):
    """The ModelEngine of an actor, which can also generate."""

    samples_while_training = False

    def __init__(
        self,
        role: Role,
        engine: DeepSpeedEngine,
        world: World,
        options: EngineOptions,
        *,
        rollout: RolloutConfig | None = None,
        max_logprob_diff: float | None = None,
        weight_check_every: int = 1,
        samples: bool = True,
        has_images: bool = True,
        residency: RoleResidency | None = None,
    ) -> None:
        """Wrap a DeepSpeed engine. Every rank must make this call.

        Args:
            role: name of the role.
            engine: the DeepSpeed engine of the actor.
            world: the ranks that train it.
            options: as in ModelEngine.
            rollout: settings of generation; none: the defaults.
            max_logprob_diff: faults.max_logprob_diff of the config.
            weight_check_every: faults.weight_check_every of the config.
            samples: the engine generates; false: only a sampler on other ranks does (engines/separate/), and this
                engine has no inference weights.
            has_images: prompts may have images; false: a rank keeps no tower of a model whose weights are partitioned.
            residency: location of its memory in each phase; none: as set in the rollout section.

        Raises:
            UserError: when tensor_parallel, quantization, routing_replay or max_lag needs inference
                weights and the model has none, or its experts cannot be replayed.
        """
        super().__init__(role, engine, world, options)
        self._rollout = rollout or RolloutConfig()
        if residency is None:
            rules = ResidencyRules.of_rollout(self._rollout, cuda=world.device.type == "cuda")
            residency = rules.actor(int(engine.zero_optimization_stage()), samples=samples)
        offloads = residency.visits("optimizer") or residency.visits("gradients")
        self._host_states = OffloadedStates(engine, world.device) if offloads else None
        self._keeps = residency.stays("inference weights")
        self._make_backend = backend_maker(self._rollout)
        together = self._rollout.tensor_parallel if samples else 1
        self.generation_world = world.split(together, own=self._rollout.max_lag > 0)
        """Tensor-parallel ranks that generate together, from the same prompts."""
        self.groups = groups_of(world, self.generation_world)
        """Number of tensor-parallel groups, and the index of this rank's; None: it is in none."""
        self.weight_sync_seconds = 0.0
        """Time of the last weight sync, including offloading and release of memory, without the check."""
        self.weight_check_seconds = 0.0
        """Time of the check after the last weight sync."""
        self.work = DecodeWork()
        """Decoding work of this rank in the last rollout."""
        self._weights = base_weights(self.lm)
        """The weights that a sync reads."""
        self._elements = ElementCheck(self._weights)
        dtype = next(self.lm.parameters()).dtype
        inference_dtype = DTYPES.get(self._rollout.dtype, dtype)
        quantization = self._rollout.quantization
        self._check = WeightCheck(world, max_logprob_diff, quantised=quantization is not None, every=weight_check_every)
        self.max_logprob_diff = logprob_limit(
            max_logprob_diff, dtype, inference_dtype, quantised=quantization is not None
        )
        """Limit of the mean difference of log-probs between sampler and trainer, in nats, beyond which a run stops."""
        self.rounds_otherwise = rounds_otherwise(self._rollout, dtype)
        """True if log-probs are computed with a different precision in sampling than in training, on any ranks."""
        self._kept: NativeBackend | None = None
        """Inference weights, KV cache and CUDA graphs that stay in memory between rollouts."""
        self._kept_version = -1
        """Version of the training weights at the last sync; -1 forces the next sync."""
        self._module_support: ModuleSupport | None = None
        self._inference_weights: InferenceWeights | None = None
        architecture = self._plan_inference_weights(inference_dtype) if samples else architecture_of(self.lm)
        self._samples = samples
        self._tower: TowerCopy | None = None
        """The tower that reads the images of prompts, where training has a part of its weights on this rank."""
        if samples and has_images and has_partitions(self.lm) and (tower := TowerDescription.of(self.lm)) is not None:
            self._tower = TowerCopy(tower, self.device)
        self._follow_routes(architecture)

    def _plan_inference_weights(self, dtype: torch.dtype) -> ModelDescription | None:
        """Plan inference weights and check the settings that need them; returns the model's description, None without
        them."""
        rollout = self._rollout
        if rollout.backend == "auto":
            self._inference_weights = plan_inference_weights(
                self.lm,
                [weight.name for weight in self._weights],
                world=self.generation_world,
                dtype=dtype,
                in_place=self._keeps,
                quantization=rollout.quantization,
            )
        require(
            self._inference_weights is not None or not rollout.max_lag,
            f"rollout.max_lag continues completions with inference weights, {type(self.lm).__name__} has none: leave "
            "it out",
        )
        return None if self._inference_weights is None else self._inference_weights.architecture

    def _follow_routes(self, architecture: ModelDescription | None) -> None:
        """Set up the training forward to compare its experts with recorded ones, or to use the recorded ones."""
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
        """The DeepSpeed engine, after offloaded states have returned to the device."""
        if self._host_states is not None:
            self._host_states.wait()
        return self._engine

    @property
    def facts(self) -> EngineFacts:
        """Properties of the model for ranks that do not have it."""
        return replace(super().facts, max_logprob_diff=self.max_logprob_diff, rounds_otherwise=self.rounds_otherwise)

    @contextlib.contextmanager
    def inference(
        self, *, stop_token_ids: tuple[int, ...] | None = None, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> Iterator[GenerationEngine]:
        """Return a context in which the actor generates with its current weights.

        Every rank must enter, and the ranks of one `generation_world` must generate from the same prompts.

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
            if self._host_states is not None:
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
                image_reader=lambda: ImageReader(self.images.loader, self._image_encoder()),
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

    def _with_tower(self, weights: Iterator[BaseWeight]) -> Iterator[BaseWeight]:
        """Yield gathered weights, and copy those of the tower where there is a copy."""
        for weight in weights:
            if self._tower is not None and weight.name in self._tower.changes:
                self._tower.take(weight.name, weight.merged())
            yield weight

    def _image_encoder(self) -> ImageEncoder:
        """The tower of the training weights, or its copy."""
        lm = self.lm if self._tower is None else self._tower.lm
        return ImageEncoder(lm, device=self.device, cache=self.images.cache)

    def _has_read_images(self) -> bool:
        """True if a rank has read an image. Every rank calls."""
        if images_refused(self.lm.config) is not None:
            return False
        return any(self.world.all_gather_objects("loader" in vars(self.images)))

    @contextlib.contextmanager
    def other_weights(self) -> Iterator[None]:
        """Context in which the model temporarily has other weights under the same version; they are synced on use."""
        self._kept_version = -1
        try:
            yield
        finally:
            self._kept_version = -1

    def _synced_backend(self) -> NativeBackend:
        """Return a backend with the current weights; syncs only if they have changed or were not kept."""
        backend = self._kept
        if backend is not None and self._kept_version == self.weight_version:
            return backend
        self._kept = None
        assert self._inference_weights is not None, "called for models with inference weights only"
        if backend is not None and not self._inference_weights.in_place:
            backend.close()  # free its weights before newer ones are built
            backend = None
        decoder = self._build_decoder()
        if backend is None:
            backend = self._make_backend(decoder)
        else:
            backend.sync_weights(decoder)
        if self._keeps:
            self._kept = backend
            self._kept_version = self.weight_version
        return backend

    def _build_decoder(self) -> Decoder:
        """Build a decoder with the current weights, and check it if that is due; it may share memory with the training
        weights."""
        assert self._inference_weights is not None, "called for models with inference weights only"
        checked = self._check.is_due()
        weights = self._with_tower(full_weights(self._weights, bucket_elements=BUCKET_ELEMENTS))
        unchecked = ((weight, weight.sampled()) for weight in weights)
        values = self._elements(weights, seed=self.weight_version) if checked else unchecked
        decoder = self._inference_weights.build((weight.name, value, weight.is_persistent) for weight, value in values)
        if not checked:
            return decoder
        start = time.perf_counter()
        self._check(
            decoder,
            TrainingProbe(self, decoder.architecture.vocab_size),
            updates=self.weight_version,
            elements=self._elements.worst,
        )
        if self._has_read_images():
            limit, updates = self._check.limit, self.weight_version
            check_images(decoder, self, self._image_encoder(), limit=limit, updates=updates)
        seconds = time.perf_counter() - start
        self.weight_check_seconds += seconds
        self.weight_sync_seconds -= seconds  # the caller measures both
        return decoder

    @contextlib.contextmanager
    def _module_backend(self) -> Iterator[ModuleBackend]:
        """Context with a backend of the Hugging Face module, with all weights gathered and adapters merged."""
        with contextlib.ExitStack() as stack:
            if has_partitions(self.lm):
                stack.enter_context(zero3_hooks_removed(self._engine))
                stack.enter_context(gathered(list(self.lm.parameters())))
            stack.enter_context(whole_experts(self.lm))
            if has_lora(self.lm):
                stack.enter_context(lora_merged(self.lm))
            backend = ModuleBackend(self.lm, max_batch_rows=self._rollout.max_decode_rows, support=self._module_support)
            self._module_support = backend.module.support
            yield backend


class AbsentActor(AbsentEngine):
    """Placeholder for the actor on a rank that does not have it, and does not sample."""

    samples_while_training = False

    def __init__(self, world: World, facts: EngineFacts, *, tensor_parallel: int, own: bool) -> None:
        """Args: ranks and facts of the actor, the number of ranks that generate together, and `own` of their groups."""
        super().__init__("actor", world, facts)
        self.generation_world = world.split(tensor_parallel, own=own)
        self.groups = groups_of(world, self.generation_world)
        """Number of tensor-parallel groups, and the index of this rank's; None: it is in none."""
        self.work = DecodeWork()
        self.weight_sync_seconds = self.weight_check_seconds = 0.0
        self.max_logprob_diff = facts.max_logprob_diff
        self.rounds_otherwise = facts.rounds_otherwise

    @contextlib.contextmanager
    def inference(
        self, *, stop_token_ids: tuple[int, ...] | None = None, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> Iterator[None]:
        """Return a context of None: this rank does not generate."""
        yield None

    def other_weights(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing: this rank has no weights."""
        return contextlib.nullcontext()
