"""A frozen role with inference weights, split over tensor-parallel groups of its ranks.

It has no DeepSpeed engine: each rank has its part of the weights, and the ranks of a group compute the same rows. Calls
and results are those of a ModelEngine's module (generation/scoring.py).
"""

from __future__ import annotations

import contextlib
from typing import Any

from transformers import PreTrainedModel

from hybrid_rlhf.engines.engine import EngineFacts, Role
from hybrid_rlhf.generation.scoring import InferencePolicy, InferenceScorer, inference_policy, inference_scorer
from hybrid_rlhf.runtime.world import World


class InferenceReader:
    """A reward model or a reference under tensor parallelism."""

    packs = True
    """All layers compute batches without padding."""

    def __init__(self, role: Role, lm: PreTrainedModel, *, world: World, group: World) -> None:
        """Build this rank's part of a model.

        Args:
            role: name of the role.
            lm: the whole model, on the host; not used afterwards.
            world: the ranks of the role.
            group: tensor-parallel group of this rank.

        Raises:
            UserError: on every rank of the group, as in `inference_policy`.
        """
        self.role: Role = role
        self.world = world
        self.device = world.device
        """Device that batches must be on."""
        self.tensor_parallel = group.size
        """Number of ranks that compute the same rows together."""
        self.reports_rows = group.is_main
        """True if the results of this rank count, among those that compute the same rows."""
        self.config = lm.config
        self.facts = EngineFacts(self.packs)
        """Properties of the model for ranks that do not have it."""
        scores = role in ("reward", "critic")
        self._model: InferencePolicy | InferenceScorer
        self._model = inference_scorer(lm, world=group) if scores else inference_policy(lm, world=group)

    def __call__(self, *inputs: Any, **settings: Any) -> Any:
        """Return the result of the model's Policy or Scorer. All ranks of the group pass the same rows."""
        return self._model(*inputs, **settings)

    def on_device(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing: the weights are always on the device."""
        return contextlib.nullcontext()
