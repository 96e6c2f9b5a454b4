"""Translates write errors of libraries into the OSError of the disk that caused them.

safetensors gives the system's error number in its message. torch and DeepSpeed lose it, so a test write finds it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.files.disk_faults import DISK_ERRNOS

_PROBE_BYTES = 2**20
"""More than the free space of a disk on which a write has failed."""


@contextlib.contextmanager
def disk_errors_translated(folder: Path) -> Iterator[None]:
    """Raise an OSError that names the folder for any error in the block that the disk has caused."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        if error.filename is not None or error.errno not in DISK_ERRNOS:
            raise
        raise OSError(error.errno, error.strerror, str(folder)) from error
    except Exception as error:
        found = re.search(r"\(os error (\d+)\)", str(error))
        number = int(found[1]) if found else _probe(folder)
        if number not in DISK_ERRNOS:
            raise
        assert number is not None
        raise OSError(number, os.strerror(number), str(folder)) from error


def _probe(folder: Path) -> int | None:
    """The error number of a test write to the folder; None if it succeeds."""
    probe = folder / f".probe.{os.getpid()}"
    try:
        with probe.open("wb") as file:
            file.write(b"0" * _PROBE_BYTES)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    return None
