"""What becomes of the images of rows: references, and in rendered text the text that a model reads in their places.

In the text of a message, and in what a chat template renders, a mark stands for each image, or precedes what the
template writes for it. The number of tokens of an image depends on its size alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.images.references import ImageReference, read_reference, stored_images
from hybrid_rlhf.runtime.observability.logs import shortened

IMAGE_MARK = "\ufdd0\ufdd1"
"""Stands for an image; Unicode has no characters there."""
WRITTEN = "<image>"
"""Stands for an image in the text of rows with images (LLaVA, verl, ms-swift)."""
IMAGES_KEY = IMAGE_MARK
"""Key of a message that is read with its images: one for each mark, None for an image of the row's column."""
TEXT_ONLY = "a row must be text, got an image: remove the row"


class ImageLayout(Protocol):
    """The texts of a model's images."""

    placeholder: str
    """What a chat template writes for one image."""
    banned_ids: tuple[int, ...]
    """Ids that stand for images: text must not have them."""
    key: str
    """Digest of all settings that texts and pixels depend on."""

    def expansion_text(self, width: int, height: int) -> str:
        """The text that takes the placeholder's place for an image of a size."""

    def expansion(self, width: int, height: int) -> list[int]:
        """Token ids of that text."""


@dataclass(frozen=True)
class ImageRules:
    """What becomes of the images of rows."""

    layout: ImageLayout | None = None
    """The model's; None: rows cannot be encoded with images."""
    refusal: str = ""
    """Why rows may have no images, as an error without its last fix; empty: they may."""
    max_pixels: int = 2**20
    """Larger images are scaled down."""
    store: Path | None = None
    """See `read_reference`."""

    @property
    def settings(self) -> dict[str, Any]:
        """What tokens depend on."""
        return {} if self.layout is None else {"images": self.layout.key, "max_pixels": self.max_pixels}

    def tokens(self, references: Sequence[ImageReference]) -> int:
        """Number of tokens that the model reads for images."""
        return sum(len(self.layout.expansion(each.width, each.height)) for each in references) if self.layout else 0

    def references(self, location: str, sources: Sequence[Any]) -> list[ImageReference]:
        """Read the images of a row, in the order of their marks.

        Raises:
            UserError: for an image that cannot be read.
        """
        try:
            folder = rows_folder(location) if sources else None
            return [
                read_reference(source, f"image {number}", folder=folder, max_pixels=self.max_pixels, store=self.store)
                for number, source in enumerate(sources, start=1)
            ]
        except UserError as error:
            raise UserError(f"{location}: {error}") from error

    def read(self, location: str, sources: Sequence[Any]) -> RowImages | None:
        """As `references`, for an encoder; None if the model reads no images."""
        return None if self.layout is None else RowImages(self.layout, self.references(location, sources))


@dataclass(frozen=True)
class RowImages:
    """The images of a conversation, in the order of their marks."""

    layout: ImageLayout
    references: list[ImageReference]

    @property
    def digests(self) -> list[str]:
        """Their digests."""
        return [image.digest for image in self.references]

    def some(self, indices: Sequence[int]) -> RowImages:
        """The images of a part of the conversation."""
        return replace(self, references=[self.references[index] for index in indices])

    def expanded(self, texts: Sequence[str]) -> list[str]:
        """Consecutive rendered texts with the text of each image in the place of its mark and placeholder.

        Raises:
            UserError: if the template does not write the model's placeholder for an image.
        """
        references = iter(self.references)
        expanded = []
        for text in texts:
            whole, *marked = text.split(IMAGE_MARK)
            for part in marked:
                before, placeholder, after = part.partition(self.layout.placeholder)
                reference = next(references, None)
                if not placeholder or reference is None:
                    raise UserError(
                        f"the chat template must write {self.layout.placeholder} for an image, got "
                        f"{shortened(part)!r}: set data.chat_template to that of the model"
                    )
                whole += before + self.layout.expansion_text(reference.width, reference.height) + after
            expanded.append(whole)
        return expanded

    def require_no_others(self, input_ids: list[int], count: int, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise a UserError for tokens of images beside those of the first `count` images: they have no pixels."""
        texts = [self.layout.expansion_text(image.width, image.height) for image in self.references[:count]]
        for token in self.layout.banned_ids:
            written = str(tokenizer.convert_ids_to_tokens(token))
            if input_ids.count(token) != sum(text.count(written) for text in texts):
                raise UserError(f"a text must not have {written}, which stands for an image: remove it or the row")


NO_IMAGES = ImageRules(refusal=TEXT_ONLY)


def is_whole(input_ids: list[int], kept: list[int], images: RowImages | None) -> bool:
    """True if the rest of a truncated row has all tokens of its images."""
    banned = () if images is None or len(input_ids) == len(kept) else images.layout.banned_ids
    return all(input_ids.count(token) == kept.count(token) for token in banned)


def stored_columns(
    images: RowImages | None, count: int | None = None, *, order: list[list[int]] | None = None, of_prompt: int = 0
) -> dict[str, Any]:
    """The columns of a row of tokens that describe its images; none for a model that reads no images.

    Args:
        images: those of the row.
        count: number of the first images to which the row is limited.
        order: for each completion, the indices of its images.
        of_prompt: number of the first images that all completions have.
    """
    if images is None:
        return {}
    stored = {"images": stored_images(images.references[:count])}
    if order is None:
        return stored
    return stored | {"image_order": order if stored["images"] else None, "prompt_images": of_prompt}


def rows_folder(location: str) -> Path | None:
    """The folder of the file in which a row is located, FILE:LINE or FILE: row NUMBER; None if it is in no file."""
    name = location.rpartition(":")[0]
    file = Path(name)
    return None if not name else file if file.is_dir() else file.parent if file.is_file() else None
