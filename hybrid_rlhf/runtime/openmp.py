"""The number of OpenMP threads of a rank, how they wait for each other, and the release of a thread's OpenMP workers.

The ranks of a host share its cores. Unless OMP_NUM_THREADS is set, torchrun gives each rank one thread and prints a
banner about it; work on a CPU, such as the optimizer of offloaded states, benefits from more.

libgomp keeps the workers of each thread that has ever run a parallel loop, and once a process has more workers than
cores, they sleep instead of spinning between two loops. A decoding step has hundreds of loops: decoding in a separate
thread was 9% slower while the thread that loaded the model kept its workers.
"""

from __future__ import annotations

import ctypes
import os

_SOFT = 1
"""`omp_pause_soft` of OpenMP 5.0 (section 3.2.44): the next parallel loop starts workers again."""


def threads_per_rank(local_ranks: int) -> int:
    """Cores of the host for each of its ranks, at least 1."""
    return max(1, (os.cpu_count() or 1) // local_ranks)


def shared_cores(local_ranks: int) -> dict[str, str]:
    """Variables for a launcher of several ranks on this host; {} if OMP_NUM_THREADS is set."""
    if local_ranks == 1 or "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(threads_per_rank(local_ranks))}


def wait_asleep() -> None:
    """Let the OpenMP threads of this process sleep after a short spin when they wait for each other, unless the
    environment says how they wait. Call it before torch is imported.

    libgomp spins 300,000 times, milliseconds. If other processes need the cores, the thread that is waited for does not
    run meanwhile, and the one that spins uses up its own share: a forward and backward of 320 tokens of a 135M model on
    two busy cores took 40 s, and 3 s with this limit. On free cores decoding is 4% slower.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "10000"


def release_workers() -> None:
    """End the workers of the calling thread; no effect if torch does not use libgomp."""
    try:
        library = ctypes.CDLL("libgomp.so.1")  # the library that torch has loaded
        pause = library.omp_pause_resource_all
    except (OSError, AttributeError):  # another OpenMP library, or a version before 5.0
        return
    pause(_SOFT)
