"""A frozen role in inference weights, split over tensor-parallel groups of its ranks.

It has no DeepSpeed engine: each rank keeps its part of the weights, and the ranks of a group read the same rows. It is
called as the module that a ModelEngine wraps, and computes the same (generation/scoring.py).
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from transformers import PreTrainedModel

from hybrid_rlhf.engines.engine import EngineFacts, Role
from hybrid_rlhf.generation.scoring import InferencePolicy, InferenceScorer, inference_policy, inference_scorer
from hybrid_rlhf.runtime.world import World


class InferenceReader:
    """A reward model or a reference under tensor parallelism."""

    packs = True
    """See ModelEngine."""

    def __init__(self, role: Role, lm: PreTrainedModel, *, world: World, group: World) -> None:
        """Keep this rank's part of a model.

        Args:
            role: its name.
            lm: the whole model, on the host; not used afterwards.
            world: the role's ranks.
            group: those that share one model, and this rank.

        Raises:
            UserError: on every rank of the group, see `inference_policy`.
        """
        self.role: Role = role
        self.world, self.group = world, group
        self.config, self.parameters = lm.config, lm.num_parameters()
        scores = role in ("reward", "critic")
        self._model: InferencePolicy | InferenceScorer
        self._model = inference_scorer(lm, world=group) if scores else inference_policy(lm, world=group)

    def __call__(self, *inputs: Any, **settings: Any) -> Any:
        """What the Policy or the Scorer of the model returns; all ranks of the group call, with the same rows."""
        return self._model(*inputs, **settings)

    @property
    def tensor_parallel(self) -> int:
        """See ModelEngine."""
        return self.group.size

    @property
    def reports_rows(self) -> bool:
        """See ModelEngine."""
        return self.group.is_main

    @property
    def device(self) -> torch.device:
        """The device that batches must be on."""
        return self.world.device

    @property
    def facts(self) -> EngineFacts:
        """Properties for the ranks without this model."""
        return EngineFacts(self.parameters, self.packs)

    def on_device(self) -> contextlib.AbstractContextManager[None]:
        """See ModelEngine; its part of the weights is always on the device."""
        return contextlib.nullcontext()
