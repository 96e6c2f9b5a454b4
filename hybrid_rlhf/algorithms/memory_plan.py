"""What a step will need in memory, phase by phase, before it starts: no weights are loaded and no process is started.

What passes through a model is counted on shapes (models/shapes.py); what an engine holds follows DeepSpeed 0.19's
optimizers, read from the very JSON that the engine would get (engines/ds_config.py). Rows are taken at their full
length, and gradients as accumulating over micro-batches, so a phase is estimated at its worst.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from hybrid_rlhf.algorithms.engine_memory import FLOAT32, EngineMemory, Need, engine_need
from hybrid_rlhf.algorithms.generation_memory import decoded_rows, decoding_bytes, layout_bytes, slot_bytes
from hybrid_rlhf.configs.ppo import PPOConfig, frozen_zero
from hybrid_rlhf.configs.preference import PreferenceStepConfig
from hybrid_rlhf.configs.reward import RewardConfig
from hybrid_rlhf.configs.rollout import RolloutConfig
from hybrid_rlhf.configs.sections import LoopConfig, LoraConfig, OptimizerConfig, ZeroConfig
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.engines.ds_config import deepspeed_config, read_overrides
from hybrid_rlhf.engines.hybrid import BUCKET_ELEMENTS
from hybrid_rlhf.models.distillation import CHUNK_LOGITS, CHUNK_TOKENS
from hybrid_rlhf.models.loading import DTYPES, Architecture, training_dtype
from hybrid_rlhf.models.shapes import Batch, Shapes

AnyStep = SFTConfig | RewardConfig | PreferenceStepConfig | PPOConfig


@dataclass(frozen=True)
class Machine:
    """What a rank runs on."""

    device: torch.device
    ranks: int
    device_bytes: float
    """Memory of a rank's device; on a CPU its share of what is free."""
    host_bytes: float | None = None
    """A rank's share of the host's free memory, where it is not the device; none: not known."""


@dataclass(frozen=True)
class Phase:
    """A phase of a step."""

    name: str
    need: Need
    machine: Machine
    note: str = ""

    @property
    def total(self) -> float:
        """Bytes that the rank's device must have; a CPU is its own host."""
        return self.need.device + (self.need.host if self.machine.device.type == "cpu" else 0.0)

    @property
    def fits(self) -> bool:
        """Whether device and host have them."""
        host = self.machine.host_bytes
        return self.total <= self.machine.device_bytes and (host is None or self.need.host <= host)


