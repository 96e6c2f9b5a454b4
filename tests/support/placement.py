"""Jobs, machines and memory for tests of the planner, small enough for arithmetic by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from hybrid_rlhf.configs.algorithms import PPOConfig
from hybrid_rlhf.configs.rl import RewardSumConfig, RLConfig
from hybrid_rlhf.configs.sections.algorithm import CorrectionConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.training import LoopConfig, OptimizerConfig, ZeroConfig
from hybrid_rlhf.planning.costs import Work
from hybrid_rlhf.planning.curves import Curve, MachineCurves, Surface
from hybrid_rlhf.planning.device import Cluster, Device
from hybrid_rlhf.planning.engine_memory import MemoryUse
from hybrid_rlhf.planning.job import ModelDimensions, RLJob, RoleJob, StepLengths
from hybrid_rlhf.planning.machines.datasheets import DATA_SHEETS, DataSheet
from hybrid_rlhf.planning.phase_memory import PhaseMemory
from hybrid_rlhf.planning.placed_memory import PlanMemory
from hybrid_rlhf.planning.plans import SAMPLER, StepPlan, style_of
from hybrid_rlhf.runtime.placement import Placement, RolePlacement

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "transfer")


def cost_line(rate: float, latency: float = 0.0) -> Curve:
    """latency + size / rate seconds."""
    return Curve.of((2.0**power, latency + 2.0**power / rate) for power in range(0, 60, 2))


def machine(*, bandwidth: float = 1e9, latency: float = 1e-5, device: str = "cuda", **changes: Any) -> MachineCurves:
    """A machine whose collectives take latency + bytes / bandwidth, between hosts ten times as long."""
    ranks = [2.0**power for power in range(1, 8)]
    weights = [2.0**power for power in range(8, 40, 2)]

    def product(rate: float) -> dict[str, Surface]:
        return {"bfloat16": Surface(tuple((size, cost_line(rate / size, 1e-6 + size / 1e12)) for size in weights))}

    def exchange(slower: float) -> dict[str, Surface]:
        return {
            kind: Surface(tuple((n, cost_line(bandwidth / slower, latency * slower * n)) for n in ranks))
            for kind in KINDS
        }

    found = MachineCurves(
        machine="synthetic",
        source="modelled",
        device="cuda",
        ranks_per_host=8,
        products=product(1e13),
        decode_products=product(1e12),
        attention=cost_line(1e12),
        layer=cost_line(1e10, 1e-5),
        layer_backward=cost_line(5e9, 2e-5),
        head=cost_line(1e10),
        cache_reads=cost_line(1e11),
        decode_layer=cost_line(1e9, 1e-5),
        decode_step=cost_line(1e6, 1e-4),
        copies=cost_line(1e11),
        host_link=cost_line(1e9),
        optimizer=cost_line(1e9),
        loop=cost_line(1e7, 1e-3),
        host_optimizer=cost_line(1e8),
        collectives=exchange(1.0),
        between_hosts=exchange(10.0),
        calls={"forward": 1e-4, "backward": 1e-4, "step": 1e-4, "generation": 1e-3},
        gathered=dict.fromkeys(("forward", "backward"), Curve.of([(1, 1e-5)])),
    )
    return replace(found, device=device, **changes)  # type: ignore[arg-type]


def machine_file(folder: Path, *, device_gib: float) -> str:
    """A file with the data sheet of a GPU with so much memory."""
    numbers = {each.name: getattr(DATA_SHEETS["h100"], each.name) for each in fields(DataSheet)}
    content = {**numbers, "name": "small", "device": "", "device_gib": device_gib}
    file = folder / f"gpu_{device_gib}.yaml"
    file.write_text(yaml.safe_dump(content))
    return str(file)


def cpu_machine() -> MachineCurves:
    """The same for float32 on a CPU."""
    found = machine()
    return replace(
        found,
        device="cpu",
        products={"float32": found.products["bfloat16"]},
        decode_products={"float32": found.decode_products["bfloat16"]},
    )


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


def placed_at(ranks: Mapping[str, tuple[int, ...]], *, world: int, lag: int = 0, zero: int = 0) -> StepPlan:
    """A plan with the roles on these ranks."""
    roles = {name: RolePlacement(of_role, zero if name != SAMPLER else 0) for name, of_role in ranks.items()}
    return StepPlan(Placement(roles, style_of(ranks, world)), policy_lag=lag)


class FixedCosts:
    """Costs by role and phase, whatever the ranks, for timelines by hand."""

    def __init__(self, job: RLJob, seconds: Mapping[str, float], *, ranks: int, curves: MachineCurves) -> None:
        """Take seconds of `sync`, `transfer` (ahead of the rollout), `sample`, `read ROLE`, `train ROLE` and `loop`;
        others take none."""
        self.job, self.curves, self.cluster = job, curves, Cluster(ranks, 8)
        self._seconds = seconds

    def weight_sync(self, plan: StepPlan) -> Work:
        """See Costs."""
        return Work(wire=self._seconds.get("sync", 0.0))

    def transfer_ahead(self, plan: StepPlan) -> Work | None:
        """See Costs."""
        return Work(wire=self._seconds["transfer"]) if "transfer" in self._seconds else None

    def sampling(self, plan: StepPlan, *, rows_at_once: int) -> list[Work]:
        """See Costs: group g takes so many seconds more than the first."""
        first, more = self._seconds.get("sample", 0.0), self._seconds.get("sample more", 0.0)
        return [Work(first + more * group) for group in range(len(plan.sampling_groups))]

    def read(self, role: RoleJob, plan: StepPlan) -> Work:
        """See Costs."""
        return Work(self._seconds.get(f"read {role.name}", 0.0))

    def updates(self, role: RoleJob, plan: StepPlan) -> Work:
        """See Costs."""
        return Work(self._seconds.get(f"train {role.name}", 0.0))

    def rows_to_read(self) -> Work:
        """See Costs."""
        return Work()

    def values_read(self) -> Work:
        """See Costs."""
        return Work()

    def rows_to_learn(self) -> Work:
        """See Costs."""
        return Work()

    def messages(self, phase: str) -> Work:
        """See Costs."""
        return Work()

    def loop(self, holders: int) -> Work:
        """See Costs."""
        return Work(self._seconds.get("loop", 0.0))


def _learns(name: str) -> OptimizerConfig | None:
    return OptimizerConfig() if name in ("actor", "critic") else None
