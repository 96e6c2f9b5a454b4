"""The images of a prompt on its way to the decoder.

The vision tower runs when a request enters, not when it is queued, and the states are dropped when the prompt is
computed: they exist for the prompts of a few prefills, and within a budget for prompts that are computed again, after
preemption or in a further turn of a conversation.

The prefix tree compares images by their content: equal prompts with different pictures have the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from hybrid_rlhf.data.images.references import ImageReference
from hybrid_rlhf.generation.model.images import position_offset
from hybrid_rlhf.models.vision import EncodedImages
from hybrid_rlhf.runtime.latest import LatestValues

ENCODED_BYTES = 2**28
"""Maximum bytes of the states of images that are kept after their prompts."""


@dataclass(eq=False)
class PromptImages:
    """The images of a prompt. Its samples share one object."""

    places: Sequence[int]
    """Index of each image token in the prompt, ascending."""
    keys: Sequence[int]
    """For each image token the key of its image: negative, so that it is no token id."""
    encode: Callable[[], EncodedImages]
    """Runs the tower, on the thread that decodes, and on each rank that shares the model. The result depends on
    `places` and `keys` alone while the weights of the tower do not change. Where one rank submits a turn for all that
    share the model, the others receive a copy by pickle."""
    offset: int = 0
    """Difference of position of rotation and index after the prompt, from the time when a request of it has entered."""

    @classmethod
    def of(
        cls,
        prompt: Sequence[int],
        image_token_id: int,
        images: Iterable[tuple[int, int]],
        encode: Callable[[], EncodedImages],
    ) -> Self:
        """Find the image tokens of a prompt.

        Args:
            prompt: its token ids.
            image_token_id: the id that carries a state.
            images: for each image its key, of at most 128 bits from a digest of what the tower reads, and its number of
                tokens (`RowImage`).
            encode: as above.
        """
        places = [place for place, token in enumerate(prompt) if token == image_token_id]
        return cls(places, [-1 - key % 2**128 for key, tokens in images for _ in range(tokens)], encode)

    def keyed(self, token_ids: Sequence[int]) -> list[int]:
        """Return the token ids of a sequence that begins with the prompt, with the keys in place of the ids of image
        tokens."""
        keyed = list(token_ids)
        for place, key in zip(self.places, self.keys, strict=True):
            keyed[place] = key
        return keyed


GivenImages = PromptImages | Sequence[ImageReference] | None
"""Images of a prompt, or what an engine finds them by; None or empty: it has none."""


class EncodedPrompts:
    """Encoded images of the latest prompts."""

    def __init__(self, most_bytes: int = ENCODED_BYTES) -> None:
        """Begin empty; `most_bytes`: maximum bytes of the states that are kept."""
        self._kept = LatestValues[EncodedImages](most_bytes, lambda images: (images.states, *images.deep))

    def of(self, images: PromptImages) -> EncodedImages:
        """Return the encoded images of a prompt, and set their offset."""
        # a training forward may read the tower's states too, which it cannot if they are inference tensors
        with torch.inference_mode(mode=False), torch.no_grad():
            encoded = self._kept.get((tuple(images.places), tuple(images.keys)), images.encode)
        images.offset = position_offset(encoded)
        return encoded

    def clear(self) -> None:
        """Forget all images, as after a change of the weights."""
        self._kept.clear()
