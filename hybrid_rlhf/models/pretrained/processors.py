"""Files of a processor, which turns images and sound into a model's inputs.

They are copied unchanged from the model that was loaded into the one that is saved: training on text does not read
them, and a processor of transformers that reads and writes them can lose settings.
"""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel
from transformers.utils import (
    FEATURE_EXTRACTOR_NAME,
    PROCESSOR_NAME,
    VIDEO_PROCESSOR_NAME,
    cached_file,
)

from hybrid_rlhf.models.families import unread_weights

PROCESSOR_FILES = (PROCESSOR_NAME, FEATURE_EXTRACTOR_NAME, VIDEO_PROCESSOR_NAME)


def keep_processor(lm: PreTrainedModel, path: str) -> None:
    """Keep the processor's files of a resolved model with its weights, for `write_processor`: the folder may be gone
    by then. A model without towers has none."""
    files = {}
    if unread_weights(lm, (name for name, _ in lm.named_parameters())):
        found = {name: cached_file(path, name, _raise_exceptions_for_missing_entries=False) for name in PROCESSOR_FILES}
        files = {name: Path(file).read_bytes() for name, file in found.items() if file is not None}
    vars(lm)["processor_files"] = files


def write_processor(lm: PreTrainedModel, folder: Path) -> None:
    """Write the kept files; none for a model that was not loaded from a folder."""
    for name, content in vars(lm).get("processor_files", {}).items():
        (folder / name).write_bytes(content)
