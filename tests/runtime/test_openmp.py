"""Ranks share the cores of their host; a thread that hands its work over keeps no OpenMP workers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hybrid_rlhf.runtime.openmp import shared_cores

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


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp is torch's OpenMP library on Linux")
@pytest.mark.parametrize(("given", "found"), [({}, "10000"), ({"GOMP_SPINCOUNT": "77"}, "77")])
def test_threads_of_a_command_spin_briefly_unless_told(given: dict[str, str], found: str) -> None:
    """libgomp reads it when torch is imported. By default it spins for milliseconds, and a run beside others on these
    cores takes ten times as long."""
    script = "from hybrid_rlhf.runtime.command_line import user_errors\nwith user_errors():\n    import torch"
    inherited = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    environment = {**inherited, "OMP_DISPLAY_ENV": "verbose", **given}
    line = [sys.executable, "-c", script]
    said = subprocess.run(line, capture_output=True, text=True, check=True, env=environment).stderr
    assert f"GOMP_SPINCOUNT = '{found}'" in said


def test_ranks_share_the_cores_of_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert [shared_cores(ranks) for ranks in (1, 8, 4, 100)] == [
        {},
        {"OMP_NUM_THREADS": "1"},
        {"OMP_NUM_THREADS": "3"},
        {"OMP_NUM_THREADS": "1"},
    ]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert shared_cores(4) == {}, "the user's choice"
