"""Exponential moving average of a model's trained weights.

Source: DeepSpeed-Chat's EMA actor. Deviation: each rank averages its part of the weights (under ZeRO-3 its partition),
on the host and in float32. An update then gathers nothing, and bfloat16 does not round small steps away.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hybrid_rlhf.engines.deepspeed_internals import release_gathered
from hybrid_rlhf.engines.saved.fragments import local_values, parameter_fragments
from hybrid_rlhf.models.fragment_files import Fragment
from hybrid_rlhf.runtime.world import World


class WeightAverage:
    """Keeps average = decay * average + (1 - decay) * weights, updated after each optimizer step."""

    def __init__(self, module: nn.Module, *, decay: float) -> None:
        self._decay = decay
        trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self._names = list(trained)
        self._parameters = list(trained.values())
        self._averages = [
            local_values(parameter).detach().to("cpu", torch.float32, copy=True) for parameter in self._parameters
        ]

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the current weights."""
        for average, parameter in zip(self._averages, self._parameters, strict=True):
            average.lerp_(local_values(parameter).to("cpu", torch.float32), 1 - self._decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the weights by the average inside the context; afterwards, they are restored bit for bit."""
        saved = [local_values(parameter).detach().clone() for parameter in self._parameters]
        self._set(self._averages)
        try:
            yield
        finally:
            self._set(saved)

    def fragments(self, world: World) -> Iterator[Fragment]:
        """Return this rank's part of the average as views, for checkpoints."""
        named = zip(self._names, self._parameters, strict=True)
        return parameter_fragments(named, self._averages, kind="average", world=world)

    @torch.no_grad()
    def _set(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            release_gathered(parameter)
            local_values(parameter).copy_(value)
