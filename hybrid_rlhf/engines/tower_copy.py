"""A whole copy of a tower on a rank that samples, where training has a part of its weights there or none: an image of a
prompt is read on one rank alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hybrid_rlhf.engines.partition import base_parameters
from hybrid_rlhf.models.families import unread_weights
from hybrid_rlhf.models.families.vision import images_refused


@dataclass(frozen=True)
class TowerDescription:
    """What a copy is made of before it has weights; other ranks may receive it."""

    kind: type[PreTrainedModel]
    config: PreTrainedConfig
    dtype: torch.dtype
    changes: Mapping[str, bool]
    """By the name of each weight, true if updates change it."""
    buffers: Mapping[str, Tensor]

    @classmethod
    def of(cls, lm: PreTrainedModel) -> Self | None:
        """The tower of a model, partitioned or not; None if it reads no images."""
        if images_refused(lm.config) is not None:
            return None
        parameters, buffers = dict(base_parameters(lm)), dict(lm.named_buffers())  # buffers are not partitioned
        return cls(
            type(lm),
            copy.deepcopy(lm.config),
            lm.dtype,
            {name: parameters[name].requires_grad for name in unread_weights(lm, parameters)},
            {name: buffers[name].cpu() for name in unread_weights(lm, buffers)},
        )


class TowerCopy:
    """A model of which only the tower has values; those of a weight sync."""

    def __init__(self, description: TowerDescription, device: torch.device) -> None:
        """Take a description and the device of the copy."""
        self.changes = description.changes
        self._device = device
        with torch.device("meta"):
            self.lm: PreTrainedModel = description.kind(description.config).to(description.dtype).eval()
        for name, buffer in description.buffers.items():
            module, attribute = self._owner(name)
            module.register_buffer(attribute, buffer.to(device), persistent=False)

    @torch.no_grad()
    def take(self, name: str, weight: Tensor) -> None:
        """Copy a weight of the trained model if it is the tower's; one that updates do not change only once."""
        if name not in self.changes:
            return
        module, attribute = self._owner(name)
        value: nn.Parameter = getattr(module, attribute)
        if value.is_meta:
            setattr(module, attribute, nn.Parameter(weight.to(self._device, copy=True), requires_grad=False))
        elif self.changes[name]:
            value.copy_(weight)

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        """The module of a weight or buffer, and its name there."""
        path, _, attribute = name.rpartition(".")
        return self.lm.get_submodule(path), attribute