@dataclass(frozen=True)
class Planner:
    """Estimates steps on one machine."""

    machine: Machine
    shapes: Shapes = field(default_factory=Shapes)
    starts: dict[str, str] = field(default_factory=dict)
    """Folders that an earlier step will write, each with a model of the shape that will be in it."""

    def phases(self, config: AnyStep) -> list[Phase]:
        """The phases of a step.

        Raises:
            UserError: when a model has no config that transformers knows, or a section does not fit.
        """
        if isinstance(config, PPOConfig):
            return list(self._on_policy(config))
        return list(self._one_engine(config))

    def _one_engine(self, config: SFTConfig | RewardConfig | PreferenceStepConfig) -> Iterator[Phase]:
        architecture: Architecture = "scorer" if isinstance(config, RewardConfig) else "causal_lm"
        engine = self._engine(config, config.model.path, architecture, config.zero, config.optimizer, config.lora)
        rows = -(-config.train.global_batch_size // self.machine.ranks)
        sides = 1 if isinstance(config, SFTConfig) else 2
        batch = micro_batch(config.train, rows, config.data.max_length, sides=sides)
        name = {SFTConfig: "SFT", RewardConfig: "reward"}.get(type(config), "preference") + " training"
        base, lesson = engine.held, Need()
        if isinstance(config, SFTConfig) and config.distill.teacher is not None:
            base += self._frozen(config, config.distill.teacher)
            # the gradient of the head waits for backward; a chunk's logits are those of two models
            model = engine.model.config
            head = 0 if config.lora.rank else model.vocab_size * model.hidden_size
            lesson = Need(buffers=FLOAT32 * (head + CHUNK_LOGITS * CHUNK_TOKENS * model.vocab_size))
            if config.distill.on_policy_fraction:
                yield self._generation(sampled_answers(config), config, config.zero, engine, base)[0]
        if isinstance(config, PreferenceStepConfig) and config.holds_reference:
            base += self._frozen(config, config.reference.path or config.model.path)
        yield Phase(name, base + lesson + engine.learning(batch), self.machine)

    def _frozen(self, config: SFTConfig | PreferenceStepConfig, path: str | None) -> Need:
        """A teacher beside a student, or a reference beside the actor of a preference run, with adapters its own."""
        zero = frozen_zero(config.zero, offload=False)
        return self._engine(config, path, "causal_lm", zero, None, LoraConfig()).held

    def _on_policy(self, config: PPOConfig) -> Iterator[Phase]:
        rollout, ranks = config.rollout, self.machine.ranks
        actor_path = config.actor.path or config.model.path
        actor = self._engine(
            config, actor_path, "causal_lm", config.actor.zero, config.actor.optimizer, config.actor.lora
        )
        critic = self._critic(config, actor_path)
        learners = [actor] + ([] if critic is None else [critic])
        zero = frozen_zero(config.reward_sibling.zero, offload=rollout.offload_frozen)
        readers = [self._engine(config, part.model, "scorer", zero, None, LoraConfig())
                   for part in config.reward.named_parts if part.model]  # fmt: skip
        reference_path = config.reference.path or actor_path
        own_reference = config.reads_without_adapters(reference_path, actor_path)
        if config.uses_reference and not own_reference:
            zero = frozen_zero(config.actor.zero, offload=rollout.offload_frozen)
            readers.append(self._engine(config, reference_path, "causal_lm", zero, None, LoraConfig()))
        if rollout.offload_frozen:
            readers = [reader.on_host() for reader in readers]
        base = sum((engine.held for engine in (*learners, *readers)), Need())
        if config.ppo.ema_decay:
            shards = ranks if config.actor.zero.stage == 3 else 1
            base += Need(host=FLOAT32 * actor.model.elements.trained / shards)
        generation, kept = self._generation(rollout, config, config.actor.zero, actor, base)
        if rollout.keep_weights is True or rollout.max_staleness:
            base += kept
        rows = -(-rollout.prompts_per_step * config.learned_per_prompt // (config.ppo.mini_batches * ranks))
        length = rollout.max_prompt_tokens + rollout.max_new_tokens
        batch = micro_batch(config.train, rows, length, head_tokens=rollout.max_new_tokens)
        reads_actor = (
            config.uses_reference and (own_reference or rollout.max_staleness) or config.ppo.reads_old_logprobs
        )
        reads = [e.reading(batch) for e in (*readers, *learners[1:], *([actor] if reads_actor else []))]
        yield generation
        yield Phase("scoring", base + max(reads, key=lambda n: n.device, default=Need()), self.machine)
        yield Phase("actor training", base + actor.learning(batch), self.machine)
        if critic is not None:
            yield Phase("critic training", base + critic.learning(batch), self.machine)

    def _critic(self, config: PPOConfig, actor_path: str | None) -> EngineMemory | None:
        if not config.traits.critic:
            return None
        section = config.critic
        path = config.critic_start or actor_path
        critic = self._engine(config, path, "scorer", section.zero, section.optimizer, section.lora)
        if not section.share_base:
            return critic
        own = critic.held.weights * critic.model.elements.trained / critic.model.elements.all
        return replace(critic, held=replace(critic.held, weights=own))

    def _engine(
        self, config: AnyStep, path: str | None, architecture: Architecture, zero: ZeroConfig,
        optimizer: OptimizerConfig | None, lora: LoraConfig,
    ) -> EngineMemory:  # fmt: skip
        dtype = training_dtype(config.model, self.machine.device)
        source = self.starts.get(str(path), str(path))
        model = self.shapes(
            source, architecture, config=config.model, dtype=dtype, lora=None if optimizer is None else lora
        )
        overrides = read_overrides(config.deepspeed_config)
        json = deepspeed_config(zero=zero, dtype=dtype, optimizer=optimizer, overrides=overrides)
        return engine_need(model, json["zero_optimization"], dtype=dtype, ranks=self.machine.ranks)

    def _generation(
        self, rollout: RolloutConfig, config: AnyStep, zero: ZeroConfig, actor: EngineMemory, base: Need
    ) -> tuple[Phase, Need]:
        """The phase, and what of it stays where the layout is kept, or used beside the other phases."""
        device, stage = self.machine.device, zero.stage
        dtype = DTYPES.get(rollout.dtype, training_dtype(config.model, device))
        layout = layout_bytes(actor.model, rollout, stage=stage, dtype=dtype, device=device)
        copy = layout_bytes(actor.model, rollout, stage=stage, dtype=dtype, device=device, in_use=True)
        copies = rollout.max_staleness * copy
        gathers = stage == 3 and (self.machine.ranks > 1 or zero.offload_parameters)
        build = 2 * actor.model.elements.largest * dtype.itemsize
        build += BUCKET_ELEMENTS * dtype.itemsize if gathers else 0
        if rollout.offload_states:
            base += Need(optimizer=-actor.movable, host=actor.movable)
        slot = slot_bytes(actor.model, rollout, dtype=dtype, device=device)
        room = self.machine.device_bytes - (base + Need(layout=layout)).device
        slots, wanted = decoded_rows(
            actor.model, rollout, ranks=self.machine.ranks, room_bytes=room, dtype=dtype, device=device
        )
        cache = Need(cache=slots * slot)
        run = decoding_bytes(actor.model, rollout, slots=slots, dtype=dtype, device=device)
        note = "" if slots == wanted else f"{slots} of {wanted} completions at once"
        buffers = max(run, build - cache.cache)
        need = base + Need(layout=layout) + cache + Need(buffers=buffers)
        kept = Need(layout=copies, buffers=run) if copies else Need(layout=layout)
        return Phase("generation", need + Need(layout=copies), self.machine, note), kept + cache


def sampled_answers(config: SFTConfig) -> RolloutConfig:
    """How a student answers in on-policy distillation: once for each row of an update, a packed row taken as one."""
    longest = config.data.max_length
    new = max(1, min(config.distill.max_new_tokens, longest - 1))
    return RolloutConfig(
        prompts_per_step=config.train.global_batch_size, max_prompt_tokens=max(1, longest - new), max_new_tokens=new,
        temperature=config.distill.sampling_temperature,
    )  # fmt: skip


def micro_batch(train: LoopConfig, rows: int, length: int, *, sides: int = 1, head_tokens: int | None = None) -> Batch:
    """The largest micro-batch of a rank.

    Args:
        train: its limits.
        rows: of an update, on this rank.
        length: tokens of the longest row.
        sides: sequences of a row; two where answers are compared.
        head_tokens: of a row, those whose log-prob is wanted; none: all.
    """
    size = train.micro_batch_size
    at_once = train.micro_batch_tokens // (length * sides) if size is None else size
    sequences = max(1, min(at_once, rows)) * sides
    return Batch(sequences, length, sequences * (length if head_tokens is None else head_tokens))
