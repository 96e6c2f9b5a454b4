"""Loads the images that rows refer to, as the model of an engine reads them.

Rows keep references, and pixels are made when a model is called: a rollout of thousands of rows has no pixels in
memory. Those of the last images are kept within a budget, as a step calls models several times with the same images.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor

from hybrid_rlhf.data.images.references import ImageReference
from hybrid_rlhf.generation.batching.images import PromptImages
from hybrid_rlhf.models.pretrained.processors import ImageProcessor
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
from hybrid_rlhf.models.vision import ImageEncoder, Images, RowImage

KEPT_PIXEL_BYTES = 256 * 2**20
"""Pixels that are kept."""


class ImageLoader:
    """Images by reference, for one model. Threads may call it."""

    def __init__(self, processor: ImageProcessor) -> None:
        """Take the model's processor."""
        self._processor = processor
        self._kept: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._blank = processor.blank()

    @staticmethod
    def of(path: str, *, trust_remote_code: bool = False) -> ImageLoader:
        """The loader of a resolved model.

        Raises:
            UserError: as in `ImageProcessor.load`.
        """
        tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
        return ImageLoader(ImageProcessor.load(path, tokenizer, trust_remote_code=trust_remote_code))

    def images(self, rows: Sequence[Sequence[ImageReference]]) -> Images:
        """The images of each row."""
        return Images([[self.row_image(reference) for reference in row] for row in rows], self._blank)

    def row_image(self, reference: ImageReference) -> RowImage:
        """An image of a row."""
        tokens = self._processor.tokens(reference.width, reference.height)
        return RowImage(functools.partial(self._load, reference), tokens, int(reference.digest, 16))

    def _load(self, reference: ImageReference) -> dict[str, Tensor]:
        with self._lock:
            if reference.digest in self._kept:
                self._kept.move_to_end(reference.digest)
                return self._kept[reference.digest]
        arguments = self._processor.pixels([reference.image()])
        with self._lock:
            if reference.digest not in self._kept:
                self._kept[reference.digest] = arguments
                self._bytes += _bytes_of(arguments)
            while self._bytes > KEPT_PIXEL_BYTES and len(self._kept) > 1:
                self._bytes -= _bytes_of(self._kept.popitem(last=False)[1])
        return arguments


class ImageReader:
    """Images of prompts by reference, for a model that generates."""

    def __init__(self, loader: ImageLoader, encoder: ImageEncoder) -> None:
        """Take the model's loader and its tower, whose weights may change at weight syncs."""
        self._loader = loader
        self._encoder = encoder

    def prompt_images(self, input_ids: Sequence[int], references: Sequence[ImageReference]) -> PromptImages | None:
        """The images of a prompt of token ids; None if it has none."""
        if not references:
            return None
        images = [self._loader.row_image(reference) for reference in references]
        return PromptImages.of(
            input_ids,
            self._encoder.token_id,
            [(image.key, image.tokens) for image in images],
            functools.partial(self._encoder.encode, images, list(input_ids)),
        )


def _bytes_of(arguments: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in arguments.values())
