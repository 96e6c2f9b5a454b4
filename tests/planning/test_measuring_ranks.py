"""Processes that calibrate measures with."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

from hybrid_rlhf.planning.machines.ranks import run_on_ranks
from hybrid_rlhf.runtime.world import World
from tests.support.runs import ENVIRONMENT, ROOT


def sleep(world: World, seconds: float) -> Any:
    """Say that all ranks measure, and go on for a while."""
    world.barrier()
    if not world.rank:
        print("measuring", flush=True)
    time.sleep(seconds)


@pytest.mark.slow
def test_ranks_end_with_a_command_that_is_killed() -> None:
    """SIGKILL runs no handler: a rank would hold its device until the time limit of a call."""
    words = [sys.executable, "-m", "tests.planning.test_measuring_ranks"]
    command = subprocess.Popen(words, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    assert command.stdout is not None
    assert command.stdout.readline() == "measuring\n"
    below = psutil.Process(command.pid).children(recursive=True)
    command.kill()
    command.wait()
    _, alive = psutil.wait_procs(below, timeout=30)
    for process in alive:
        process.kill()
    assert not alive


if __name__ == "__main__":
    run_on_ranks(sleep, 2, 300.0)
