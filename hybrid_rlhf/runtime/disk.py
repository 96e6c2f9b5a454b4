"""A full disk by its name: writers report it as whatever their library calls it."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

_FULL_BYTES = 2**20


@contextlib.contextmanager
def full_disk_named(folder: Path) -> Iterator[None]:
    """Turn a write that failed for want of room into OSError(ENOSPC) with the folder in it."""
    try:
        yield
    except Exception as error:
        if shutil.disk_usage(folder).free < _FULL_BYTES:
            raise OSError(errno.ENOSPC, "No space left on device", str(folder)) from error
        raise
