"""The models that take part in an RL step, each on its ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from hybrid_rlhf.data.images.references import ImageReference
from hybrid_rlhf.engines.partition import copy_weights, full_tensors, set_weights
from hybrid_rlhf.engines.role_model import Actor, Reader, RoleModel
from hybrid_rlhf.engines.sampling_engine import SamplingEngine
from hybrid_rlhf.rl.images import ImageCatalogue
from hybrid_rlhf.rl.rewards import Reward
from hybrid_rlhf.rl.types import Rollout
from hybrid_rlhf.runtime.world import World


@dataclass(frozen=True)
class Roles:
    """Actor, reward, critic, reference and teachers, each on its ranks; some steps need no critic, reference or
    teacher."""

    world: World
    """All ranks of the run."""
    actor: Actor
    reward: Reward
    critic: RoleModel | None = None
    reference: RoleModel | None = None
    """None also if the reference is the actor without its adapters."""
    separate_sampler: SamplingEngine | None = None
    """A sampler on ranks of its own, or in vLLM's processes; None if the actor samples."""
    critic_copy: Reader | None = None
    """Computes the critic's values; None if the critic computes them."""
    teachers: Mapping[str, RoleModel] = field(default_factory=dict)
    """Frozen teachers of on-policy distillation by the names of their roles."""
    reference_beside_rewards: bool = False
    """True if the reference and the reward models have no rank in common, and so read at the same time."""
    images: ImageCatalogue | None = None
    """The images of the run's prompts; None if there are none."""
    close: Callable[[], None] = lambda: None
    """Ends the processes that the roles have started."""

    @property
    def sampler(self) -> SamplingEngine:
        """The engine that samples completions."""
        return self.actor if self.separate_sampler is None else self.separate_sampler

    def images_of(self, rollout: Rollout) -> list[list[ImageReference]] | None:
        """The images of each row, for the engines; None in a run without images."""
        return None if self.images is None else self.images(rollout)

    @property
    def learners(self) -> dict[str, RoleModel]:
        """The trained models by name."""
        return {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic})

    @property
    def packs(self) -> bool:
        """True if no role pads its micro-batches."""
        return all(role.packs for role in self._readers)

    @property
    def shares_prefixes(self) -> bool:
        """True if all roles compute the common tokens of rows that begin alike once."""
        return all(role.shares_prefixes for role in self._readers)

    @property
    def _readers(self) -> list[RoleModel | Reward]:
        roles = (self.actor, self.critic, self.reward, self.reference, *self.teachers.values())
        return [role for role in roles if role is not None]

    def refresh_reference(self) -> None:
        """Copy the actor's weights to the reference; every rank calls."""
        actor = self.actor
        reference = self.reference
        assert reference is not None
        if actor.world.members == reference.world.members:
            if actor.world.is_member:
                copy_weights(actor.lm, reference.lm)
            return
        weights = full_tensors(actor.lm, actor.world) if actor.world.is_member else None
        parameters = dict(reference.lm.named_parameters()) if reference.world.is_member else {}
        for name, shape in actor.facts.weights.items():
            sent = torch.empty(shape, device=self.world.device)
            if weights is not None and (tensor := next(weights)[1]) is not None:
                sent.copy_(tensor)
            self.world.broadcast(sent, source=actor.world.members[0])
            if parameters:
                set_weights(parameters[name], sent)
        for _ in weights or ():  # buffers do not change; the end of the iterator releases gathered weights
            pass

    def synchronize_versions(self) -> None:
        """Broadcast the number of updates of each learner to the ranks without it; every rank calls."""
        if all(role.world.size == self.world.size for role in self.learners.values()):
            return
        versions = self.world.merge_dicts(
            {name: role.weight_version for name, role in self.learners.items() if role.world.is_member}
        )
        for name, role in self.learners.items():
            role.note_version(versions[name])
