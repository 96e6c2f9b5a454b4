"""Assembles received parts into full weights for the loader, with adapters merged.

Frozen weights are sent once. This rank keeps its part of them in host memory, and merges the adapters of each sync into
them with the arithmetic of training (models/lora.py). Elements of a full weight that this rank does not have are
uninitialised; the loader does not read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hybrid_rlhf.engines.separate.layout import SentTensor, SentWeight
from hybrid_rlhf.engines.separate.transfer import Part


class ReceivedWeights:
    """Received weights of a model on a rank that samples."""

    def __init__(self, dtypes: Mapping[str, torch.dtype], device: torch.device, *, in_place: bool) -> None:
        """Args: dtypes of the transfer by tensor, the device, and true if frozen weights without adapters stay in the
        inference weights."""
        self._dtypes = dtypes
        self._device = device
        self._in_place = in_place
        self._frozen: dict[str, list[Part]] = {}
        self.has_frozen = False
        """True if the frozen weights have arrived."""

    def assembled(
        self, buckets: Iterable[tuple[Sequence[SentWeight], Mapping[str, list[Part]]]]
    ) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield the weights for `InferenceWeights.build`, except those that stay in the inference weights.

        A weight is valid until the next one.
        """
        for weights, parts in buckets:
            for weight in weights:
                base = self._parts(weight, parts)
                if base is None:
                    continue
                full = self._full(weight.base, base)
                factors = [self._full(f, parts[f.name]) for f in weight.factors]
                if weight.adapter is None:
                    yield weight.base.name, full, False
                else:
                    merged = weight.adapter.merged(full, *factors)
                    yield weight.base.name, merged, _is_whole(weight.base, base)
        self.has_frozen = True

    def _parts(self, weight: SentWeight, arrived: Mapping[str, list[Part]]) -> list[Part] | None:
        """Return this rank's part of a weight, just arrived or kept; None if the inference weights have it."""
        name = weight.base.name
        parts = arrived.get(weight.base.name, [])
        if weight.base.trained:
            return parts
        if self.has_frozen:
            return self._frozen.get(name)
        if weight.adapter is not None or not self._in_place:
            self._frozen[name] = [(runs, values.to("cpu", copy=True)) for runs, values in parts]
        return parts

    def _full(self, tensor: SentTensor, parts: Sequence[Part]) -> Tensor:
        """Return a tensor of the full shape with these parts set."""
        if _is_whole(tensor, parts) and len(parts) == 1:
            return parts[0][1].to(self._device).view(tensor.shape)
        full = torch.empty(tensor.shape, dtype=self._dtypes[tensor.name], device=self._device)
        for runs, values in parts:
            runs.view(full.view(-1)).copy_(values.view(runs.count, runs.length))
        return full


def _is_whole(tensor: SentTensor, parts: Sequence[Part]) -> bool:
    return sum(runs.elements for runs, _ in parts) == tensor.elements
