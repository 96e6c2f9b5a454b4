"""The limit of open files and connections of this process: 1024 on most systems, which servers and tools exceed."""

from __future__ import annotations

import resource

MOST_DESCRIPTORS = 16_384


def raise_descriptors() -> int:
    """Raise the limit as far as this process may, at most to `MOST_DESCRIPTORS`; returns how many of these it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, MOST_DESCRIPTORS)
