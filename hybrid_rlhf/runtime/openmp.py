"""Releases the OpenMP workers of a thread that hands its work over to another.

Why: libgomp keeps the workers of each thread that has ever run a parallel loop, and once a process has more of them
than cores, workers sleep instead of spinning between two loops. A decoding step has hundreds of loops: a batch that
decodes on a thread of its own was 9% slower while the thread that loaded the model kept its workers.
"""

from __future__ import annotations

import ctypes

_SOFT = 1
"""`omp_pause_soft` of OpenMP 5.0 (section 3.2.44): the next parallel loop starts workers again."""


def release_workers() -> None:
    """End the workers of the calling thread; without effect where torch does not use libgomp."""
    try:
        library = ctypes.CDLL("libgomp.so.1")  # the one that torch has loaded
        pause = library.omp_pause_resource_all
    except (OSError, AttributeError):  # another OpenMP, or one from before 5.0
        return
    pause(_SOFT)
