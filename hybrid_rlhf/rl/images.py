"""The images of a run's prompts and environments. Rollouts have their digests, files have their bytes.

An image that an environment shows is a file of the run's folder, named by its digest: all ranks find it, and so does a
run that resumes from a checkpoint within a step.
"""

from __future__ import annotations

import base64
import functools
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from datasets import Dataset
from pyarrow import compute

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.rules import require
from hybrid_rlhf.data.chat.messages import Message
from hybrid_rlhf.data.images.expansion import NO_IMAGES, WRITTEN, ImageRules, RowImages
from hybrid_rlhf.data.images.reading import media_type, png_uri
from hybrid_rlhf.data.images.references import ImageReference, read_reference, tokenised_images
from hybrid_rlhf.rl.types import Rollout
from hybrid_rlhf.runtime.files.atomic import write_whole
from hybrid_rlhf.runtime.files.reading import regular_file
from hybrid_rlhf.runtime.placement import CRITIC_COPY, Placement

IMAGES = "images"
"""Folder of a run with the images of its environment."""
_KNOWN = 2**16
"""Number of references that are kept."""

ImagesOf = Callable[[Rollout], list[list[ImageReference]] | None]
"""Returns the images of each row; None in a run without images."""


class ImageCatalogue:
    """References to images by their digests, the same on every rank."""

    def __init__(self, *data: Dataset, rules: ImageRules = NO_IMAGES, folders: Sequence[Path] = ()) -> None:
        """Take the images of data sets, and of environments.

        Args:
            data: tokenised rows; those without the column have no images.
            rules: how images that an environment shows are read.
            folders: that to which these are written, and others from which they are copied.
        """
        self.rules = rules
        self._folders = folders
        # whole tables: they stay on the disk, where a selection of their rows would be read with all bytes
        tables = [rows.select_columns(["images"]).data for rows in data if "images" in rows.column_names]
        self._data = [Dataset(table) for table in tables]
        digests, places = [np.array([], "S32")], [np.zeros((0, 2), np.int64)]
        for number, table in enumerate(tables):
            first_row = 0
            for column in table.column("images").chunks:
                if not pyarrow.types.is_null(column.type):
                    found = compute.struct_field(compute.list_flatten(column), "digest").to_numpy(zero_copy_only=False)
                    rows = compute.list_parent_indices(column).to_numpy()
                    digests.append(found.astype("S32"))
                    places.append(np.stack([np.full_like(rows, number), rows + first_row], axis=1))
                first_row += len(column)
        self._digests, first = np.unique(np.concatenate(digests), return_index=True)
        self._places = np.concatenate(places)[first]
        self.reference = functools.lru_cache(_KNOWN)(self._reference)
        """Returns the reference of a digest."""

    @property
    def has_data(self) -> bool:
        """True if the data sets have images."""
        return len(self._digests) > 0

    def read(self, location: str, sources: Sequence[Any]) -> RowImages:
        """Read images that an environment shows, and write each content to the folder once. Threads may call it.

        Args:
            location: beginning of errors.
            sources: as in `read_reference`, except that a path is any that this process may read.

        Raises:
            UserError: for an image that cannot be read.
        """
        images = self.rules.read(location, [_opened(location, source) for source in sources])
        assert images is not None, "a model that reads images"
        for image in images.references:
            if image.content and self._place(image.digest) is None:
                _write_once(self._folders[0] / _name(image.digest), image.content)
        return replace(images, references=[self.reference(image.digest) for image in images.references])

    def __call__(self, rollout: Rollout) -> list[list[ImageReference]]:
        """The images of each row."""
        if rollout.images is None:
            return [[] for _ in range(len(rollout))]
        return [[self.reference(digest) for digest in of_row] for of_row in rollout.images.of_rows]

    def of_prompt(self, row: Mapping[str, Any]) -> list[ImageReference]:
        """The images of a row of prompts."""
        return [self.reference(digest) for digest in digests_of(row)]

    def _place(self, digest: str) -> list[int] | None:
        """The number of the data set that has an image, and its row; None if none has it."""
        place = int(np.searchsorted(self._digests, digest.encode()))
        is_there = self._digests[place : place + 1].tolist() == [digest.encode()]
        return self._places[place].tolist() if is_there else None

    def _reference(self, digest: str) -> ImageReference:
        place = self._place(digest)
        if place is None:
            own, *others = [folder / _name(digest) for folder in self._folders]
            for file in filter(Path.exists, others):
                _write_once(own, file.read_bytes())
            return read_reference(_name(digest), "", folder=self._folders[0], max_pixels=self.rules.max_pixels)
        number, row = place
        return next(image for image in tokenised_images(self._data[number][row]) if image.digest == digest)


def with_parts(messages: Sequence[Message], uris: Iterable[str], *, mark: str = WRITTEN) -> list[Message]:
    """A conversation whose contents with marks of images are the parts of OpenAI's messages."""
    left = list(uris)
    with_images = []
    for message in messages:
        first, *rest = str(message.get("content") or "").split(mark, len(left))  # a text may have more of them
        parts: list[dict[str, Any]] = [{"type": "text", "text": first}] * bool(first)
        for text in rest:
            parts.append({"type": "image_url", "image_url": {"url": left.pop(0)}})
            parts += [{"type": "text", "text": text}] * bool(text)
        with_images.append({**message, "content": parts} if rest else message)
    return with_images


def data_uri(image: ImageReference) -> str:
    """The file of an image, which is the same one when it is read again."""
    content = image.file()
    return f"data:{media_type(content, image.path)};base64,{base64.b64encode(content).decode()}"


def pixels_uri(image: ImageReference) -> str:
    """The pixels of an image, upright and scaled down as the tower reads it."""
    return png_uri(image.image())


def _opened(location: str, source: Any) -> Any:
    """The bytes of a file, or another source as it is."""
    if not isinstance(source, str | Path) or str(source).startswith("data:"):
        return source
    rule = f"{location}: an image must be a file"
    try:
        return regular_file(source, rule).read_bytes()
    except OSError as error:
        raise UserError(f"{rule}, {source} cannot be read ({error.strerror}): check the path") from error


def _write_once(file: Path, content: bytes) -> None:
    """Write a file unless it exists; other episodes and ranks may do so, too."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_name(f"{file.name}.{uuid.uuid4().hex[:8]}")
        write_whole(beside, content)
        os.replace(beside, file)


def _name(digest: str) -> str:
    """The file of an image of an environment, in its folder."""
    return f"{digest[:2]}/{digest}"


def digests_of(row: Mapping[str, Any]) -> list[str]:
    """Digests of the images of a row of prompts."""
    return [image["digest"] for image in row.get("images") or ()]


def require_images_read(config: RLConfig, placement: Placement) -> None:
    """Raise UserError for settings whose prompts must be text."""
    given = {
        "rollout.max_lag and placement.sampler": placement.separate_sampler and config.rollout.max_lag > 0,
        "placement.critic_copy": CRITIC_COPY in placement.roles,
        "rollout.backend module": config.rollout.backend == "module",
        "rollout.vllm": config.rollout.backend == "vllm",
        "model.sequence_parallel": config.model.sequence_parallel > 1,
        "model.tensor_parallel": config.model.tensor_parallel > 1,
    }
    name = next((name for name, value in given.items() if value), "")
    require(not name, f"prompts with {name} must be text, got images: leave {name} out, or remove the images")
