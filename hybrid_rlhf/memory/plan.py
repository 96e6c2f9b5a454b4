"""Memory of a step by phase, estimated before it starts, without loading weights or starting processes.

Activations are measured on shapes (memory/shapes.py). The states of an engine follow DeepSpeed 0.19's optimizers, read
from the JSON that the engine would get (engines/ds_config.py). The estimate is an upper bound: all rows have the
maximum length, and gradients accumulate over micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import psutil
import torch

from hybrid_rlhf.configs.preference import PreferenceStepConfig
from hybrid_rlhf.configs.reward import RewardConfig
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.model import LoraConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.configs.sections.training import LoopConfig, OptimizerConfig, ZeroConfig, frozen_zero
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.engines.ds_config import deepspeed_config, read_overrides
from hybrid_rlhf.engines.hybrid import BUCKET_ELEMENTS
from hybrid_rlhf.engines.residency.rules import ResidencyRules, RoleResidency
from hybrid_rlhf.engines.sampling_engine import rounds_otherwise
from hybrid_rlhf.memory.engine import FLOAT32, EngineMemory, MemoryUse, engine_memory
from hybrid_rlhf.memory.generation import cache_plan, decode_buffer_bytes, route_bytes
from hybrid_rlhf.memory.inference_weights import inference_weight_bytes
from hybrid_rlhf.memory.shapes import BatchShape, Shapes
from hybrid_rlhf.models.distillation import CHUNK_LOGITS, CHUNK_TOKENS
from hybrid_rlhf.models.pretrained.loading import DTYPES, Architecture, training_dtype
from hybrid_rlhf.runtime.placement import RolePlacement

AnyStep = SFTConfig | RewardConfig | PreferenceStepConfig | RLConfig
GPU_RESERVE_GIB = 2.0
"""Memory of a GPU that CUDA, its libraries and fragmentation take; an assumption."""


@dataclass(frozen=True)
class Device:
    """The machine, as one rank sees it."""

    device: torch.device
    ranks: int
    device_bytes: float
    """Memory of the rank's device; on a CPU its share of the free memory."""
    host_bytes: float | None = None
    """The rank's share of the host's free memory, where the host is not the device; none: not known."""
    ranks_per_host: int | None = None
    """None: all of them."""


def own_device(ranks: int, *, local: int) -> Device:
    """This machine, as one of so many ranks sees it, `local` of which share its host."""
    free = psutil.virtual_memory().available / local
    if not torch.cuda.is_available():
        return Device(torch.device("cpu"), ranks, free, ranks_per_host=local)
    total = torch.cuda.get_device_properties(0).total_memory
    return Device(torch.device("cuda"), ranks, total - GPU_RESERVE_GIB * 2**30, free, local)


@dataclass(frozen=True)
class PhaseMemory:
    """Memory of a phase of a step."""

    name: str
    need: MemoryUse
    machine: Device
    note: str = ""
    ranks: str = ""
    """Ranks that need it; empty: all."""

    @property
    def title(self) -> str:
        """The phase, and its ranks if it is not of all."""
        return f"{self.name} on {self.ranks}" if self.ranks else self.name

    @property
    def total(self) -> float:
        """Bytes that the device of the rank must have; a CPU is its own host."""
        return self.need.device + (self.need.host if self.machine.device.type == "cpu" else 0.0)

    @property
    def timed_as(self) -> str:
        """The timed phase that it is part of: the updates of actor and critic are one."""
        return self.name.split()[-1]

    @property
    def fits(self) -> bool:
        """Whether device and host have enough memory."""
        host = self.machine.host_bytes
        return self.total <= self.machine.device_bytes and (host is None or self.need.host <= host)


