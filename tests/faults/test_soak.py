"""Memory, open files, threads and checkpoints do not grow in a long run."""

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

from hybrid_rlhf.runtime.files.json_lines import read_lines
from tests.support.faults import run_step
from tests.support.steps import MODULES, checkpoint_names, step_line, write_rows


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


def soak(
    steps: int, *, ranks: int, warm: slice, end: slice, growth: float, asynchronous: bool, model: Path, folder: Path
) -> None:
    """A PPO run; resident memory at the end may exceed that after warm-up by the share `growth`."""
    rows = write_rows(folder / "rows.jsonl")
    more = f"--train.max_steps {steps} --train.epochs 1000 --train.save_async {str(asynchronous).lower()} "
    more += "--train.save_every 20 --train.keep_every 200 --train.eval_every 50 --logging.samples_every 10 "
    more += "--algorithm.epochs 1 --algorithm.mini_batches 1"
    line = step_line("ppo", folder / "out", model, rows, *more.split())
    assert run_step(MODULES["ppo"], ranks, line, Watch(folder), limit_seconds=1800) == [0] * ranks
    for rank in range(ranks):
        measured = read_lines(folder / f"rank_{rank}.jsonl")
        for what, bound in (("resident", 1 + growth), ("files", 1.0), ("threads", 1.0), ("tasks", 1.0)):
            first, last = median(line[what] for line in measured[warm]), median(line[what] for line in measured[end])
            print(f"rank {rank} {what}: {first} when warm, {last} at the end ({last / first:.4f})")
            assert last <= first * bound, (rank, what, first, last)


@pytest.mark.faults
def test_a_hundred_steps_use_no_more_than_forty(model_folder: Path, tmp_path: Path) -> None:
    warm, end = slice(40, 60), slice(-20, None)
    soak(100, ranks=1, warm=warm, end=end, growth=0.05, asynchronous=True, model=model_folder, folder=tmp_path)
    assert checkpoint_names(tmp_path / "out") == ["step_100", "step_80"]


@pytest.mark.faults
@pytest.mark.parametrize("asynchronous", [False, True])
def test_five_hundred_steps_use_no_more_than_a_hundred(asynchronous: bool, model_folder: Path, tmp_path: Path) -> None:
    warm, end = slice(100, 150), slice(-50, None)
    soak(
        500,
        ranks=2,
        warm=warm,
        end=end,
        growth=0.02,
        asynchronous=asynchronous,
        model=model_folder,
        folder=tmp_path,
    )
    assert checkpoint_names(tmp_path / "out") == ["step_200", "step_400", "step_480", "step_500"]
