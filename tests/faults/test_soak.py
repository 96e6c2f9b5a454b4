"""A long run holds what it holds: memory, files, threads and checkpoints do not grow."""

from __future__ import annotations

import functools
import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.faults.killing import run_step
from tests.faults.steps import MODULES, step_line, write_rows

STEPS = 500


@dataclass(frozen=True)
class Watch:
    """Notes what a rank holds after each step."""

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
@pytest.mark.parametrize("asynchronous", [False, True])
def test_five_hundred_steps_hold_no_more_than_fifty(asynchronous: bool, model_folder: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl")
    line = step_line(
        "ppo", tmp_path / "out", model_folder, rows, "--train.max_steps", str(STEPS), "--train.epochs", "1000",
        "--train.save_every", "20", "--train.keep_every", "200", "--train.save_async", str(asynchronous).lower(),
        "--train.eval_every", "50", "--logging.samples_every", "10", "--ppo.epochs", "1", "--ppo.mini_batches", "1",
    )  # fmt: skip
    assert run_step(MODULES["ppo"], 2, line, Watch(tmp_path), limit_seconds=1800) == [0, 0]
    for rank in range(2):
        told = [json.loads(line) for line in (tmp_path / f"rank_{rank}.jsonl").read_text().splitlines()]
        warm, end = told[100:150], told[-50:]
        for what, bound in (("resident", 1.02), ("files", 1.0), ("threads", 1.0), ("tasks", 1.0)):
            first, last = median(line[what] for line in warm), median(line[what] for line in end)
            print(f"rank {rank} {what}: {first} after 100 steps, {last} at the end ({last / first:.4f})")
            assert last <= first * bound, (rank, what, first, last)
    names = sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir())
    assert names == ["step_200", "step_400", "step_480", "step_500"], names
