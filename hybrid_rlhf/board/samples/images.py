"""Thumbnails of the images that samples.jsonl names.

Whoever may write to a run's folder has written the lines, which may name any file of the machine: an image is shown if
it has the recorded digest, as who knows the digest has had the file.
"""

from __future__ import annotations

import os.path
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hybrid_rlhf.configs.errors import UserError

if TYPE_CHECKING:
    from PIL import Image


def shown_images(images: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """What a client knows of images."""
    return [{"name": os.path.basename(image["path"]), "digest": image["digest"]} for image in images]


def thumbnail_of(images: Sequence[Mapping[str, Any]], digest: str) -> bytes:
    """A JPEG of the image with a digest.

    Raises:
        UserError: if there is none, or if its file is missing, has changed, is behind a link or is not an image.
    """
    from hybrid_rlhf.data.images.reading import thumbnail  # datasets is imported with the first image

    found = next((image for image in images if image["digest"] == digest), None)
    if found is None:
        raise UserError(f"an image must be one that the sample names, got {digest}: see its images")
    return thumbnail(_read(found))


def data_uri(image: Mapping[str, Any]) -> str:
    """An image as data of another folder have it; raises UserError as `thumbnail_of`."""
    from hybrid_rlhf.data.images.reading import png_uri

    return png_uri(_read(image))


def _read(image: Mapping[str, Any]) -> Image.Image:
    from hybrid_rlhf.data.images.references import ImageReference

    return ImageReference(**image).image()
