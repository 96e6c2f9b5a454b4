"""What a disk's fault means for its owner, on one line."""

from __future__ import annotations

import errno

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


def disk_fault(error: OSError) -> str | None:
    """The fault, the file or folder, and what to do; none where the error is no disk's."""
    if error.errno not in _FAULTS or (error.errno in _OF_FILES_ALONE and error.filename is None):
        return None
    fault, fix = _FAULTS[error.errno]
    return f"{fault.format(error.filename or 'the output folder')}: {fix}"
