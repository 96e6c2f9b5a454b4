"""A file that is whole or not there: written beside its place, brought to the disk, and renamed.

Why here: the lowest floor writes one too.
"""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a small file; one that was there stays as it was until the new one is whole.

    Raises:
        OSError: when it cannot be written; nothing is left beside it.
    """
    beside = path.with_name(f"{path.name}.partial")
    try:
        with beside.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
