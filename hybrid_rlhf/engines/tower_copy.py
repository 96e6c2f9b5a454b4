"""The tower of a model that ZeRO-3 partitions, whole on each rank: an image of a prompt is read on one rank alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from hybrid_rlhf.engines.partition import BaseWeight, base_parameters
from hybrid_rlhf.models.families import unread_weights


class TowerCopy:
    """A model of which only the tower has values; those of a weight sync."""

    def __init__(self, lm: PreTrainedModel, *, device: torch.device) -> None:
        """Take a partitioned model and the device of the copy, which has no weights yet."""
        parameters = dict(base_parameters(lm))
        self._trained = {name: parameters[name].requires_grad for name in unread_weights(lm, parameters)}
        """For each weight of the tower, true if updates change it."""
        self._device = device
        with torch.device("meta"):
            self.lm: PreTrainedModel = type(lm)(copy.deepcopy(lm.config)).to(lm.dtype).eval()
        for name, buffer in lm.named_buffers():  # they are not partitioned
            if unread_weights(lm, [name]):
                module, attribute = self._owner(name)
                module.register_buffer(attribute, buffer, persistent=False)

    def copied(self, weights: Iterator[BaseWeight]) -> Iterator[BaseWeight]:
        """Yield gathered weights, and copy those of the tower; a weight that updates do not change only once."""
        for weight in weights:
            if weight.name in self._trained:
                module, attribute = self._owner(weight.name)
                value: nn.Parameter = getattr(module, attribute)
                if value.is_meta:
                    value = nn.Parameter(torch.empty_like(weight.parameter, device=self._device), requires_grad=False)
                    setattr(module, attribute, value.copy_(weight.merged()))
                elif self._trained[weight.name]:
                    value.copy_(weight.merged())
            yield weight

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        """The module of a weight or buffer, and its name there."""
        path, _, attribute = name.rpartition(".")
        return self.lm.get_submodule(path), attribute
