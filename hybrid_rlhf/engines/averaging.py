"""An exponential moving average of a model's trained weights.

Source: DeepSpeed-Chat's EMA actor. Deviation: each rank averages what it holds of the weights (under ZeRO-3 its own
partition), on the host and in float32, so that an update gathers nothing and bfloat16 does not swallow small steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class WeightAverage:
    """average = decay * average + (1 - decay) * weights, after each update."""

    def __init__(self, module: nn.Module, *, decay: float) -> None:
        self._decay = decay
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._averages = [
            _held(parameter).detach().to("cpu", torch.float32, copy=True) for parameter in self._parameters
        ]

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights."""
        for average, parameter in zip(self._averages, self._parameters, strict=True):
            average.lerp_(_held(parameter).to("cpu", torch.float32), 1 - self._decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Put the average in the place of the weights, for saving or evaluating; the weights come back bit for bit."""
        kept = [_held(parameter).detach().clone() for parameter in self._parameters]
        self._put(self._averages)
        try:
            yield
        finally:
            self._put(kept)

    def state_dict(self) -> dict[str, list[Tensor]]:
        """What a checkpoint keeps, for this rank."""
        return {"averages": self._averages}

    def load_state_dict(self, state: dict[str, list[Tensor]]) -> None:
        """Go on from a checkpoint of the same layout."""
        self._averages = state["averages"]

    @torch.no_grad()
    def _put(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            _held(parameter).copy_(value)


def _held(parameter: nn.Parameter) -> Tensor:
    """What this rank holds of a parameter: its ZeRO-3 partition, or all of it."""
    partition = getattr(parameter, "ds_tensor", None)
    return parameter.data if partition is None else partition.data
