"""A plan: the placement of the roles, and the other settings that a planner chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.placement import RolePlacements, RoleRanks
from hybrid_rlhf.configs.sections.training import ZeroConfig
from hybrid_rlhf.engines.residency.rules import ResidencyRules, RoleResidency
from hybrid_rlhf.planning.dotted_keys import setting
from hybrid_rlhf.planning.job import RLJob
from hybrid_rlhf.runtime.placement import Placement, RolePlacement

LEARNERS = ("actor", "critic")
SAMPLER = "sampler"


@dataclass(frozen=True)
class StepPlan:
    """How an RL step runs."""

    placement: Placement
    offload_frozen: bool = False
    """rollout.offload_frozen."""
    offload_states: bool = False
    """rollout.offload_states; not with a separate sampler, whose ranks hold no states of the actor."""
    offload_optimizer: bool = False
    """zero.offload_optimizer of the learners under ZeRO 1 to 3."""
    micro_batch_tokens: int | None = None
    """train.micro_batch_tokens; None: as configured."""

    @classmethod
    def of(cls, config: RLConfig, placement: Placement) -> StepPlan:
        """The plan of a config with its resolved placement."""
        rollout = config.rollout
        zero = config.actor.zero
        on_host = zero.offload_optimizer and (config.critic is None or config.critic_zero.offload_optimizer)
        return cls(placement, rollout.offload_frozen, rollout.offload_states, on_host)

    @property
    def roles(self) -> Mapping[str, RolePlacement]:
        """Ranks and parallelism of each role."""
        return self.placement.roles

    @property
    def sampling(self) -> RolePlacement:
        """The ranks that sample: the sampler's, or the actor's."""
        return self.placement.sampler

    @property
    def separate(self) -> bool:
        """True if a sampler has ranks of its own."""
        return self.placement.separate_sampler

    @property
    def sampler(self) -> str:
        """Name of the role that samples."""
        return SAMPLER if self.separate else "actor"

    def overlaps(self, job: RLJob) -> bool:
        """True if the next rollout is sampled while the learners train."""
        return self.separate and job.config.rollout.overlap_steps > 0

    def offloads_optimizer(self, role: str, zero: ZeroConfig) -> bool:
        """True if the optimizer states of a learner are on the host, by the plan or by its own section."""
        return (self.offload_optimizer or zero.offload_optimizer) and self.roles[role].zero > 0

    def residency(self, job: RLJob) -> dict[str, RoleResidency]:
        """Where the memory of each role is in each phase."""
        rules = replace(
            ResidencyRules.of(job.config, cuda=job.device.type == "cuda"),
            offload_frozen=self.offload_frozen,
            offload_states=self.offload_states,
            optimizers_on_host=[role.name for role in job.learners if self.offloads_optimizer(role.name, role.zero)],
        )
        return rules.roles(self.placement)

    @property
    def offloads(self) -> bool:
        """True if the plan offloads anything."""
        return self.offload_frozen or self.offload_states or self.offload_optimizer

    def placement_setting(self) -> RolePlacements:
        """The ranks as the key `placement` of the RL config."""
        roles: dict[str, RoleRanks] = {}
        for name, role in self.roles.items():
            if name == SAMPLER:
                roles[name] = RoleRanks(role.ranks, tensor_parallel=role.tensor_parallel)
            else:
                roles[name] = RoleRanks(role.ranks, role.zero)
        return RolePlacements("separation" if self.separate else "flattening", roles)

    def settings(self, config: RLConfig) -> dict[str, Any]:
        """Settings other than the placement that a config must change to run as planned."""
        found: dict[str, Any] = {"rollout.tensor_parallel": 1 if self.separate else self.sampling.tensor_parallel}
        found |= {f"rollout.{key}": getattr(self, key) for key in ("offload_frozen", "offload_states")}
        if self.micro_batch_tokens is not None:
            found["train.micro_batch_tokens"] = self.micro_batch_tokens
        if self.offload_optimizer:
            sections = {"actor.zero": config.actor.zero}
            if config.critic is not None and config.critic.zero is not None:
                sections["critic.zero"] = config.critic.zero
            for name, section in sections.items():
                if section.stage == 0:  # the rules of the section want one, though the placement has its own
                    found[f"{name}.stage"] = max(2, self.roles["actor"].zero)
                found[f"{name}.offload_optimizer"] = True
        return {key: value for key, value in found.items() if setting(config, key) != value}


def style_of(roles: Mapping[str, tuple[int, ...]], ranks: int) -> str:
    """The style of a placement by the ranks of its roles.

    flattening: all roles on all ranks. separation: the sampler shares no rank with actor and critic. interleaving:
    actor and critic on all ranks, others on parts. hybrid: any other.
    """
    learning = {rank for name in LEARNERS for rank in roles.get(name, ())}
    if SAMPLER in roles:
        return "hybrid" if learning & set(roles[SAMPLER]) else "separation"
    whole = {name for name, of_role in roles.items() if len(of_role) == ranks}
    if whole == set(roles):
        return "flattening"
    return "interleaving" if whole >= {name for name in LEARNERS if name in roles} else "hybrid"
