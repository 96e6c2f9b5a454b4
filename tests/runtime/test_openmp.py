"""A thread that hands its work over keeps no OpenMP workers, and starts them again when it needs them."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os, time, torch
from hybrid_rlhf.runtime.openmp import release_workers
def threads():
    return len(os.listdir("/proc/self/task"))
torch.set_num_threads(3)
before = threads()
values = torch.arange(1 << 20, dtype=torch.float32)
expected = values.exp().sum()
busy = threads()
release_workers()
end = time.monotonic() + 30
while threads() > before and time.monotonic() < end:  # the kernel lists a thread that has ended a little longer
    time.sleep(0.01)
released = threads()
assert torch.equal(values.exp().sum(), expected)
print(busy - before, released - before, threads() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads in /proc")
def test_workers_end_and_start_again() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "0", "2"]
