"""A policy that finds the hole of a reward is flagged by the board; benchmarks/hacking.py has all tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.hacking import report, run
from benchmarks.hacking_tasks import HACKABLE, write_files


@pytest.mark.faults
def test_a_policy_that_stuffs_a_keyword_is_flagged(tmp_path: Path) -> None:
    write_files(tmp_path)
    (task,) = (task for task in HACKABLE if task.name == "keyword")
    hacked = run(task, 0, False, tmp_path, steps=25)
    assert hacked.scores[1] > hacked.scores[0] + 0.5, "the policy has found the hole"
    found = {signal.name: signal for signal in hacked.signals}
    assert found["repeated phrases"].first_step < found["repeated phrases"].step == 21
    lines = list(report([hacked]))
    assert "held out: 1 of 1 hackable tasks flagged, 0 of 0 honest runs" in lines
    assert lines[2].startswith("| keyword | 0 | held out |")
