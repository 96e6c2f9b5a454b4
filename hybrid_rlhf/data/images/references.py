"""References to images: where the bytes are, and a digest of them.

Rows travel with references, as pixels would fill the memory of a host. Paths are relative to the folder of the file
that has the row, and stay in it: rows from elsewhere must not make a run read other files, or fetch what they name.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import pyarrow
from pyarrow import compute

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.images.reading import (
    checked_size,
    image_digest,
    open_image,
    png,
    require_pillow,
    require_size,
    scaled,
    size_within,
)
from hybrid_rlhf.runtime.files.reading import open_regular, regular_file
from hybrid_rlhf.runtime.observability.logs import shortened

if TYPE_CHECKING:
    from PIL import Image

_RULE = "an image must be a file in the folder of its rows"
_STAYS = "images must stay as they were tokenised"
_KNOWN_FILES = 2**16
"""Files whose reference is kept: the rows of a data set often share images."""


@dataclass(frozen=True)
class ImageReference:
    """An image as a row of tokens stores it."""

    digest: str
    """See `image_digest`."""
    width: int
    """In pixels, as the tower reads it: upright and scaled down."""
    height: int
    path: str = ""
    """Of its file, absolute; empty if the bytes are here."""
    content: bytes = b""
    version: str = ""
    """Length and time of the file when it was read."""

    def file(self) -> bytes:
        """The bytes of its file.

        Raises:
            UserError: if the file has changed.
        """
        try:
            content = self.content or _file_content(self.path)
        except (OSError, ValueError) as error:  # ValueError: a path that no file can have, of a foreign run
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"{_STAYS}, {self.path} cannot be read ({reason}): put it back") from error
        if image_digest(content, (self.width, self.height)) != self.digest:
            raise UserError(f"{_STAYS}, {self.path} has changed: start the run again")
        return content

    def image(self) -> Image.Image:
        """The image in RGB; raises UserError as `file`."""
        whole = open_image(self.file(), self.path or "that of a row")
        return scaled(whole, (min(self.width, whole.width), min(self.height, whole.height)))


def tokenised_images(row: Mapping[str, Any]) -> list[ImageReference]:
    """The images of a row of tokens, its column `images`; none if it has no such column."""
    return [ImageReference(**image) for image in row.get("images") or ()]


def stored_images(references: list[ImageReference]) -> list[dict[str, Any]] | None:
    """That column; null without images, as Arrow has no type for the items of empty lists."""
    return [asdict(reference) for reference in references] or None


def changed_files(rows: datasets.Dataset) -> list[list[str]]:
    """The path and version of each file of tokenised rows that is not the one that was read."""
    images = rows.data.column("images")
    if pyarrow.types.is_null(images.type):
        return []
    stored = compute.list_flatten(images)
    files = zip(*(compute.struct_field(stored, name).to_pylist() for name in ("path", "version")), strict=True)
    return sorted([path, now] for path, read in {*files} if path and (now := _version(path)) != read)


def read_reference(
    source: Any, name: str, *, folder: Path | None, max_pixels: int, store: Path | None = None
) -> ImageReference:
    """Read an image once, whole.

    Args:
        source: a path relative to `folder`, a data URI, `{"bytes": ..., "path": ...}`, bytes, an image of Pillow, or a
            reference, which is returned.
        name: what an error calls an image without a path.
        folder: the folder of the file that has the row; None: paths are refused.
        max_pixels: larger images are scaled down.
        store: folder to which bytes are written, equal ones once; None: the reference has them.

    Raises:
        UserError: for an image that cannot be read, and for any other source.
    """
    if isinstance(source, ImageReference):
        return source
    if isinstance(source, Mapping):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, str) and not source.startswith("data:"):
        path = _file(source, folder)
        return _file_reference(path, _version(path), max_pixels)
    content = _content(source, name)
    read = _reference(content, name, max_pixels)
    if store is None:
        return replace(read, content=content)
    digest = hashlib.sha256(content).hexdigest()[:32]
    file = store / digest[:2] / digest
    if not file.exists() or file.stat().st_size < len(content):  # from before a crash of the machine
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_name(f"{digest}.{uuid.uuid4().hex[:8]}.partial")  # another run may write it, too
        beside.write_bytes(content)
        os.replace(beside, file)
    return replace(read, path=str(file), version=_version(str(file)))


@lru_cache(_KNOWN_FILES)
def _file_reference(path: str, version: str, max_pixels: int) -> ImageReference:
    return _reference(_file_content(path), path, max_pixels, path=path, version=version)


def _reference(read: bytes, name: str, max_pixels: int, **stored: Any) -> ImageReference:
    size = size_within(checked_size(read, name), max_pixels)
    return ImageReference(image_digest(read, size), *size, **stored)


def _file_content(path: str) -> bytes:
    with open_regular(Path(path)) as file:
        size = os.fstat(file.fileno()).st_size
        require_size(size, path)
        return file.read(size)


def _version(path: str) -> str:
    """The length of a file and its time in nanoseconds; empty if it is missing."""
    try:
        status = os.stat(path)
    except OSError:
        return ""
    return f"{status.st_size} {status.st_mtime_ns}"


def _file(source: str, folder: Path | None) -> str:
    """The path of an image's file, which is in the folder, without symbolic links on the way."""
    if "://" in source or min(source, default=" ") < " ":
        raise UserError(f"{_RULE} or a data URI, got {shortened(source)!r}: download it first")
    if folder is None:
        raise UserError(f"{_RULE}, got {shortened(source)!r} in rows without a file: give its bytes or a data URI")
    root = os.path.realpath(folder)
    path = os.path.normpath(os.path.join(root, source))
    if not Path(path).is_relative_to(root):
        raise UserError(f"{_RULE}, {shortened(source)!r} is outside of it: copy it there")
    file = str(regular_file(path, _RULE))
    if os.path.realpath(file) != path:
        raise UserError(f"{_RULE}, {shortened(source)!r} is behind a symbolic link: copy it there")
    return file


def _content(source: Any, name: str) -> bytes:
    """The bytes of an image that has no path."""
    if isinstance(source, bytes):
        return source
    if isinstance(source, str):
        head, _, encoded = source.partition(",")
        if not head.endswith(";base64"):
            raise UserError(f"a data URI must begin as data:image/png;base64, got {shortened(source)!r}: fix it")
        require_size(len(encoded) * 3 // 4, name)
        try:
            return base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError) as error:
            raise UserError(f"a data URI must be base64, that of {name} is not ({error}): fix it") from error
    require_pillow()
    from PIL import Image

    if isinstance(source, Image.Image):
        try:
            return png(source)
        except Exception as error:  # noqa: BLE001 - Pillow reads a file when pixels are needed
            raise UserError(f"an image of Pillow must have its pixels, {name} has none: call its load()") from error
    raise UserError(f"an image must be a path, a data URI or bytes, {name} is {type(source).__name__}: fix the row")
