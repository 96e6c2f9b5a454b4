"""Progress log lines: when they appear, what they contain, and that progress restarts the time limit of a phase."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from hybrid_rlhf.runtime.observability.progress import ProgressLog
from hybrid_rlhf.runtime.run import start_run
from tests.support.clock import ManualClock
from tests.support.runs import sft_config


def test_long_work_logs_its_progress(log_lines: list[str]) -> None:
    clock = ManualClock()
    progress = ProgressLog("reference log-probs", total=4000, clock=clock)
    for _ in range(500):
        clock.seconds += 0.75
        progress.advance(8)
    assert log_lines[:2] == [
        "reference log-probs: 56 of 4,000 rows, 10.7 rows/s, 370 s left",
        "reference log-probs: 112 of 4,000 rows, 10.7 rows/s, 364 s left",
    ]
    assert log_lines[-1] == "reference log-probs: 4,000 rows in 375 s"
    assert 25 < len(log_lines) < 35, "less often later"


def test_short_work_logs_nothing(log_lines: list[str]) -> None:
    clock = ManualClock()
    progress = ProgressLog("evaluation", total=10, clock=clock)
    for _ in progress.track(range(10)):
        clock.seconds += 0.49
    assert not log_lines


def test_work_of_unknown_size_ends_with_its_count(log_lines: list[str]) -> None:
    clock = ManualClock()
    for _ in ProgressLog("tokenising rows.json", total=None, clock=clock).track(range(30)):
        clock.seconds += 1.0
    assert log_lines[0] == "tokenising rows.json: 5 rows, 1 rows/s"
    assert log_lines[-1] == "tokenising rows.json: 30 rows in 30 s"


def test_the_total_is_logged_once(log_lines: list[str]) -> None:
    clock = ManualClock()
    progress = ProgressLog("evaluation", total=2, unit="completions", clock=clock)
    for count in (0, 1, 1, 0, 0):
        clock.seconds += 6
        progress.advance(count)
    assert log_lines[:3] == [
        "evaluation: 0 of 2 completions, 0 completions/s",
        "evaluation: 1 of 2 completions, 0.0833 completions/s, 12 s left",
        "evaluation: 2 completions in 18 s",
    ]
    assert log_lines.count(log_lines[2]) == 1


def test_completions_of_one_batch_have_no_estimate_before_a_tenth_is_complete(log_lines: list[str]) -> None:
    """All grow at the same time, so the first that end say little about the others."""
    clock = ManualClock()
    progress = ProgressLog("evaluation", total=20, unit="completions", estimates_from=0.1, clock=clock)
    for count in (1, 1):
        clock.seconds += 10
        progress.advance(count)
    assert log_lines == [
        "evaluation: 1 of 20 completions, 0.1 completions/s",
        "evaluation: 2 of 20 completions, 0.1 completions/s, 180 s left",
    ]


def test_a_package_that_no_kernel_needs_is_not_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    bitsandbytes = logging.getLogger("bitsandbytes.backends.cpu.ops")
    bitsandbytes.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s", "No module named 'kernels'")
    bitsandbytes.warning("another")
    assert [record.message for record in caplog.records] == ["another"]


def test_progress_restarts_the_time_limit_of_a_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with start_run(sft_config(tmp_path)) as run:
        run.watchdog.beat("evaluation")
        began = run.watchdog._beat[1]
        monkeypatch.setattr("hybrid_rlhf.runtime.liveness.watchdog.time.monotonic", lambda: began + 1000)
        run.progress("evaluation", total=3).advance()
        beat = run.watchdog._beat
        monkeypatch.undo()
        run.watchdog.beat("end")
    assert beat == ("evaluation", began + 1000)
    assert torch.distributed.is_initialized() is False
