"""Compares elements of the weights that a weight sync reads with the trained model and its adapters.

Why in addition to the probe (weight_check.py): one update changes log-probs by less than the rounding of bfloat16 or
int8. Adapters that are not merged, or a bucket of old weights, would pass the probe until the policies have drifted
apart. Elements are exact: without adapters they must be equal; with adapters, their difference is compared with the
change that the adapters make.

Deviation: an adapter whose change is rounded away in the dtype of the weights changes no element, so its absence is not
detected.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybrid_rlhf.engines.partition import GatheredWeight, adapted_layers, base_parameters
from hybrid_rlhf.models.four_bit import FourBitWeight
from hybrid_rlhf.models.lora import Adapter, weights_of
from hybrid_rlhf.models.weight_split import split_of

ELEMENTS = 512
"""Number of elements compared per weight; of stacked experts, on average at least `_ELEMENTS_PER_EXPERT` each."""
_ELEMENTS_PER_EXPERT = 16
_MISSED = 0.1
"""Allowed fraction of the adapters' change that may be missing, since whole products are summed in another order."""
_ROUNDED = 8.0
"""Number of elements that may be rounded to the next value for the same reason."""


@dataclass(frozen=True)
class WrongElements:
    """The weight with the largest excess."""

    name: str
    excess: float
    """Sum of absolute differences, minus the allowed sum. At most 0: no element is wrong."""


class ElementCheck:
    """Compares the weights of a sync as they are read."""

    def __init__(self, lm: nn.Module) -> None:
        """Args: the trained model, partitioned or not, with or without adapters."""
        adapted = adapted_layers(lm)
        self._weights = {name: (parameter, adapted.get(id(parameter))) for name, parameter in base_parameters(lm)}
        self._excess: dict[str, Tensor] = {}

    def __call__(
        self, weights: Iterable[GatheredWeight], *, seed: int
    ) -> Iterator[tuple[GatheredWeight, Tensor | FourBitWeight]]:
        """Compare weights while they are gathered; yields each weight and its value in generation. 4-bit weights are
        not compared, as generation reads them where training does.

        Args:
            weights: all weights of one sync.
            seed: selects the elements; use a different one for each sync.
        """
        self._excess = {}
        generator = torch.Generator().manual_seed(seed)
        for weight in weights:
            value = weight.sampled()
            if isinstance(value, Tensor):
                self._excess[weight.name] = self._compare(weight.name, value, generator)
            yield weight, value

    @property
    def worst(self) -> WrongElements:
        """Weight with the largest excess in the last sync."""
        excess = torch.stack([*self._excess.values()])
        place = int(excess.argmax())
        return WrongElements([*self._excess][place], float(excess[place]))

    @torch.no_grad()
    def _compare(self, name: str, value: Tensor, generator: torch.Generator) -> Tensor:
        """Return the excess of a weight (WrongElements), a float64 scalar."""
        parameter, layer = self._weights[name]
        value = split_of(parameter).local(value)
        experts = len(value) if value.dim() == 3 else 0
        draws = torch.rand(max(ELEMENTS, experts * _ELEMENTS_PER_EXPERT), generator=generator, dtype=torch.float64)
        places = (draws * value.numel()).long().to(value.device)
        elements = value.take(places).double()
        base = parameter.detach().take(places)
        if layer is None:
            return (elements - base.double()).abs().sum().nan_to_num(0.0)
        factors = [factor.detach() for factor in weights_of(layer)[1:]]
        expected = Adapter.of(layer).merged_elements(base, *factors, places=places, shape=value.shape).double()
        rounding = torch.finfo(value.dtype).eps * expected.abs().mean()
        allowed = _MISSED * (expected - base.double()).abs().sum() + _ROUNDED * rounding
        return ((elements - expected).abs().sum() - allowed).nan_to_num(0.0)
