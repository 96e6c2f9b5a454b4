"""Messages for errors of a disk, before a run writes and after, and the OSError behind write errors of libraries.

safetensors has the system's error number in its message. torch and DeepSpeed omit it, so a test write finds it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.observability.logs import logger

_OUTPUT = "choose another output_dir"
_FAULTS = {
    errno.ENOSPC: ("no space left on the device of {}", "free some and resume"),
    errno.EDQUOT: ("the disk quota is used up at {}", f"free some, or {_OUTPUT}, and resume"),
    errno.EFBIG: (
        "a file got larger than may be at {}",
        "raise the limit (ulimit -f), or the file system's, and resume",
    ),
    errno.EROFS: ("the file system of {} takes no writes", f"mount it for writing, or {_OUTPUT}; see dmesg if it did"),
    errno.EIO: ("the device of {} fails", f"see dmesg, save what is there, and {_OUTPUT} on another"),
    errno.ESTALE: ("the network file system of {} has lost it", "mount it again and resume"),
    errno.EACCES: ("this user may not use {}", f"change its owner or mode (chown, chmod), or {_OUTPUT}"),
    errno.EPERM: ("this user may not use {}", f"change its owner, mode or attributes (lsattr), or {_OUTPUT}"),
}
_OF_FILES_ALONE = (errno.EACCES, errno.EPERM)
DISK_ERRNOS = frozenset(_FAULTS)
FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
_PROBE_BYTES = 2**20
"""Size of a test write: more than the free space of a disk on which a write has failed."""


def make_writable(folder: Path) -> str | None:
    """Create an output_dir; return why it cannot be written, or None."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        return f"output_dir must be a writable folder, {folder} is not ({error.strerror}): choose another"
    free_gib = shutil.disk_usage(folder).free / 2**30
    if free_gib < 0.05:
        return f"output_dir needs 0.05 GiB of disk space, {folder} has {free_gib:.2f}: free some, or choose another"
    return None


def disk_fault(error: OSError) -> str | None:
    """The fault with the file or folder, and what to do; None if the error is not a disk's."""
    if error.errno not in _FAULTS or (error.errno in _OF_FILES_ALONE and error.filename is None):
        return None
    fault, fix = _FAULTS[error.errno]
    return f"{fault.format(error.filename or 'the output folder')}: {fix}"


@contextlib.contextmanager
def disk_errors_translated(folder: Path) -> Iterator[None]:
    """Context that raises an OSError with the folder's name for any error in the block that the disk has caused."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        if error.filename is not None or error.errno not in DISK_ERRNOS:
            raise
        raise OSError(error.errno, error.strerror, str(folder)) from error
    except Exception as error:
        match = re.search(r"\(os error (\d+)\)", str(error))
        number = int(match[1]) if match else _probe(folder)
        if number not in DISK_ERRNOS:
            raise
        assert number is not None
        raise OSError(number, os.strerror(number), str(folder)) from error


@contextlib.contextmanager
def kept_if_full(path: Path) -> Iterator[None]:
    """Context that writes a file or folder anew; on a full disk the one that is there stays, with a warning."""
    try:
        with disk_errors_translated(path.parent):
            yield
    except OSError as error:
        if error.errno not in FULL_ERRNOS or not path.exists():
            raise
        logger.warning("%s stays as it was, since the disk is full", path)


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
