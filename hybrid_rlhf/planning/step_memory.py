"""Memory of a step by phase, estimated before it starts, without loading weights or starting processes.

Activations are measured on shapes (planning/shapes.py). The states of an engine follow DeepSpeed 0.19's optimizers,
read from the JSON that the engine would get (engines/ds_config.py). The estimate is an upper bound: all rows have the
maximum length, and gradients accumulate over micro-batches. A step of RL is planned under its placement.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from hybrid_rlhf.configs.preference import PreferenceStepConfig
from hybrid_rlhf.configs.reward import RewardConfig
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.placement import is_automatic
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.configs.sections.training import frozen_zero
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.engines.ds_config import read_overrides
from hybrid_rlhf.generation.batching.capacity import FREE_SHARE
from hybrid_rlhf.models.pretrained.loading import DTYPES, Architecture, training_dtype
from hybrid_rlhf.planning.device import Device
from hybrid_rlhf.planning.dotted_keys import with_settings
from hybrid_rlhf.planning.engine_memory import EngineMemory, MemoryUse, divergence_memory, engine_memory
from hybrid_rlhf.planning.generation_memory import GenerationMemory
from hybrid_rlhf.planning.job import read_job
from hybrid_rlhf.planning.phase_memory import AnyStep, PhaseMemory, micro_batch
from hybrid_rlhf.planning.placed_memory import MemoryModel
from hybrid_rlhf.planning.plans import StepPlan
from hybrid_rlhf.planning.shapes import shaped_model
from hybrid_rlhf.runtime.placement import Placement, placed_roles, resolve_placement

_LITTLE_GIB = 1e-6
_ABUNDANT_GIB = 1e6
"""Caches that hold one completion, as generation takes at least, and all of them."""
_GRANULE_GIB = 0.001


@dataclass(frozen=True)
class Planner:
    """Estimates steps on one machine."""

    machine: Device
    starts: dict[str, str] = field(default_factory=dict)
    """Folders that an earlier step will write, each with an existing model of the same shape."""

    def phases(self, config: AnyStep) -> list[PhaseMemory]:
        """The phases of a step; those of `placement: auto`, whose ranks are not known yet, under flattening.

        Raises:
            UserError: when a model has no config that transformers can read, a section does not fit it, or the
                placement does not fit the other settings or the number of ranks.
        """
        if not isinstance(config, RLConfig):
            return [replace(phase, ranks=self.machine.cluster.everyone) for phase in self._one_engine(config)]
        placement = None if is_automatic(config.placement) else config.placement
        resolved = resolve_placement(placement, placed_roles(config), ranks=self.machine.ranks)
        return self.memory(config, resolved)

    def memory(self, config: RLConfig, placement: Placement) -> list[PhaseMemory]:
        """The memory of each phase of a step of RL on each rank."""
        if lacks_kv_cache(config, placement):
            config = self.with_kv_cache(config, placement)
        job = read_job(config, self.machine.device, starts=self.starts)
        return list(MemoryModel(job, self.machine)(StepPlan.of(config, placement)).phases)

    def with_kv_cache(self, config: RLConfig, placement: Placement) -> RLConfig:
        """The config with a KV cache for sampling beside training: for all completions of a rollout at their maximum
        length, or the share of the free memory that generation takes where less is free; at least for one completion.
        """

        def sampling_phases(gib: float) -> list[PhaseMemory]:
            sized = with_settings(config, {"rollout.kv_cache_gib": gib})
            samples = {rank for group in placement.sampling_groups for rank in group}
            return [phase for phase in self.memory(sized, placement) if samples & {*phase.ranks}]

        least, most = (sampling_phases(gib) for gib in (_LITTLE_GIB, _ABUNDANT_GIB))
        one, all_rows = (max(phase.need.cache for phase in phases) for phases in (least, most))
        free = min(phase.machine.device_bytes - phase.total + phase.need.cache for phase in most)
        cache = max(one, min(all_rows, FREE_SHARE[self.machine.device.type] * free))
        gib = math.ceil(cache / 2**30 / _GRANULE_GIB) * _GRANULE_GIB
        return with_settings(config, {"rollout.kv_cache_gib": round(gib, 3)})

    def _one_engine(self, config: SFTConfig | RewardConfig | PreferenceStepConfig) -> Iterator[PhaseMemory]:
        machine = self.machine
        dtype = training_dtype(config.model, machine.device)
        overrides = read_overrides(config.deepspeed_config)
        architecture: Architecture = "scorer" if isinstance(config, RewardConfig) else "causal_lm"

        def engine(path: str | None, *, learns: bool) -> EngineMemory:
            source = self.starts.get(str(path), str(path))
            lora = config.lora if learns else None
            model = shaped_model(
                source,
                architecture,
                config=config.model,
                dtype=dtype,
                lora=lora,
                learns=learns,
                max_image_pixels=config.data.max_image_pixels,
            )
            zero = config.zero if learns else frozen_zero(config.zero)
            optimizer = config.optimizer if learns else None
            return engine_memory(model, zero, optimizer, dtype=dtype, ranks=machine.ranks, overrides=overrides)

        trained = engine(config.model.path, learns=True)
        rows = -(-config.train.global_batch_size // machine.ranks)
        sides = 1 if isinstance(config, SFTConfig) else 2
        length, device = config.data.max_length, machine.device.type
        batch = micro_batch(config.train, config.model, rows, length, device=device, sides=sides)
        name = {SFTConfig: "SFT", RewardConfig: "reward"}.get(type(config), "preference") + " training"
        base = trained.held
        distillation = MemoryUse()
        rollouts: list[RolloutConfig] = []
        if isinstance(config, SFTConfig) and config.distill is not None:
            base += engine(config.distill.teacher, learns=False).held
            distillation = divergence_memory(trained.model, trains_head=config.lora is None)
            if config.distill.on_policy_fraction:
                rollouts.append(student_rollout(config, config.distill.sampling))
        if isinstance(config, PreferenceStepConfig) and config.reference is not None and config.holds_reference:
            base += engine(config.reference.path or config.model.path, learns=False).held
        if not isinstance(config, RewardConfig) and (evaluation := config.train.evaluate_by_generation) is not None:
            rollouts.append(replace(evaluation.rollout, prompts_per_step=config.data.max_eval_rows))
        for rollout in rollouts:
            memory = GenerationMemory(trained.model, rollout, DTYPES.get(rollout.dtype, dtype), machine.device)
            zero = config.zero
            gathers = zero.stage == 3 and (machine.ranks > 1 or zero.offload_parameters)
            inference = memory.weights(stage=zero.stage, gathers=gathers)
            yield memory.sampling(base, inference, machine, ranks=machine.ranks, records_routes=False).phase
        need = base + distillation + trained.training(batch)
        yield PhaseMemory(name, need, machine, tower=trained.of_tower(batch))


def lacks_kv_cache(config: RLConfig, placement: Placement) -> bool:
    """True if a sampler on ranks of its own samples while the actor trains, with a KV cache whose size is not set."""
    rollout = config.rollout
    overlaps = rollout.max_lag > 0 and placement.separate_sampler
    return overlaps and rollout.kv_cache_gib is None and rollout.backend != "vllm"


def student_rollout(config: SFTConfig, sampling: SamplingParams) -> RolloutConfig:
    """Sampling of on-policy distillation: one completion per row of an update, where a packed row counts as one."""
    longest = config.data.max_length
    new = max(1, min(sampling.max_new_tokens, longest - 1))
    return RolloutConfig(
        prompts_per_step=config.train.global_batch_size,
        max_prompt_tokens=max(1, longest - new),
        sampling=replace(sampling, max_new_tokens=new),
    )
