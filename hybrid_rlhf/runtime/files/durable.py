"""Files that survive a crash: flushed to disk and verified by checksum."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

_CHUNK_BYTES = 2**24


def flush(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(file: Path) -> int:
    """CRC-32 of a file: it detects errors of a disk or a copy, not deliberate changes."""
    value = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value
