"""Files of fragments: a rank's parts of a model's weights and optimizer states on disk.

One safetensors file per rank. A tensor is named PARAMETER/OFFSET/KIND, so the file headers are the index. Nothing here
imports deepspeed: a server reads the weights of a run that trains elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from hybrid_rlhf.configs.errors import UserError

WEIGHT = "weight"
"""Kind of the weights that the optimizer updates: master weights if there are any. Other kinds are optimizer states."""


@dataclass(frozen=True)
class Fragment:
    """A contiguous part of one flattened parameter; its tensors [n] are views of the engine's memory."""

    name: str
    """Name of the parameter; of parts along another dimension than the first also the part."""
    offset: int
    """Index of the first element in the flattened parameter, or in the part that `name` gives."""
    tensors: Mapping[str, Tensor]
    copy: int = 0
    """Index of this rank among those that have the same fragment."""
    copies: int = 1
    """Number of these ranks."""
    is_copy: bool = False
    """True if another rank has the same fragment, and writes it."""

    def part(self, offset: int, tensors: Mapping[str, Tensor]) -> Fragment:
        """Return the part of the fragment that begins at an offset in it."""
        return replace(self, offset=self.offset + offset, tensors=tensors)

    @property
    def share(self) -> Fragment:
        """The part of the fragment that this rank writes."""
        if self.is_copy:
            return replace(self, tensors={})
        size = len(next(iter(self.tensors.values())))
        first = size * self.copy // self.copies
        end = size * (self.copy + 1) // self.copies
        return replace(
            self, offset=self.offset + first, tensors={kind: t[first:end] for kind, t in self.tensors.items()}
        )


class SavedFragments:
    """Fragments written by all ranks of a run."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Read the headers of the files."""
        self._files = list(files)
        self._places: dict[tuple[str, str], list[tuple[int, int, Path, str]]] = defaultdict(list)
        for file in self._files:
            with safe_open(str(file), framework="pt") as opened:
                for key in opened.keys():
                    name, offset, kind = key.rsplit("/", 2)
                    (size,) = opened.get_slice(key).get_shape()
                    self._places[name, kind].append((int(offset), size, file, key))

    @property
    def names(self) -> set[str]:
        """Names of the parameters whose weights were saved."""
        return {name for name, kind in self._places if kind == WEIGHT}

    def elements(self, name: str) -> int:
        """Number of elements of a parameter, or of a part of one, whose weights were saved."""
        return sum(size for _, size, _, _ in self._places.get((name, WEIGHT), ()))

    def fill(self, fragments: Iterable[Fragment]) -> None:
        """Read saved values into the tensors of fragments.

        Raises:
            UserError: when a part of a fragment was not saved, because the checkpoint belongs to another model.
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
        begin = fragment.offset
        end = fragment.offset + len(tensor)
        covered = 0
        for offset, size, file, key in self._places.get((fragment.name, kind), ()):
            first, last = max(begin, offset), min(end, offset + size)
            if first < last:
                wanted[file].append((tensor[first - begin : last - begin], key, first - offset))
                covered += last - first
        if covered != len(tensor):
            raise UserError(
                f"a checkpoint must hold every trained weight, {self._files[0].parent} lacks {kind} of "
                f"{fragment.name} from {begin} to {end}: resume with the model and the adapters of its config.yaml"
            )
