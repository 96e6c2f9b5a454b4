"""From parts that arrive to the full weights that the loader takes, with adapters merged.

Frozen weights travel once. This rank keeps its part of them, on the host where it samples on a GPU, and merges the
adapters of each sync into them with the arithmetic of training (models/lora.py). A full weight has arbitrary values
where this rank has no part of it; the loader does not read these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hybrid_rlhf.engines.separate.intervals import Runs
from hybrid_rlhf.engines.separate.layout import SentTensor, SentWeight
from hybrid_rlhf.engines.separate.transfer import Part


class ReceivedWeights:
    """The weights of a model on a rank that samples."""

    def __init__(self, dtypes: Mapping[str, torch.dtype], device: torch.device, *, in_place: bool) -> None:
        """Take the dtypes in which tensors arrive, the device, and whether frozen weights without adapters stay in the
        inference weights."""
        self._dtypes, self._device, self._in_place = dtypes, device, in_place
        self._frozen: dict[str, list[Part]] = {}
        self.has_frozen = False
        """Whether the frozen weights have arrived."""

    def assembled(
        self, buckets: Iterable[tuple[Sequence[SentWeight], Mapping[str, list[Part]]]]
    ) -> Iterator[tuple[str, Tensor, bool]]:
        """Weights for InferenceWeights.build, those left out that stay in the inference weights; valid until the
        next."""
        for weights, parts in buckets:
            for weight in weights:
                base = self._parts(weight, parts)
                if base is None:
                    continue
                full, factors = self._full(weight.base, base), [self._full(f, parts[f.name]) for f in weight.factors]
                if weight.adapter is None:
                    yield weight.base.name, full, False
                else:
                    merged = weight.adapter.merged(full, *factors)
                    yield weight.base.name, merged, _is_whole(weight.base, base)
        self.has_frozen = True

    def _parts(self, weight: SentWeight, arrived: Mapping[str, list[Part]]) -> list[Part] | None:
        """This rank's part of a weight: arrived, or kept; none: the inference weights have it."""
        name, parts = weight.base.name, arrived.get(weight.base.name, [])
        if weight.base.trained:
            return parts
        if self.has_frozen:
            return self._frozen.get(name)
        if weight.adapter is not None or not self._in_place:
            self._frozen[name] = [(runs, values.to("cpu", copy=True)) for runs, values in parts]
        return parts

    def _full(self, tensor: SentTensor, parts: Sequence[Part]) -> Tensor:
        """A tensor of the full shape with these parts of it."""
        if _is_whole(tensor, parts) and len(parts) == 1:
            return parts[0][1].to(self._device).view(tensor.shape)
        full = torch.empty(tensor.shape, dtype=self._dtypes[tensor.name], device=self._device)
        for runs, values in parts:
            _view(runs, full).copy_(values.view(runs.count, runs.length))
        return full


def _view(runs: Runs, full: Tensor) -> Tensor:
    return runs.view(full.view(-1))


def _is_whole(tensor: SentTensor, parts: Sequence[Part]) -> bool:
    return sum(runs.elements for runs, _ in parts) == tensor.elements
