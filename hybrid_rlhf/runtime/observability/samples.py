"""Sample completions of a run: samples.jsonl, and a few of them on the console."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid_rlhf.runtime.files.json_lines import JsonLinesFile, drop_lines_after
from hybrid_rlhf.runtime.files.names import SAMPLES_FILE
from hybrid_rlhf.runtime.observability.logs import logger, shortened

_SHOWN = 2
SHOWN_IMAGES = "shown_images"


def recorded_images(row: Mapping[str, Any], key: str = "images") -> list[dict[str, Any]]:
    """The images of the prompt of a line, as arguments of `ImageReference`, without what other files have there; with
    `SHOWN_IMAGES`, those that an environment has shown.

    A line names the digest and the file of each, also of one that the row had as bytes.
    """
    types = {"digest": str, "width": int, "height": int, "path": str}
    listed = row.get(key)
    return [
        {name: image[name] for name in types}
        for image in (listed if isinstance(listed, list) else ())
        if isinstance(image, dict)
        and all(isinstance(image.get(name), kind) for name, kind in types.items())
        and image["width"] > 0 < image["height"]
    ]


def episode_images(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The images of a line: those of its prompt, then those that an environment has shown."""
    return recorded_images(row) + recorded_images(row, SHOWN_IMAGES)


class SampleLog:
    """Writes samples of some steps."""

    def __init__(self, folder: Path, *, enabled: bool) -> None:
        """Take the run folder, and whether this rank writes."""
        self._path = folder / SAMPLES_FILE
        self._enabled = enabled
        self._lines = JsonLinesFile(self._path)

    def resume(self, step: int) -> None:
        """Drop the lines after a step, written by an interrupted run.

        Raises:
            OSError: if they cannot be dropped.
        """
        if self._enabled:
            drop_lines_after(self._path, step)

    def flush(self) -> None:
        """Flush the lines to disk: a checkpoint must not be ahead of them."""
        self._lines.flush()

    def write(self, step: int, samples: Sequence[dict[str, Any]]) -> None:
        """Append the rows of a step."""
        if not self._enabled:
            return
        self._lines.append({"step": step, **row} for row in samples)
        for row in samples[:_SHOWN]:
            question = row["prompt"][-1].get("content", "")
            logger.info(
                "  sample  %s  ->  %s  (score %.2f)",
                shortened(question, 100),
                shortened(row["completion"], 100),
                row["score"],
            )
