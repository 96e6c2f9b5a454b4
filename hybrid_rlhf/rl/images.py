"""The images of a run's prompts. Rollouts have their digests, files have their bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow
from datasets import Dataset
from pyarrow import compute

from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.rules import require
from hybrid_rlhf.data.images.references import ImageReference, tokenised_images
from hybrid_rlhf.data.tokenized import TokenizedData
from hybrid_rlhf.rl.types import Rollout
from hybrid_rlhf.runtime.placement import CRITIC_COPY, Placement

if TYPE_CHECKING:
    pass

_KNOWN = 2**16
"""Number of references that are kept."""

ImagesOf = Callable[[Rollout], list[list[ImageReference]] | None]
"""Returns the images of each row; None in a run without images."""


class ImageCatalogue:
    """References to the images of data sets by their digests, the same on every rank."""

    def __init__(self, *data: Dataset) -> None:
        """Take tokenised rows; those without the column have no images."""
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

    @classmethod
    def of(cls, data: TokenizedData) -> Self | None:
        """That of a run's prompts; None if none has an image."""
        return cls(data.train, data.held_out) if data.has_images else None

    def __call__(self, rollout: Rollout) -> list[list[ImageReference]]:
        """The images of each row."""
        if rollout.images is None:
            return [[] for _ in range(len(rollout))]
        return [[self.reference(digest) for digest in of_row] for of_row in rollout.images.of_rows]

    def of_prompt(self, row: Mapping[str, Any]) -> list[ImageReference]:
        """The images of a row of prompts."""
        return [self.reference(digest) for digest in digests_of(row)]

    def _reference(self, digest: str) -> ImageReference:
        place = int(np.searchsorted(self._digests, digest.encode()))
        number, row = self._places[place].tolist()
        return next(image for image in tokenised_images(self._data[number][row]) if image.digest == digest)


def digests_of(row: Mapping[str, Any]) -> list[str]:
    """Digests of the images of a row of prompts."""
    return [image["digest"] for image in row.get("images") or ()]


def require_images_read(config: RLConfig, placement: Placement) -> None:
    """Raise UserError for settings whose prompts must be text."""
    given = {
        "environment": config.environment,
        "rollout.max_lag and placement.sampler": placement.separate_sampler and config.rollout.max_lag > 0,
        "placement.critic_copy": CRITIC_COPY in placement.roles,
        "rollout.backend module": config.rollout.backend == "module",
        "rollout.vllm": config.rollout.backend == "vllm",
        "model.sequence_parallel": config.model.sequence_parallel > 1,
        "model.tensor_parallel": config.model.tensor_parallel > 1,
    }
    name = next((name for name, value in given.items() if value), "")
    require(not name, f"prompts with {name} must be text, got images: leave {name} out, or remove the images")
