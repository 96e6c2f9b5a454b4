"""Fragments on disk: a safetensors file a rank, read by any layout.

A tensor's name is PARAMETER/OFFSET/KIND; with its length it says what it is, so the headers are the index.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.engines.fragments import Fragment


def named_tensors(fragments: Iterable[Fragment]) -> Iterator[tuple[str, Tensor]]:
    """Fragments by the names that they have on disk."""
    for fragment in fragments:
        for kind, tensor in fragment.tensors.items():
            yield f"{fragment.name}/{fragment.offset}/{kind}", tensor


class SavedFragments:
    """The fragments that all ranks of a run wrote."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Read the headers."""
        self._files = list(files)
        self._places: dict[tuple[str, str], list[tuple[int, int, Path, str]]] = defaultdict(list)
        for file in self._files:
            with safe_open(str(file), framework="pt") as opened:
                for key in opened.keys():
                    name, offset, kind = key.rsplit("/", 2)
                    (size,) = opened.get_slice(key).get_shape()
                    self._places[name, kind].append((int(offset), size, file, key))

    def fill(self, fragments: Iterable[Fragment]) -> None:
        """Write what was saved into the tensors of fragments.

        Raises:
            UserError: when a part of one was not saved: the model is another.
        """
        wanted: dict[Path, list[tuple[Tensor, str, int]]] = defaultdict(list)
        for fragment in fragments:
            for kind, tensor in fragment.tensors.items():
                self._find(fragment, kind, tensor, wanted)
        for file, copies in wanted.items():
            with safe_open(str(file), framework="pt") as opened:
                for target, key, start in copies:
                    target.copy_(opened.get_slice(key)[start : start + len(target)])

    def _find(
        self, fragment: Fragment, kind: str, tensor: Tensor, wanted: Mapping[Path, list[tuple[Tensor, str, int]]]
    ) -> None:
        begin, end, found = fragment.offset, fragment.offset + len(tensor), 0
        for offset, size, file, key in self._places.get((fragment.name, kind), ()):
            first, last = max(begin, offset), min(end, offset + size)
            if first < last:
                wanted[file].append((tensor[first - begin : last - begin], key, first - offset))
                found += last - first
        if found != len(tensor):
            raise UserError(
                f"a checkpoint must hold every weight that learns, {self._files[0].parent} lacks {kind} of "
                f"{fragment.name} from {begin} to {end}: resume with the model and the adapters of its config.yaml"
            )


class HostCopies:
    """Copies of tensors in host memory, safe from what training does next; the memory serves again."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copy; what was taken before is overwritten where it had the same names."""
        taken = {}
        for name, tensor in tensors:
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty_like(tensor, device="cpu", requires_grad=False)
            taken[name] = buffer.copy_(tensor.detach())
        self._buffers = taken
        return taken
