"""What a step will need in memory, phase by phase, before it starts: no weights are loaded and no process is started.

What passes through a model is counted on shapes (models/shapes.py); what an engine holds follows DeepSpeed 0.19's
optimizers, read from the very JSON that the engine would get (engines/ds_config.py). Rows are taken at their full
length, and gradients as accumulating over micro-batches, so a phase is estimated at its worst.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from hybrid_rlhf.algorithms.generation_memory import decoded_rows, decoding_bytes, layout_bytes, slot_bytes
from hybrid_rlhf.configs.ppo import PPOConfig, frozen_zero
from hybrid_rlhf.configs.reward import RewardConfig
from hybrid_rlhf.configs.sections import LoopConfig, LoraConfig, OptimizerConfig, ZeroConfig
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.engines.ds_config import deepspeed_config, read_overrides
from hybrid_rlhf.engines.hybrid import BUCKET_ELEMENTS
from hybrid_rlhf.models.loading import DTYPES, Architecture, training_dtype
from hybrid_rlhf.models.shapes import Batch, ShapedModel, Shapes

AnyStep = SFTConfig | RewardConfig | PPOConfig
_FLOAT32 = 4
_ADAM = 8
"""Bytes of AdamW's two moments a weight."""
_GRADIENT_BUCKET = 500_000_000
"""Elements of gradients that an engine without ZeRO reduces at once (DeepSpeed's buffered_allreduce_fallback)."""


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
class Need:
    """Bytes on one rank."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    """Adam's moments and float32 master weights."""
    activations: float = 0.0
    layout: float = 0.0
    """Copies of weights for generation; views cost nothing."""
    cache: float = 0.0
    """Keys and values."""
    buffers: float = 0.0
    """The largest temporaries: chunks of logits, ZeRO's buckets and gathered weights, copies in the optimizer step."""
    host: float = 0.0
    """Offloaded; a GPU does not see it."""

    def __add__(self, other: Need) -> Need:
        return Need(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    @property
    def device(self) -> float:
        """All but what is on the host."""
        return sum(getattr(self, f.name) for f in fields(self)) - self.host


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
class _Engine:
    """What one engine takes."""

    model: ShapedModel
    held: Need
    """Always."""
    training: Need
    """Besides, while gradients accumulate."""
    bucket: float
    """Of a backward."""
    gathered: float
    """Of a forward."""
    step: float
    """Most that an optimizer step takes over the states."""
    movable: float
    """Of the held, what offload_states moves."""
    comes: Need = Need()
    """Besides, while it reads: weights that are elsewhere between uses."""

    def learning(self, batch: Batch) -> Need:
        """A micro-batch, or the step after it, whichever takes more; without what is held."""
        passage = self.model.passage(batch, learns=True)
        most = max(passage.peak + self.bucket + self.gathered, self.step)
        return self.training + Need(activations=passage.kept, buffers=most - passage.kept, host=passage.host)

    def reading(self, batch: Batch) -> Need:
        """A forward alone."""
        return self.comes + Need(buffers=self.model.passage(batch, learns=False).peak + self.gathered)

    def on_host(self) -> _Engine:
        """The engine with its weights in host memory between uses; under ZeRO-3 they are there already."""
        weights = self.held.weights
        return replace(self, held=replace(self.held, weights=0.0, host=self.held.host + weights),
                       comes=Need(weights=weights))  # fmt: skip


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
            return list(self._ppo(config))
        architecture: Architecture = "causal_lm" if isinstance(config, SFTConfig) else "scorer"
        engine = self._engine(config, config.model.path, architecture, config.zero, config.optimizer, config.lora)
        rows = -(-config.train.global_batch_size // self.machine.ranks)
        batch = micro_batch(config.train, rows, config.data.max_length, sides=2 if architecture == "scorer" else 1)
        name = "SFT training" if architecture == "causal_lm" else "reward training"
        return [Phase(name, engine.held + engine.learning(batch), self.machine)]

    def _ppo(self, config: PPOConfig) -> Iterator[Phase]:
        rollout, ranks = config.rollout, self.machine.ranks
        actor_path = config.actor.path or config.model.path
        critic_path = config.critic_start or actor_path
        reference_path = config.reference.path or actor_path
        actor = self._engine(
            config, actor_path, "causal_lm", config.actor.zero, config.actor.optimizer, config.actor.lora
        )
        critic = self._engine(
            config, critic_path, "scorer", config.critic.zero, config.critic.optimizer, config.critic.lora
        )
        if config.critic.share_base:
            own = critic.held.weights * critic.model.elements.trained / critic.model.elements.all
            critic = replace(critic, held=replace(critic.held, weights=own))
        zero = frozen_zero(config.critic.zero, offload=rollout.offload_frozen)
        readers = [self._engine(config, part.model, "scorer", zero, None, LoraConfig())
                   for part in config.reward.named_parts if part.model]  # fmt: skip
        own_reference = config.actor.lora.rank > 0 and reference_path == actor_path
        if not own_reference:
            zero = frozen_zero(config.actor.zero, offload=rollout.offload_frozen)
            readers.append(self._engine(config, reference_path, "causal_lm", zero, None, LoraConfig()))
        if rollout.offload_frozen:
            readers = [reader.on_host() for reader in readers]
        base = sum((engine.held for engine in (actor, critic, *readers)), Need())
        if config.ppo.ema_decay:
            shards = ranks if config.actor.zero.stage == 3 else 1
            base += Need(host=_FLOAT32 * actor.model.elements.trained / shards)
        generation, kept = self._generation(config, actor, base)
        if rollout.keep_weights:
            base += kept
        rows = -(-rollout.prompts_per_step * rollout.samples_per_prompt // (config.ppo.mini_batches * ranks))
        length = rollout.max_prompt_tokens + rollout.max_new_tokens
        batch = micro_batch(config.train, rows, length, head_tokens=rollout.max_new_tokens)
        reads = [*readers, critic, *([actor] if own_reference or not config.ppo.updates_once else [])]
        yield generation
        yield Phase("scoring", base + max((e.reading(batch) for e in reads), key=lambda n: n.device), self.machine)
        yield Phase("actor training", base + actor.learning(batch), self.machine)
        yield Phase("critic training", base + critic.learning(batch), self.machine)

    def _engine(
        self, config: AnyStep, path: str | None, architecture: Architecture, zero: ZeroConfig,
        optimizer: OptimizerConfig | None, lora: LoraConfig,
    ) -> _Engine:  # fmt: skip
        dtype = training_dtype(config.model, self.machine.device)
        source = self.starts.get(str(path), str(path))
        model = self.shapes(
            source, architecture, config=config.model, dtype=dtype, lora=None if optimizer is None else lora
        )
        overrides = read_overrides(config.deepspeed_config)
        json = deepspeed_config(zero=zero, dtype=dtype, optimizer=optimizer, overrides=overrides)
        return engine_need(model, json["zero_optimization"], dtype=dtype, ranks=self.machine.ranks)

    def _generation(self, config: PPOConfig, actor: _Engine, base: Need) -> tuple[Phase, Need]:
        """The phase, and what of it stays where the layout is kept."""
        rollout, device = config.rollout, self.machine.device
        dtype = DTYPES.get(rollout.dtype, training_dtype(config.model, device))
        stage = config.actor.zero.stage
        layout = layout_bytes(actor.model, rollout, stage=stage, dtype=dtype, device=device)
        gathers = stage == 3 and (self.machine.ranks > 1 or config.actor.zero.offload_parameters)
        build = 2 * actor.model.elements.largest * dtype.itemsize
        build += BUCKET_ELEMENTS * dtype.itemsize if gathers else 0
        if rollout.offload_states:
            base += Need(optimizer=-actor.movable, host=actor.movable)
        slot = slot_bytes(actor.model, rollout, dtype=dtype, device=device)
        room = self.machine.device_bytes - (base + Need(layout=layout)).device
        slots, wanted = decoded_rows(rollout, ranks=self.machine.ranks, room_bytes=room, slot=slot, device=device)
        cache = Need(cache=slots * slot)
        run = decoding_bytes(actor.model, rollout, slots=slots, dtype=dtype, device=device)
        note = "" if slots == wanted else f"{slots} of {wanted} completions at once"
        buffers = max(run, build - cache.cache)
        need = base + Need(layout=layout) + cache + Need(buffers=buffers)
        return Phase("generation", need, self.machine, note), Need(layout=layout) + cache


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


def engine_need(model: ShapedModel, zero: dict[str, Any], *, dtype: torch.dtype, ranks: int) -> _Engine:
    """What an engine takes under DeepSpeed 0.19 (measured on a CPU; the tests hold it to that).

    Args:
        model: its shape.
        zero: the section zero_optimization of its JSON.
        dtype: of the weights.
        ranks: that share the states.
    """
    e, low, stage = model.elements, dtype.itemsize, int(zero["stage"])
    trained = e.trained / (ranks if stage else 1)
    weights = low * e.all / (ranks if stage == 3 else 1)
    masters = _FLOAT32 if stage or low < _FLOAT32 else 0
    optimizer = (masters + _ADAM) * trained
    gradients = low * (trained if stage >= 2 else e.trained)
    bucket = low * float(zero.get("reduce_bucket_size", 5e8)) if stage and e.trained else 0.0
    lowered = _FLOAT32 if low < _FLOAT32 else 0
    if stage == 0:
        reduced = low * min(e.trained, _GRADIENT_BUCKET) if ranks > 1 else 0.0
        step = lowered * trained if lowered else reduced
    else:
        step = (low + lowered) * (min(trained, float(zero.get("sub_group_size", 1e9))) if stage == 3 else trained)
    held, training = Need(weights=weights, optimizer=optimizer), Need(gradients=gradients)
    offloads = "offload_optimizer" in zero and bool(e.trained)
    if stage == 3 and e.trained:  # one buffer of gradients and one of the bucket, for good
        held, training, bucket = replace(held, gradients=gradients, buffers=bucket), Need(), 0.0
    if offloads:
        # master weights and moments, float32 gradients, gradients as they came
        host = optimizer + (_FLOAT32 + low) * trained + 2 * _FLOAT32 * e.largest
        on_device = low * e.largest if stage < 3 else 0.0
        held = replace(held, optimizer=0.0, gradients=0.0, host=host, buffers=held.buffers + on_device)
        training, step = Need(gradients=gradients if stage == 1 else 0.0), 0.0
    gathered = 0.0
    if stage == 3 and (ranks > 1 or "offload_param" in zero):
        live = max(float(zero.get("stage3_max_live_parameters", 1e9)), e.largest)
        gathered = low * (min(e.all, live) + min(e.all, float(zero.get("stage3_prefetch_bucket_size", 5e7))))
    if "offload_param" in zero:
        held = replace(held, weights=0.0, host=held.host + weights)
    movable = 0.0 if offloads else (_ADAM if stage == 0 else masters + _ADAM) * trained
    return _Engine(model, held, training, bucket, gathered, step, movable)
