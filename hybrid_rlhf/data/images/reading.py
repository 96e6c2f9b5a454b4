"""Decodes images as a tower reads them: whole, upright, in RGB, within limits that are checked before decoding.

A file is what its bytes say, not its name. Only decoders of Pillow for common formats are tried: others start programs
(EPS) or are rarely tested. Transparent parts become white, as in vLLM and qwen-vl-utils, and 16 bits the upper 8.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from hybrid_rlhf.configs.errors import UserError

if TYPE_CHECKING:
    from PIL import Image, ImageFile

T = TypeVar("T")
MOST_BYTES = 64 * 2**20
"""Longest file or data URI."""
_MOST_PIXELS = 64 * 2**20
_MANY_PIXELS = 2**22
_LARGE = threading.Lock()
"""Held while an image of more pixels is decoded: a file of 0.3 MB may need 0.6 GB, and clients send several."""
THUMBNAIL_PIXELS = 256
"""Longest side of a thumbnail."""
_MOST_RATIO = 200
"""Longest side of an image in units of the other; processors scale thinner ones to nothing."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_RULE = "an image must be a complete PNG, JPEG, WebP, GIF or BMP file"
_FIX = "replace it or remove the row"


def require_pillow() -> None:
    """Raise a UserError without Pillow, which is optional."""
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise UserError("images need Pillow, which is not installed: run pip install 'hybrid_rlhf[vision]'") from error


def open_image(content: bytes, name: str, most: tuple[int, int] = (_MOST_PIXELS, _MOST_PIXELS)) -> Image.Image:
    """Decode an image; of an animated one, the first frame.

    Args:
        content: bytes of the file.
        name: what an error calls it.
        most: sides to which it is scaled down.

    Raises:
        UserError: for a file that is damaged, cut off, too large, too thin, or of another format.
    """
    return _read(content, name, lambda image: _scaled(_as_rgb(image), most))


def checked_size(content: bytes, name: str) -> tuple[int, int]:
    """The size of `open_image`, which raises the same errors; quicker, as no pixels are computed but for the check."""
    return _read(content, name, _upright_size)


def media_type(content: bytes, name: str) -> str:
    """The media type of an image, such as image/png; raises the same errors for its header."""
    return _read(content, name, lambda image: image.get_format_mimetype() or "")


def _read(content: bytes, name: str, read: Callable[[ImageFile.ImageFile], T]) -> T:
    """What a function reads of an image that may be opened."""
    require_pillow()
    from PIL import Image

    require_size(len(content), name)
    try:
        image = Image.open(io.BytesIO(content), formats=_FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_many_pixels(f"{name} has more") from error
    except Exception as error:  # noqa: BLE001 - decoders raise errors of many types for faulty bytes
        raise UserError(f"{_RULE}, {name} is none: {_FIX}") from error
    width, height = image.size
    if width * height > _MOST_PIXELS:
        raise _too_many_pixels(f"{name} has {width}x{height}")
    if max(width, height) > _MOST_RATIO * min(width, height):
        raise UserError(
            f"the longer side of an image must be at most {_MOST_RATIO} times the shorter, {name} has "
            f"{width}x{height}: {_FIX}"
        )
    try:
        with _LARGE if width * height > _MANY_PIXELS else contextlib.nullcontext():
            return read(image)
    except Exception as error:  # noqa: BLE001 - as above
        raise UserError(f"{_RULE}, {name} is damaged or cut off: {_FIX}") from error


def require_size(size: int, name: str) -> None:
    """Raise a UserError for more bytes than an image may have."""
    if size > MOST_BYTES:
        raise UserError(f"an image has at most {MOST_BYTES:,} bytes, {name} has {size:,}: scale or compress it")


def png(image: Image.Image) -> bytes:
    """The bytes of a file with an image, as the tower reads it."""
    stored = io.BytesIO()
    _as_rgb(image.copy()).save(stored, "PNG")
    return stored.getvalue()


def png_uri(image: Image.Image) -> str:
    """A data URI with the file of `png`."""
    return f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"


def thumbnail(image: Image.Image) -> bytes:
    """A small JPEG of an image in RGB, without what its file says besides pixels."""
    small = image.copy()
    small.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
    small.info.clear()
    stored = io.BytesIO()
    small.save(stored, "JPEG")
    return stored.getvalue()


def size_within(size: tuple[int, int], max_pixels: int) -> tuple[int, int]:
    """A size with at most a number of pixels, and the same ratio of sides but for rounding."""
    factor = min(1.0, math.sqrt(max_pixels / (size[0] * size[1])))
    sides = [max(1, int(side * factor)) for side in size]
    width, height = (min(side, _MOST_RATIO * min(sides), max_pixels) for side in sides)
    return width, height


def image_digest(content: bytes, size: tuple[int, int]) -> str:
    """128 bits of hexadecimal digits that differ for different bytes of a file, or sizes to which it is scaled."""
    return hashlib.sha256(b"%d %d " % size + content).hexdigest()[:32]


def _too_many_pixels(found: str) -> UserError:
    return UserError(f"an image has at most {_MOST_PIXELS:,} pixels, {found}: scale it down")


def _scaled(image: Image.Image, most: tuple[int, int]) -> Image.Image:
    """An image with sides of a length at most."""
    from PIL import Image

    size = min(most[0], image.width), min(most[1], image.height)
    return image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)


def _upright_size(image: ImageFile.ImageFile) -> tuple[int, int]:
    """The size of an image that is upright, all of whose file can be decoded."""
    from PIL import ExifTags

    width, height = image.size
    image.draft(None, (1, 1))  # a JPEG is read as a whole, and most of its pixels are not computed
    image.load()
    return (height, width) if image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8) else (width, height)


def _as_rgb(image: Image.Image) -> Image.Image:
    """An image of the caller's own upright, without transparency."""
    from PIL import Image, ImageOps

    image.load()
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith("I;16"):  # which `convert` would clip
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        opaque = Image.new("RGB", image.size, "white")
        image = image if image.mode == "RGBA" else image.convert("RGBA")
        opaque.paste(image, mask=image)
        return opaque
    return image if image.mode == "RGB" else image.convert("RGB")
