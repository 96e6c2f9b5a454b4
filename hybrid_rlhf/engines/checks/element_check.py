"""Compares elements of the weights that a weight sync reads with those of the trained model, and of its adapters.

Why beside the probe (weight_check.py): one update changes log-probs by less than bfloat16 or int8 rounds them. Adapters
that no rollout uses, or a bucket of old weights, would pass until the policies have drifted apart. Elements are exact:
without adapters they are equal; with adapters, the difference is compared with the change that the adapters make.

Deviation: an adapter whose change is rounded away in the dtype of the weights changes no element, and is not missed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybrid_rlhf.engines.partition import GatheredWeight, adapted_layers, base_parameters
from hybrid_rlhf.models.lora import Adapter, weights_of

ELEMENTS = 512
"""Read of each weight; of stacked experts at least `_ELEMENTS_PER_EXPERT` of each on average."""
_ELEMENTS_PER_EXPERT = 16
_MISSED = 0.1
"""Part of the adapters' change that may be missing: merged as a whole, products are summed in another order."""
_ROUNDED = 8.0
"""Elements that may be rounded to the next value for the same reason."""


@dataclass(frozen=True)
class WrongElements:
    """The weight with most of them."""

    name: str
    excess: float
    """Of the summed absolute difference over what is allowed; at most 0: none is wrong."""


class ElementCheck:
    """Compares the weights of a sync as they are read."""

    def __init__(self, lm: nn.Module) -> None:
        """Take the trained model, partitioned or not, with adapters or without."""
        adapted = adapted_layers(lm)
        self._weights = {name: (parameter, adapted.get(id(parameter))) for name, parameter in base_parameters(lm)}
        self._excess: dict[str, Tensor] = {}

    def __call__(self, weights: Iterable[GatheredWeight], *, seed: int) -> Iterator[tuple[GatheredWeight, Tensor]]:
        """The weights, and their merged values. They are compared while they are gathered.

        Args:
            weights: of one sync.
            seed: chooses the elements, which differ from sync to sync.
        """
        self._excess = {}
        generator = torch.Generator().manual_seed(seed)
        for weight in weights:
            value = weight.merged()
            self._excess[weight.name] = self._compare(weight.name, value, generator)
            yield weight, value

    @property
    def worst(self) -> WrongElements:
        """Of the last sync."""
        excess = torch.stack([*self._excess.values()])
        place = int(excess.argmax())
        return WrongElements([*self._excess][place], float(excess[place]))

    @torch.no_grad()
    def _compare(self, name: str, value: Tensor, generator: torch.Generator) -> Tensor:
        """[] excess, float64."""
        parameter, layer = self._weights[name]
        experts = len(value) if value.dim() == 3 else 0
        draws = torch.rand(max(ELEMENTS, experts * _ELEMENTS_PER_EXPERT), generator=generator, dtype=torch.float64)
        places = (draws * value.numel()).long().to(value.device)
        found, base = value.take(places).double(), parameter.detach().take(places)
        if layer is None:
            return (found - base.double()).abs().sum().nan_to_num(0.0)
        factors = [factor.detach() for factor in weights_of(layer)[1:]]
        expected = Adapter.of(layer).merged_elements(base, *factors, places=places, shape=value.shape).double()
        rounding = torch.finfo(value.dtype).eps * expected.abs().mean()
        allowed = _MISSED * (expected - base.double()).abs().sum() + _ROUNDED * rounding
        return ((found - expected).abs().sum() - allowed).nan_to_num(0.0)
