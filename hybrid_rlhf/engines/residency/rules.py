"""Location of the memory of each role in each phase of an RL step: on the device, on the host, or freed.

Why one place: `rollout.offload_frozen`, `rollout.offload_states`, `rollout.keep_weights`, `zero.offload_*` and the
placement each decide a part of it. Engines move memory by these rules, memory plans count it, and one table shows it.
Only settings are read, so a plan and a run come to the same decisions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, Self

from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.placement import ZeroStage, is_role
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.training import ZeroConfig
from hybrid_rlhf.runtime.placement import CRITIC_COPY, Placement, RolePlacement, aligned, role_label

Phase = Literal["sampling", "scoring", "log-probs and values", "updates"]
Part = Literal["weights", "gradients", "optimizer", "inference weights", "KV cache", "CUDA graphs"]
Place = Literal["device", "host", "freed"]
PHASES: tuple[Phase, ...] = ("sampling", "scoring", "log-probs and values", "updates")
_ON_DEVICE: tuple[Place, ...] = ("device", "device", "device", "device")
_ON_HOST: tuple[Place, ...] = ("host", "host", "host", "host")


@dataclass(frozen=True)
class RoleResidency:
    """Location of the memory of a role on each of its ranks."""

    places: Mapping[Part, tuple[Place, ...]]
    """Location of each part by phase. Parts that the role does not have are left out."""

    def at(self, part: Part, phase: Phase) -> Place:
        """Return the location of a part in a phase; freed if the role does not have it."""
        places = self.places.get(part)
        return "freed" if places is None else places[PHASES.index(phase)]

    def stays(self, part: Part) -> bool:
        """True if a part is on the device in all phases."""
        return self.places.get(part) == _ON_DEVICE

    def zero(self, stage: ZeroStage) -> ZeroConfig:
        """Return the ZeRO section of the role under the stage of its placement, which offloads what the stage can;
        weights that are not partitioned are offloaded by engines/residency/offload.py."""
        return ZeroConfig(
            stage=stage,
            offload_optimizer=self.at("optimizer", "updates") == "host",
            offload_parameters=stage == 3 and self.at("weights", "scoring") == "host",
        )

    def visits(self, part: Part) -> bool:
        """True if a part is on the host in some phases and on the device in others."""
        return {"device", "host"} <= {*self.places.get(part, ())}


@dataclass(frozen=True)
class ResidencyRules:
    """Settings that decide about the location of memory."""

    offload_frozen: bool = False
    """As in RolloutConfig."""
    offload_states: bool = False
    keep_weights: bool | Literal["auto"] = "auto"
    """auto: false on the actor's ranks, true on separate ranks of the sampler."""
    lags: bool = False
    """True with `rollout.max_lag`: a sampler on separate ranks samples in all phases."""
    optimizers_on_host: Collection[str] = ()
    """Roles with `zero.offload_optimizer`."""
    parameters_on_host: Collection[str] = ()
    """Roles with `zero.offload_parameters`."""
    cuda_graphs: bool = False
    """True if decoding steps are captured in CUDA graphs."""
    samples_outside: bool = False
    """True if other processes sample, with their own memory."""

    @classmethod
    def of(cls, config: RLConfig, *, cuda: bool) -> Self:
        """Return the rules of a config, for GPUs (`cuda`) or CPUs."""
        zero = {"actor": config.actor.zero, "critic": config.critic_zero}
        return cls.of_rollout(
            config.rollout,
            optimizers_on_host=[role for role, section in zero.items() if section.offload_optimizer],
            parameters_on_host=[role for role, section in zero.items() if section.offload_parameters],
            cuda=cuda,
        )

    @classmethod
    def of_rollout(
        cls,
        rollout: RolloutConfig,
        *,
        cuda: bool,
        optimizers_on_host: Collection[str] = (),
        parameters_on_host: Collection[str] = (),
    ) -> Self:
        """Return the rules of a rollout section, given the roles whose ZeRO sections offload."""
        return cls(
            rollout.offload_frozen,
            rollout.offload_states,
            rollout.keep_weights,
            rollout.max_lag > 0,
            optimizers_on_host,
            parameters_on_host,
            cuda and rollout.cuda_graphs,
            rollout.backend == "vllm",
        )

    def actor(self, zero: int = 0, *, samples: bool = True) -> RoleResidency:
        """Return the residency of the actor under a ZeRO stage; `samples`: it samples on the ranks that train it."""
        parts = {**self.learner("actor", zero).places}
        if samples and not self.samples_outside:
            if self.offload_states:
                parts |= {"gradients": _away(parts["gradients"]), "optimizer": _away(parts["optimizer"])}
            parts |= self._sampling(keeps=self.keep_weights is True, keeps_cache=self.keep_weights is True)
        return RoleResidency(parts)

    def learner(self, name: str, zero: int) -> RoleResidency:
        """Return the residency of actor or critic in training, under a ZeRO stage."""
        on_host = name in self.optimizers_on_host and zero > 0
        training: tuple[Place, ...] = ("freed", "freed", "freed", "device")
        gradients = _ON_DEVICE if zero == 3 else training  # ZeRO-3 keeps its gradient buffer
        if on_host and zero >= 2:
            gradients = _ON_HOST
        return RoleResidency(
            {
                "weights": _ON_HOST if name in self.parameters_on_host and zero == 3 else _ON_DEVICE,
                "gradients": gradients,
                "optimizer": _ON_HOST if on_host else _ON_DEVICE,
            }
        )

    def sampler(self, *, shares_ranks: bool) -> RoleResidency:
        """Return the residency of a sampler on separate ranks; `shares_ranks`: frozen roles or the critic also compute
        there, and need the memory of the KV cache."""
        keeps = self.lags or self.keep_weights is not False
        keeps_cache = self.keep_weights is True or self.lags or (keeps and not shares_ranks)
        return RoleResidency(self._sampling(keeps=keeps, keeps_cache=keeps_cache))

    def frozen(
        self, place: RolePlacement, *, sharded_on_host: bool = False, reads_in: Phase = "scoring"
    ) -> RoleResidency:
        """Return the residency of a reward model, the reference or the teacher, which computes in phase `reads_in`.

        `sharded_on_host`: the trained role of the same kind has `zero.offload_parameters`.
        """
        if place.zero == 3:
            return RoleResidency({"weights": _ON_HOST if self.offload_frozen or sharded_on_host else _ON_DEVICE})
        visit: tuple[Place, ...] = tuple("device" if phase == reads_in else "host" for phase in PHASES)
        return RoleResidency({"weights": visit if self.offload_frozen else _ON_DEVICE})

    def roles(self, placement: Placement) -> dict[str, RoleResidency]:
        """Return the residency of all roles of a placement."""
        return {name: self._role(name, placement) for name in placement.roles}

    def _role(self, name: str, placement: Placement) -> RoleResidency:
        place = placement[name]
        if name == "actor":
            return self.actor(place.zero, samples=not placement.separate_sampler)
        if name == "critic":
            return self.learner(name, place.zero)
        if name == CRITIC_COPY:
            return RoleResidency({"inference weights": _ON_DEVICE})
        if name == "sampler":
            return self.sampler(shares_ranks=placement.sampler_shares_ranks)
        if not is_role(name):
            return self.frozen(place, sharded_on_host="critic" in self.parameters_on_host)
        # the reference computes at the same time as reward models on other ranks, else both after them
        beside = name == "reference" and placement.reference_beside_rewards
        reads_in: Phase = "scoring" if beside else "log-probs and values"
        return self.frozen(place, sharded_on_host="actor" in self.parameters_on_host, reads_in=reads_in)

    def _sampling(self, *, keeps: bool, keeps_cache: bool) -> dict[Part, tuple[Place, ...]]:
        """Return the parts that sampling needs."""
        once: tuple[Place, ...] = ("device", "freed", "freed", "freed")
        cache = _ON_DEVICE if keeps_cache else once
        parts: dict[Part, tuple[Place, ...]] = {
            "inference weights": _ON_DEVICE if keeps else once,
            "KV cache": cache,
        }
        return parts | ({"CUDA graphs": cache} if self.cuda_graphs else {})


def residency_table(roles: Mapping[str, RoleResidency]) -> list[str]:
    """Return lines of a table with the locations of the parts of each role; parts with equal locations share a line."""
    rows: list[tuple[str, ...]] = [("role", "memory", *PHASES)]
    for name, residency in roles.items():
        alike: dict[tuple[Place, ...], list[str]] = {}
        for part, places in residency.places.items():
            alike.setdefault(places, []).append(part)
        rows += [(role_label(name), ", ".join(parts), *places) for places, parts in alike.items()]
    return aligned(rows)


def _away(places: tuple[Place, ...]) -> tuple[Place, ...]:
    """Return the locations with the device replaced by the host while sampling."""
    return ("host", *places[1:]) if places[0] == "device" else places
