"""Files that outlive a crash: brought to the disk itself, and seen to be whole."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

_CHUNK_BYTES = 2**24


def flush(path: Path) -> None:
    """Return when what was written to a file, or renamed in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(file: Path) -> int:
    """CRC-32 of a file: it finds what a disk or a copy got wrong, not what a person changed."""
    value = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value
