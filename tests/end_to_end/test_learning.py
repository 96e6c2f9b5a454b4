"""PPO learns: one run of the learning benchmark's smallest task, four epochs of two mini-batches a rollout."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.learning import curve, last, run
from benchmarks.learning_tasks import copy_task


@pytest.mark.slow
def test_ppo_learns_to_copy(tmp_path: Path) -> None:
    task = copy_task(tmp_path, steps=40)
    scores = curve(run(task, {}, seed=0, threads=1), task.metric)
    assert scores[1] < 0.15, "a random policy"
    assert last([scores])[0] > 0.85, "docs/benchmarks/learning.md has the band"
