"""A disk that fails by its name: writers report it as whatever their library calls it.

safetensors has the system's number in its words; torch and deepspeed lose it, so the disk itself is asked.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from hybrid_rlhf.configs.disk_faults import DISK_ERRNOS
from hybrid_rlhf.configs.errors import UserError

_PROBE_BYTES = 2**20
"""More than what is left of a disk on which a write has failed."""


@contextlib.contextmanager
def full_disk_named(folder: Path) -> Iterator[None]:
    """Turn a write that failed for the disk's sake into the OSError of that fault, with the folder in it."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        if error.filename is not None or error.errno not in DISK_ERRNOS:
            raise
        raise OSError(error.errno, error.strerror, str(folder)) from error
    except Exception as error:
        said = re.search(r"\(os error (\d+)\)", str(error))
        fault = int(said[1]) if said else _probed(folder)
        if fault not in DISK_ERRNOS:
            raise
        assert fault is not None
        raise OSError(fault, os.strerror(fault), str(folder)) from error


def _probed(folder: Path) -> int | None:
    """The number of the fault that a write to the folder meets now."""
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
