"""Loads the images that rows refer to, as the model of an engine reads them, and encodes prompts with images.

Rows keep references, and pixels are made when a model is called: a rollout of thousands of rows has no pixels in
memory. Those of the last images are kept within a budget, as a step calls models several times with the same images.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat.conversation import encode_prompt
from hybrid_rlhf.data.chat.messages import Message, Tools, read_message
from hybrid_rlhf.data.images.expansion import ImageRules, RowImages
from hybrid_rlhf.data.images.references import ImageReference
from hybrid_rlhf.data.rows.placing import place_images
from hybrid_rlhf.generation.batching.images import PromptImages
from hybrid_rlhf.models.families.vision import images_refused
from hybrid_rlhf.models.pretrained.processors import ImageProcessor
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
from hybrid_rlhf.models.structure import towers_of
from hybrid_rlhf.models.vision import FeatureCache, ImageEncoder, Images, RowImage
from hybrid_rlhf.runtime.latest import LatestValues

KEPT_PIXEL_BYTES = 256 * 2**20
"""Pixels that are kept."""
CONVERSATION = "the conversation"
"""Name of messages without a file, in errors."""


def image_rules(
    path: str, tokenizer: PreTrainedTokenizerBase, *, max_pixels: int, trust_remote_code: bool = False
) -> ImageRules:
    """How the images of rows are encoded for a resolved model; rows without images need no processor."""
    try:
        processor = ImageProcessor.load(path, tokenizer, trust_remote_code=trust_remote_code)
    except UserError as error:
        return ImageRules(refusal=str(error))
    return ImageRules(processor, max_pixels=max_pixels)


class ImageLoader:
    """Images by reference, for one model. Threads may call it."""

    def __init__(self, processor: ImageProcessor) -> None:
        """Take the model's processor."""
        self.processor = processor
        self._kept = LatestValues[dict[str, Tensor]](KEPT_PIXEL_BYTES, dict.values)
        self._blank = processor.blank()

    @staticmethod
    def of(path: str, *, trust_remote_code: bool = False) -> ImageLoader:
        """The loader of a resolved model.

        Raises:
            UserError: as in `ImageProcessor.load`.
        """
        tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
        return ImageLoader(ImageProcessor.load(path, tokenizer, trust_remote_code=trust_remote_code))

    def images(self, rows: Sequence[Sequence[ImageReference]], cache: FeatureCache | None = None) -> Images:
        """The images of each row. With a cache ranks need not call the tower together."""
        blank = self._blank if cache is None else None
        return Images([[self.row_image(reference) for reference in row] for row in rows], blank, cache)

    @functools.cached_property
    def probe(self) -> RowImage:
        """A fixed image with which towers are compared."""
        from PIL import Image

        return self.processor.row_image(Image.radial_gradient("L").resize((64, 48)).convert("RGB"), key=-1)

    def row_image(self, reference: ImageReference) -> RowImage:
        """An image of a row."""
        tokens = self.processor.tokens(reference.width, reference.height)
        return RowImage(functools.partial(self._load, reference), tokens, int(reference.digest, 16))

    def _load(self, reference: ImageReference) -> dict[str, Tensor]:
        return self._kept.get(reference.digest, lambda: self.processor.pixels([reference.image()]))


class ModelImages:
    """What the engines of a model share to read images, made when the first image is read."""

    def __init__(self, path: str, *, trust_remote_code: bool = False, is_frozen: bool = True) -> None:
        """Take a resolved path; `is_frozen`: no engine changes the tower."""
        self._path = path
        self._trust_remote_code = trust_remote_code
        self.cache = FeatureCache() if is_frozen else None
        """For engines whose tower is whole on this rank."""

    @functools.cached_property
    def loader(self) -> ImageLoader:
        """The model's loader."""
        return ImageLoader.of(self._path, trust_remote_code=self._trust_remote_code)


class ImageReader:
    """Images of prompts by reference, for a model that generates."""

    def __init__(self, loader: ImageLoader, encoder: ImageEncoder) -> None:
        """Take the model's loader and its tower, whose weights may change at weight syncs."""
        self._loader = loader
        self._encoder = encoder
        self.layout = loader.processor
        """Writes the texts of images, for `ImageRules`."""

    def prompt_images(self, input_ids: Sequence[int], references: Sequence[ImageReference]) -> PromptImages | None:
        """The images of a prompt of token ids; None if it has none."""
        if not references:
            return None
        images = self._row_images(references)
        return PromptImages.of(
            input_ids,
            self._encoder.token_id,
            [(image.key, image.tokens) for image in images],
            functools.partial(self._encoder.encode, images, list(input_ids)),
        )

    def prepare(self, references: Sequence[ImageReference]) -> None:
        """Compute pixels now, so that the thread that decodes does not."""
        for image in self._row_images(references):
            image.load()

    def _row_images(self, references: Sequence[ImageReference]) -> list[RowImage]:
        return [self._loader.row_image(reference) for reference in references]


