"""Images in prompts as the decoder reads them: what a vision tower and its projector make of the images of a prompt.

The tower is not part of the inference weights. Its output takes the place of the embeddings of the image tokens, and in
some families sets the positions of rotation, adds to the states after the first layers, or lets the tokens of an image
attend to each other in both directions.

Shapes: P tokens of a prompt, n image tokens, T tokens of a step, H hidden.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rlhf.generation.transfers import to_device


@dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """The images of a prompt, encoded. It also serves longer prompts with the same images in the same places."""

    places: Sequence[int]
    """Index of each image token in the prompt, ascending."""
    states: Tensor
    """[n, H], in place of the embeddings of these tokens."""
    deep: tuple[Tensor, ...] = ()
    """[n, H] each: added to the states of these tokens after the first layers (Qwen3-VL)."""
    rotated: Tensor | None = None
    """[P, 3] int64 on the host, positions of rotation (time, height, width); none: the index in the prompt."""
    offset: int = 0
    """Difference of position of rotation and index after the last image."""
    spans: Sequence[tuple[int, int]] = ()
    """(first, end) of each image whose tokens attend to each other in both directions (Gemma 3), ascending."""

    @property
    def nbytes(self) -> int:
        """Bytes of the states."""
        return sum(part.nbytes for part in (self.states, *self.deep))

    def positions(self, start: int, end: int) -> Tensor:
        """Return the positions of rotation [end - start, 3] of the tokens at these indices."""
        index = torch.arange(start, end)[:, None].expand(-1, 3) + self.offset
        if self.rotated is None:
            return index
        known = self.rotated[start:end]
        return torch.cat([known, index[len(known) :]])

    def spans_in(self, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Return the spans that overlap the tokens at these indices."""
        return tuple((first, after) for first, after in self.spans if start < after and first < end)


@dataclass(frozen=True)
class ImageTokens:
    """The image tokens of a step."""

    index: Tensor
    """[n] int64, their places among the T tokens of the step."""
    states: Tensor
    """[n, H], in place of their embeddings."""
    deep: tuple[Tensor, ...] = ()
    """[n, H] each, as in EncodedPrompt."""


PromptPart = tuple[EncodedPrompt | None, int, int]
"""Images of a prompt, if it has any, and the indices of the first token of a part and of the token after it."""


def image_tokens(parts: Sequence[PromptPart], device: torch.device) -> ImageTokens | None:
    """Return the image tokens of a step whose tokens are those of the parts, one after the other; None if there are
    none."""
    index = list[int]()
    states = list[tuple[Tensor, ...]]()
    offset = 0
    for images, start, end in parts:
        if images is not None:
            low, high = (bisect.bisect_left(images.places, place) for place in (start, end))
            index += [offset + place - start for place in images.places[low:high]]
            states.append(tuple(part[low:high] for part in (images.states, *images.deep)))
        offset += end - start
    if not index:
        return None
    joined, *deep = (torch.cat([to_device(part, device) for part in layer]) for layer in zip(*states, strict=True))
    return ImageTokens(to_device(index, device, torch.long), joined, tuple(deep))


def rotated_positions(parts: Sequence[PromptPart], device: torch.device) -> Tensor:
    """Return the positions of rotation [T, 3] of the tokens of the parts."""
    positions = [
        torch.arange(start, end)[:, None].expand(-1, 3) if images is None else images.positions(start, end)
        for images, start, end in parts
    ]
    return to_device(torch.cat(positions), device)
