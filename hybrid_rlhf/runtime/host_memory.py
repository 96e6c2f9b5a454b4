"""Makes glibc's malloc keep and reuse freed memory in a process that computes on a CPU.

By default glibc returns large freed blocks to the system and requests new ones shortly after. The kernel then clears
and maps each page again at its first access, which takes a considerable part of a forward pass. Before glibc 2.38,
moreover, a freed aligned block of torch cannot hold the next one of its size while the small remainder beside it stays
in malloc's per-thread cache: the memory of a step grows to twice that of its live tensors (glibc bug 14581).
"""

from __future__ import annotations

import ctypes
import os
import sys

MALLOC_ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
"""Lets small remainders merge with their neighbours; glibc reads it only when a process starts."""
# Constants of malloc.h.
_M_MXFAST = 1
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def keep_freed_memory() -> None:
    """Make malloc keep freed memory, unless MALLOC_... variables configure it or the platform has no mallopt."""
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, -1)
        library.mallopt(_M_MXFAST, 0)
