"""Jobs, machines and memory for tests of the planner, small enough for arithmetic by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from hybrid_rlhf.configs.algorithms import PPOConfig
from hybrid_rlhf.configs.rl import RewardSumConfig, RLConfig
from hybrid_rlhf.configs.sections.algorithm import CorrectionConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.training import LoopConfig, OptimizerConfig, ZeroConfig
from hybrid_rlhf.planning.device import Device
from hybrid_rlhf.planning.engine_memory import MemoryUse
from hybrid_rlhf.planning.job import ModelDimensions, RLJob, RoleJob, StepLengths
from hybrid_rlhf.planning.machine import DATA_SHEETS, Machine
from hybrid_rlhf.planning.phase_memory import PhaseMemory
from hybrid_rlhf.planning.placed_memory import PlanMemory
from hybrid_rlhf.planning.plans import SAMPLER, StepPlan, style_of
from hybrid_rlhf.runtime.placement import Placement, RolePlacement


def machine(**changes: Any) -> Machine:
    """A GPU whose links are slow, so that messages are seen; hosts are joined by a link a tenth as fast."""
    found = Machine(
        "synthetic",
        tflops=10.0,
        memory_gb_per_second=100.0,
        device_gib=80.0,
        link_gb_per_second=1.0,
        hosts_gb_per_second=0.1,
        host_link_gb_per_second=1.0,
        launch_microseconds=1.0,
        link_latency_microseconds=10.0,
        hosts_latency_microseconds=100.0,
        cards_per_host=1,
    )
    return replace(found, **changes)


def machine_file(folder: Path, *, device_gib: float) -> str:
    """A file with the data sheet of a GPU with so much memory."""
    content = asdict(DATA_SHEETS["h100"]) | {"name": "small", "device": "", "device_gib": device_gib}
    file = folder / f"gpu_{device_gib}.yaml"
    file.write_text(
        yaml.safe_dump(
            {key: value for key, value in content.items() if key not in ("cores", "measured", "network_source")}
        )
    )
    return str(file)


def cpu_machine() -> Machine:
    """The same on a CPU of two cores."""
    return machine(cores=2, measured=True)


def small_job(
    *,
    roles: Mapping[str, float] | None = None,
    lengths: StepLengths | None = None,
    prompts: int = 16,
    lag: int = 0,
    mini_batches: int = 2,
) -> RLJob:
    """PPO on models of a few layers.

    Args:
        roles: layers of each role; none: all four of PPO, with four.
        lengths: none: a long tail.
        prompts: completions of a rollout.
        lag: policy lag.
        mini_batches: updates of a rollout.
    """
    layers = roles or dict.fromkeys(("actor", "critic", "reference", "reward"), 4.0)
    rollout = RolloutConfig(prompts_per_step=prompts, max_prompt_tokens=64)
    if lag:
        rollout = replace(rollout, max_lag=lag, kv_cache_gib=1.0)
    config = RLConfig(
        algorithm=PPOConfig(mini_batches=mini_batches, correction=CorrectionConfig() if lag else None),
        reward=RewardSumConfig(components=["reward"]),
        rollout=rollout,
        train=LoopConfig(micro_batch_tokens=1024),
    )
    found = lengths or StepLengths(32.0, tuple(8 + 7 * place**2 % 199 for place in range(prompts)))
    jobs = {name: RoleJob(name, sized(count, name), None, ZeroConfig()) for name, count in layers.items()}
    jobs = {name: replace(job, optimizer=_learns(name)) for name, job in jobs.items()}
    return RLJob(config, jobs, found, torch.bfloat16, torch.bfloat16, torch.device("cuda"))


def sized(layers: float, name: str) -> ModelDimensions:
    """A model of so many layers of 2**20 weights."""
    weights = layers * 2**20 + 2**18
    vocabulary = 1024 if name in ("actor", "reference") else 0
    trained = weights if _learns(name) else 0.0
    return ModelDimensions(int(layers), 256, 256, 256, 4, float(2**20), vocabulary, weights, trained)


class FlatMemory:
    """Memory by rule: bytes of each role, divided by its ranks under ZeRO-3, as large as its layers."""

    def __init__(self, job: RLJob, device_bytes: float = 1e18) -> None:
        """Take the job and the memory of a rank."""
        self._job = job
        self.machine = Device(job.device, 1, device_bytes)

    def __call__(self, plan: StepPlan) -> PlanMemory:
        """See MemoryModel."""
        totals: dict[int, float] = {}
        for name, role in plan.roles.items():
            own = self._role(plan, name)
            for rank in role.ranks:
                totals[rank] = totals.get(rank, 0.0) + own
        alike = {total: [rank for rank in totals if totals[rank] == total] for total in {*totals.values()}}
        found = [
            PhaseMemory("all", MemoryUse(weights=total), self.machine, ranks=tuple(ranks))
            for total, ranks in alike.items()
        ]
        return PlanMemory(tuple(found), 10**6)

    def of_role(self, plan: StepPlan, name: str) -> tuple[float, float]:
        """Bytes of a role: held, and added by its passes."""
        return self._role(plan, name), 0.0

    def _role(self, plan: StepPlan, name: str) -> float:
        place = plan.roles[name]
        if name == SAMPLER:
            return 2 * self._job.actor.sizes.parameters / place.tensor_parallel
        size = self._job.roles[name].sizes.parameters * (16 if _learns(name) else 2)
        offloaded = plan.offload_optimizer and place.zero > 0 if _learns(name) else plan.offload_frozen
        return size / (len(place.ranks) if place.zero == 3 else 1) / (4 if offloaded else 1)


def flattening(names: list[str], ranks: int, *, zero: Mapping[str, Any], tensor_parallel: int = 1) -> Placement:
    """All roles on all ranks."""
    everywhere = tuple(range(ranks))
    return Placement(
        {
            name: RolePlacement(everywhere, zero.get(name, 0), tensor_parallel if name == "actor" else 1)
            for name in names
        },
        "flattening",
    )


def placed_at(ranks: Mapping[str, tuple[int, ...]], *, world: int, zero: int = 0) -> StepPlan:
    """A plan with the roles on these ranks."""
    roles = {name: RolePlacement(of_role, zero if name != SAMPLER else 0) for name, of_role in ranks.items()}
    return StepPlan(Placement(roles, style_of(ranks, world)))


def _learns(name: str) -> OptimizerConfig | None:
    return OptimizerConfig() if name in ("actor", "critic") else None
