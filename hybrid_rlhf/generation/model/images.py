"""Images of prompts as the decoder reads them: what the tower of a model makes of them (models/vision.py).

The tower is not part of the inference weights. Its states take the place of the embeddings of image tokens, and in some
families tokens have three positions of rotation, states are added after the first layers, or the tokens of an image
attend to each other in both directions. Encoded images of a prompt also serve sequences that continue it.

Shapes: n image tokens, T tokens of a step, H hidden.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rlhf.generation.transfers import to_device
from hybrid_rlhf.models.vision import EncodedImages

PromptPart = tuple[EncodedImages | None, int, int]
"""Images of a prompt, if it has any, and the indices of the first token of a part of it and of the token after the
part."""


@dataclass(frozen=True)
class ImageTokens:
    """The image tokens of a step."""

    index: Tensor
    """[n] int64, their places among the T tokens of the step."""
    states: Tensor
    """[n, H], in place of their embeddings."""
    deep: tuple[Tensor, ...]
    """[n, H] each: added to the states of these tokens after the first layers."""


def image_tokens(parts: Sequence[PromptPart], device: torch.device) -> ImageTokens | None:
    """Return the image tokens of a step whose tokens are those of the parts, one after the other; None if there are
    none."""
    index = list[int]()
    states = list[tuple[Tensor, ...]]()
    before = 0
    for images, start, end in parts:
        if images is not None:
            low, high = (bisect.bisect_left(images.places, place) for place in (start, end))
            index += [before + place - start for place in images.places[low:high]]
            states.append(tuple(part[low:high] for part in (images.states, *images.deep)))
        before += end - start
    if not index:
        return None
    joined, *deep = (torch.cat([to_device(part, device) for part in layer]) for layer in zip(*states, strict=True))
    return ImageTokens(to_device(index, device, torch.long), joined, tuple(deep))


def rotated_positions(parts: Sequence[PromptPart], device: torch.device) -> Tensor:
    """Return the positions of rotation [T, 3] of the tokens of the parts, for a model with three axes."""
    positions = list[Tensor]()
    for images, start, end in parts:
        known = torch.empty(0, 3, dtype=torch.long)
        if images is not None and images.positions is not None:
            known = images.positions[start:end]
        index = torch.arange(start + len(known), end) + (0 if images is None else position_offset(images))
        positions += [known, index[:, None].expand(-1, 3)]
    return to_device(torch.cat(positions), device)


def position_offset(images: EncodedImages) -> int:
    """Difference of position of rotation and index of the tokens after a prompt."""
    return 0 if images.positions is None else int(images.positions.max()) + 1 - len(images.positions)


def two_way_spans(parts: Sequence[PromptPart]) -> list[tuple[tuple[int, int], ...]]:
    """Return, for each part, (first, end) of the images that overlap it and whose tokens attend to each other in both
    directions."""
    return [
        () if images is None else tuple(span for span in images.spans if start < span[1] and span[0] < end)
        for images, start, end in parts
    ]
