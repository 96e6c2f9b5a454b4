"""Undoes what a start wrote to a run folder, when a user's error ends it before its loop: the next one is then new."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from hybrid_rlhf.runtime.files.atomic import write_whole
from hybrid_rlhf.runtime.files.names import LOG_FILE


def contents(folder: Path, names: Iterable[str]) -> dict[str, bytes | None]:
    """What files of a folder contain; none: there is no such file."""
    return {name: (folder / name).read_bytes() if (folder / name).exists() else None for name in names}


def restore(folder: Path, before: Mapping[str, bytes | None]) -> None:
    """Remove the files that were not there, and restore the others; an older log goes on."""
    for name, content in before.items():
        with contextlib.suppress(OSError):  # the user's error is the one to report
            if content is None:
                (folder / name).unlink(missing_ok=True)
            elif name != LOG_FILE:
                write_whole(folder / name, content)
