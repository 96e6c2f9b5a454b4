"""Memory, open files, threads and checkpoints do not grow in a long run."""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from hybrid_rlhf.runtime.files.json_lines import read_lines
from tests.support.steps import checkpoint_names


@dataclass(frozen=True)
class Watch:
    """Records the resources of a rank after each step."""

    folder: Path
    rank: int | None = None

    def arm(self) -> None:
        from hybrid_rlhf.runtime.run import Run

        real = Run.log

        @functools.wraps(real)
        def log(run: Run, step: int, metrics: Any) -> None:
            real(run, step, metrics)
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
            held = {"files": len(os.listdir("/proc/self/fd")), "threads": threading.active_count()}
            system_threads = len(os.listdir("/proc/self/task"))
            with (self.folder / f"rank_{run.world.rank}.jsonl").open("a") as lines:
                lines.write(json.dumps({"step": step, "resident": resident, "tasks": system_threads, **held}) + "\n")

        Run.log = log  # type: ignore[method-assign]


@pytest.mark.faults
@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_five_hundred_steps_use_no_more_than_a_hundred(
    asynchronous: str, tiny_run: Callable[..., list[int]], tmp_path: Path
) -> None:
    """Resident memory at the end may exceed that after warm-up by 2%."""
    more = f"--train.max_steps 500 --train.epochs 1000 --train.save_async {asynchronous} --train.save_every 20 "
    more += "--train.keep_every 200 --train.eval_every 50 --logging.samples_every 10 --algorithm.epochs 1"
    codes = tiny_run("ppo", more, "--algorithm.mini_batches 1", armed=Watch(tmp_path), limit_seconds=1800)
    assert codes == [0, 0]
    for rank in range(2):
        measured = read_lines(tmp_path / f"rank_{rank}.jsonl")
        for what, bound in (("resident", 1.02), ("files", 1.0), ("threads", 1.0), ("tasks", 1.0)):
            first, last = (
                median(line[what] for line in measured[part]) for part in (slice(100, 150), slice(-50, None))
            )
            print(f"rank {rank} {what}: {first} when warm, {last} at the end ({last / first:.4f})")
            assert last <= first * bound, (rank, what, first, last)
    assert checkpoint_names(tmp_path / "out") == ["step_200", "step_400", "step_480", "step_500"]
