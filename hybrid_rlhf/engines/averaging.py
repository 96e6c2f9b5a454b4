"""An exponential moving average of a model's trained weights.

Source: DeepSpeed-Chat's EMA actor. Deviation: each rank averages what it holds of the weights (under ZeRO-3 its own
partition), on the host and in float32, so that an update gathers nothing and bfloat16 does not swallow small steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hybrid_rlhf.engines.fragments import Fragment, held, parameter_fragments, release
from hybrid_rlhf.runtime.world import World


class WeightAverage:
    """average = decay * average + (1 - decay) * weights, after each update."""

    def __init__(self, module: nn.Module, *, decay: float) -> None:
        self._decay = decay
        learning = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self._names, self._parameters = list(learning), list(learning.values())
        self._averages = [
            held(parameter).detach().to("cpu", torch.float32, copy=True) for parameter in self._parameters
        ]

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights."""
        for average, parameter in zip(self._averages, self._parameters, strict=True):
            average.lerp_(held(parameter).to("cpu", torch.float32), 1 - self._decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Put the average in the place of the weights, for saving or evaluating; the weights come back bit for bit."""
        kept = [held(parameter).detach().clone() for parameter in self._parameters]
        self._put(self._averages)
        try:
            yield
        finally:
            self._put(kept)

    def fragments(self, world: World) -> Iterator[Fragment]:
        """What this rank holds of the average, as views: for checkpoints."""
        named = zip(self._names, self._parameters, strict=True)
        return parameter_fragments(named, self._averages, kind="average", world=world)

    @torch.no_grad()
    def _put(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            release(parameter)
            held(parameter).copy_(value)
