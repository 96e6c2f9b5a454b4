"""Freed memory stays with a process that computes on a CPU, and is used again.

glibc gives large blocks back to the system as they are freed and takes new ones a moment later; each of their pages is
then cleared and mapped again at its first touch, a good part of a forward's time. And before 2.38 a freed block of
torch's, which is aligned, does not fit the next one of its size while a splinter beside it waits in malloc's cache of
small blocks: the memory of a step grows to twice what is alive (glibc bug 14581).
"""

from __future__ import annotations

import ctypes
import os
import sys

MALLOC_ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
"""Lets splinters join their neighbours; read at a process's start alone."""
_M_MXFAST, _M_TRIM_THRESHOLD, _M_MMAP_MAX = 1, -1, -4
"""From malloc.h."""


def keep_freed_memory() -> None:
    """Let malloc keep what is freed, unless the environment says how it is to behave (MALLOC_...), or it cannot."""
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, -1)
        library.mallopt(_M_MXFAST, 0)