class SavedImageReader:
    """Makes the reader of a saved model's images at the first image: text needs neither Pillow nor processor files."""

    def __init__(self, lm: PreTrainedModel, path: str, device: torch.device, *, trust_remote_code: bool) -> None:
        """Keep the tower of a model, whose other weights may be freed, on a device, and the path of its processor."""
        self._tower = towers_of(lm).to(device)  # type: ignore[arg-type]
        self._path = path
        self._trust_remote_code = trust_remote_code

    @staticmethod
    def find(
        lm: PreTrainedModel, path: str, device: torch.device, *, trust_remote_code: bool = False
    ) -> SavedImageReader | None:
        """The one of a model that was loaded from a path; None if there is no path or the model reads no images."""
        if not path or images_refused(lm.config) is not None:
            return None
        return SavedImageReader(lm, path, device, trust_remote_code=trust_remote_code)

    def __call__(self) -> ImageReader:
        """The reader; raises UserError as `ImageProcessor.load`."""
        return self._reader

    @functools.cached_property
    def _reader(self) -> ImageReader:
        loader = ImageLoader.of(self._path, trust_remote_code=self._trust_remote_code)
        return ImageReader(loader, ImageEncoder(self._tower))

    @torch.no_grad()
    def replace_weights(self, lm: PreTrainedModel) -> None:
        """Take the tower's weights of another model of the same architecture."""
        weights = dict(lm.named_parameters())
        for name, weight in self._tower.named_parameters():
            weight.copy_(weights[name])


def marked(messages: Sequence[Message]) -> tuple[list[Message], list[Any]]:
    """Messages as a program writes them, with marks of images, and these: a content is text, or a list of parts
    `{"type": "text", "text": ...}` and `{"type": "image", "image": ...}` with an image of Pillow, bytes or a data
    URI."""
    read = [
        read_message(CONVERSATION, message, with_images=True) if isinstance(message.get("content"), list) else message
        for message in messages
    ]
    (sources,) = place_images(CONVERSATION, {}, read)
    return read, sources


class PromptEncoder:
    """Encodes prompts for an engine, with their images."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        image_reader: Callable[[], ImageReader] | None,
        *,
        max_pixels: int = 2**20,
    ) -> None:
        """Take the model's tokenizer, what its engine reads images with, and the pixels to which they are scaled
        down."""
        self._tokenizer = tokenizer
        self._image_reader = image_reader
        self._max_pixels = max_pixels

    def __call__(
        self, location: str, messages: Sequence[Message], sources: Sequence[Any] = (), *, tools: Tools | None = None
    ) -> tuple[list[int], PromptImages | None]:
        """The token ids of a conversation, as `encode_prompt`, and its images.

        Args:
            location: beginning of errors about images: FILE:LINE, if their paths are relative to the file's folder.
            messages: the turns, with marks of images (`place_images`).
            sources: the images in the order of their marks, as `read_reference` takes them.
            tools: functions that the assistant may call.

        Raises:
            UserError: for an image that cannot be read, or a model that reads none.
        """
        references = []
        if sources:
            if self._image_reader is None:
                raise UserError(
                    f"{location}: images need a vision-language model, this one reads text: remove the images"
                )
            references = ImageRules(max_pixels=self._max_pixels).references(location, sources)
        return self.with_references(messages, references, tools=tools)

    def conversation(
        self, messages: Sequence[Message], *, tools: Tools | None = None
    ) -> tuple[list[int], PromptImages | None]:
        """As above, for messages as a program writes them."""
        return self(CONVERSATION, *marked(messages), tools=tools)

    def with_references(
        self, messages: Sequence[Message], references: list[ImageReference], *, tools: Tools | None = None
    ) -> tuple[list[int], PromptImages | None]:
        """As above, with images that have been read."""
        if not references or self._image_reader is None:
            return encode_prompt(messages, self._tokenizer, tools=tools), None
        reader = self._image_reader()
        ids = encode_prompt(messages, self._tokenizer, tools=tools, images=RowImages(reader.layout, references))
        return ids, reader.prompt_images(ids, references)