@dataclass(frozen=True)
class Planner:
    """Estimates steps on one machine."""

    machine: Device
    shapes: Shapes = field(default_factory=Shapes)
    starts: dict[str, str] = field(default_factory=dict)
    """Folders that an earlier step will write, each with an existing model of the same shape."""

    def phases(self, config: AnyStep) -> list[PhaseMemory]:
        """The phases of a step.

        Raises:
            UserError: when a model has no config that transformers can read, or a section does not fit it.
        """
        if isinstance(config, RLConfig):
            return list(self._on_policy(config))
        return list(self._one_engine(config))

    def _one_engine(self, config: SFTConfig | RewardConfig | PreferenceStepConfig) -> Iterator[PhaseMemory]:
        architecture: Architecture = "scorer" if isinstance(config, RewardConfig) else "causal_lm"
        engine = self._engine(config, config.model.path, architecture, config.zero, config.optimizer, config.lora)
        rows = -(-config.train.global_batch_size // self.machine.ranks)
        sides = 1 if isinstance(config, SFTConfig) else 2
        batch = micro_batch(config.train, rows, config.data.max_length, sides=sides)
        name = {SFTConfig: "SFT", RewardConfig: "reward"}.get(type(config), "preference") + " training"
        base, distillation = engine.held, MemoryUse()
        if isinstance(config, SFTConfig) and config.distill is not None:
            base += self._frozen(config, config.distill.teacher)
            # the gradient of the head is kept until backward; a chunk has logits of two models
            model = engine.model.config
            head = 0 if config.lora is not None else model.vocab_size * model.hidden_size
            distillation = MemoryUse(buffers=FLOAT32 * (head + CHUNK_LOGITS * CHUNK_TOKENS * model.vocab_size))
            if config.distill.on_policy_fraction:
                rollout = student_rollout(config, config.distill.sampling)
                yield self._generation(rollout, config, config.zero, engine, base)[0]
        if isinstance(config, PreferenceStepConfig) and config.reference is not None and config.holds_reference:
            base += self._frozen(config, config.reference.path or config.model.path)
        yield PhaseMemory(name, base + distillation + engine.training(batch), self.machine)

    def _frozen(self, config: SFTConfig | PreferenceStepConfig, path: str | None) -> MemoryUse:
        """The teacher of a distillation, or the reference of a preference run where it is a model of its own."""
        zero = frozen_zero(config.zero)
        return self._engine(config, path, "causal_lm", zero, None, None).held

    def _on_policy(self, config: RLConfig) -> Iterator[PhaseMemory]:
        rollout, ranks = config.rollout, self.machine.ranks
        actor_path = config.model.path
        actor = self._engine(
            config, actor_path, "causal_lm", config.actor.zero, config.actor.optimizer, config.actor.lora
        )
        critic = self._critic(config, actor_path)
        learners = [actor] + ([] if critic is None else [critic])
        readers = [
            self._reader(config, part.model, "scorer", config.critic_zero) for part in config.reward.named if part.model
        ]
        reference_path = config.reference.path or actor_path
        own_reference = config.reads_without_adapters(reference_path, actor_path)
        if config.uses_reference and not own_reference:
            readers.append(self._reader(config, reference_path, "causal_lm", config.actor.zero))
        base = sum((engine.held for engine in (*learners, *readers)), MemoryUse())
        if config.actor.ema_decay:
            shards = ranks if config.actor.zero.stage == 3 else 1
            base += MemoryUse(host=FLOAT32 * actor.model.elements.trained / shards)
        routes, replayed_routes = route_bytes(actor.model, rollout)
        base += MemoryUse(host=routes)
        generation, kept = self._generation(rollout, config, config.actor.zero, actor, base)
        if self._sampler(rollout, config.actor.zero.stage).stays("inference weights"):
            base += kept
        rows = -(-rollout.prompts_per_step * config.learned_per_prompt // (config.algorithm.mini_batches * ranks))
        length = rollout.max_prompt_tokens + rollout.sampling.max_new_tokens
        batch = micro_batch(config.train, rows, length, head_tokens=rollout.sampling.max_new_tokens)
        other = rollout.samples_older or rounds_otherwise(rollout, training_dtype(config.model, self.machine.device))
        reads_actor = (config.uses_reference and own_reference) or config.algorithm.actor_scores_rollout(
            other_sampler=other
        )
        reads = [e.forward(batch) for e in (*readers, *learners[1:], *([actor] if reads_actor else []))]
        yield generation
        yield PhaseMemory("scoring", base + max(reads, key=lambda n: n.device, default=MemoryUse()), self.machine)
        given = MemoryUse(buffers=replayed_routes * batch.rows * batch.length)
        yield PhaseMemory("actor training", base + given + actor.training(batch), self.machine)
        if critic is not None:
            yield PhaseMemory("critic training", base + critic.training(batch), self.machine)

    def _sampler(self, rollout: RolloutConfig, stage: int) -> RoleResidency:
        """Of an actor that samples."""
        return ResidencyRules.of_rollout(rollout, cuda=self.machine.device.type == "cuda").actor(stage)

    def _reader(
        self, config: RLConfig, path: str | None, architecture: Architecture, sibling: ZeroConfig
    ) -> EngineMemory:
        """A frozen model that shards like a trained one."""
        rules = ResidencyRules.of(config, cuda=self.machine.device.type == "cuda")
        place = RolePlacement((0,), frozen_zero(sibling).stage)
        residency = rules.frozen(place, sharded_on_host=sibling.offload_parameters)
        engine = self._engine(config, path, architecture, residency.frozen_zero(place.zero), None, None)
        return engine.with_weights_on_host() if residency.visits("weights") else engine

    def _critic(self, config: RLConfig, actor_path: str | None) -> EngineMemory | None:
        section = config.critic
        if section is None:
            return None
        path = config.critic_start or actor_path
        critic = self._engine(config, path, "scorer", config.critic_zero, section.optimizer, config.critic_lora)
        if not section.share_base:
            return critic
        own = critic.held.weights * critic.model.elements.trained / critic.model.elements.all
        return replace(critic, held=replace(critic.held, weights=own))

    def _engine(
        self,
        config: AnyStep,
        path: str | None,
        architecture: Architecture,
        zero: ZeroConfig,
        optimizer: OptimizerConfig | None,
        lora: LoraConfig | None,
    ) -> EngineMemory:
        dtype = training_dtype(config.model, self.machine.device)
        source = self.starts.get(str(path), str(path))
        model = self.shapes(
            source, architecture, config=config.model, dtype=dtype, lora=lora, learns=optimizer is not None
        )
        overrides = read_overrides(config.deepspeed_config)
        json = deepspeed_config(zero=zero, dtype=dtype, optimizer=optimizer, overrides=overrides)
        return engine_memory(model, json["zero_optimization"], dtype=dtype, ranks=self.machine.ranks)

    def _generation(
        self, rollout: RolloutConfig, config: AnyStep, zero: ZeroConfig, actor: EngineMemory, base: MemoryUse
    ) -> tuple[PhaseMemory, MemoryUse]:
        """The phase, and its part that remains during other phases if weights are kept or sampling is asynchronous."""
        device, stage = self.machine.device, zero.stage
        dtype = DTYPES.get(rollout.dtype, training_dtype(config.model, device))
        weights = inference_weight_bytes(actor.model, rollout, stage=stage, dtype=dtype, device=device)
        copy = inference_weight_bytes(actor.model, rollout, stage=stage, dtype=dtype, device=device, in_use=True)
        copies = rollout.policy_lag * copy
        gathers = stage == 3 and (self.machine.ranks > 1 or zero.offload_parameters)
        build: float = 2 * actor.model.elements.largest * dtype.itemsize
        build += min(BUCKET_ELEMENTS, actor.model.elements.all) * dtype.itemsize if gathers else 0
        if rollout.quantization is not None:  # all are there in their own dtype before the first is quantised
            whole = replace(rollout, quantization=None)
            build += inference_weight_bytes(actor.model, whole, stage=stage, dtype=dtype, device=device) - weights
        if self._sampler(rollout, stage).visits("optimizer"):
            base += MemoryUse(optimizer=-actor.movable, host=actor.movable)
        room = self.machine.device_bytes - (base + MemoryUse(inference=weights)).device
        plan = cache_plan(
            actor.model,
            rollout,
            ranks=self.machine.ranks,
            room_bytes=room,
            dtype=dtype,
            device=device,
            records_routes=isinstance(config, RLConfig),
        )
        cache = MemoryUse(cache=plan.cache_bytes)
        run = decode_buffer_bytes(actor.model, rollout, rows=plan.rows, dtype=dtype, device=device)
        note = ""
        if plan.full_length_rows < plan.wanted_rows:
            note = f"{plan.rows} of {plan.wanted_rows} completions at once, {plan.full_length_rows} at full length"
        buffers = max(run, build - cache.cache)
        need = base + MemoryUse(inference=weights) + cache + MemoryUse(buffers=buffers)
        kept = MemoryUse(inference=copies, buffers=run) if copies else MemoryUse(inference=weights)
        return PhaseMemory("generation", need + MemoryUse(inference=copies), self.machine, note), kept + cache


def student_rollout(config: SFTConfig, sampling: SamplingParams) -> RolloutConfig:
    """Sampling of on-policy distillation: one completion per row of an update, where a packed row counts as one."""
    longest = config.data.max_length
    new = max(1, min(sampling.max_new_tokens, longest - 1))
    return RolloutConfig(
        prompts_per_step=config.train.global_batch_size,
        max_prompt_tokens=max(1, longest - new),
        sampling=replace(sampling, max_new_tokens=new),
    )


def micro_batch(
    train: LoopConfig, rows: int, length: int, *, sides: int = 1, head_tokens: int | None = None
) -> BatchShape:
    """The largest micro-batch of a rank.

    Args:
        train: limits of micro-batches.
        rows: rows of an update on this rank.
        length: tokens of the longest row.
        sides: sequences per row; two where completions are compared.
        head_tokens: tokens per row whose log-prob is computed; none: all.
    """
    size = train.micro_batch_size
    at_once = train.micro_batch_tokens // (length * sides) if size is None else size
    sequences = max(1, min(at_once, rows)) * sides
    return BatchShape(sequences, length, sequences * (length if head_tokens is None else head_tokens))
