"""Reward components whose function has a given body or that score rows by number, and the report of a rollout's
scores."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hybrid_rlhf.configs.sections.rewards import RewardComponentConfig
from hybrid_rlhf.rl.rewards import ComponentScores, Reward, RewardBatch, RewardComponent, RewardReport
from hybrid_rlhf.rl.rewards.functions import FunctionReward
from hybrid_rlhf.runtime.world import World, solo_world
from tests.support.rl import COMPLETIONS, MICRO_BATCH_ROWS, rewarded, rollout_of_rows

CPU = torch.device("cpu")


def score_completions(
    *parts: RewardComponent, world: World | None = None, micro: list[list[int | None]] = MICRO_BATCH_ROWS
) -> RewardReport:
    """The report of COMPLETIONS by these parts."""
    return rewarded(Reward(parts, world or solo_world(CPU)), rollout_of_rows(), micro, COMPLETIONS)


def function_reward(folder: Path, body: str, *, prefix: str = "", **settings: Any) -> FunctionReward:
    """A part whose function has the body given; `calls` counts its calls."""
    file = folder / f"rewards_{len(list(folder.glob('*.py')))}.py"
    text = f"import asyncio, sys, time, numpy, torch\ncalls = 0\n\n{prefix}def f(prompts, completions, **columns):\n"
    file.write_text(text + "    global calls\n    calls += 1\n" + textwrap.indent(body, "    "))
    return FunctionReward(RewardComponentConfig(**{"function": f"{file}:f", "name": "mine"} | settings), device=CPU)


def calls(part: FunctionReward) -> int:
    """Number of calls of the function of `function_reward`."""
    return int(part._function.__globals__["calls"])  # type: ignore[attr-defined]


class Judge(RewardComponent):
    """Scores a row by its number, and fails on some."""

    reads_text = False

    def __init__(self, failing: Sequence[int] = ()) -> None:
        super().__init__(RewardComponentConfig(function="a:judge", on_failure="drop"))
        self._failing = failing
        self.silent: Sequence[int] = ()
        """Rows to which it does not apply."""

    def begin(self, share: RewardBatch) -> Callable[[], ComponentScores]:
        failures = {place: "no" for place, row in enumerate(share.numbers) if row in self._failing}
        silent = {*failures, *(place for place, row in enumerate(share.numbers) if row in self.silent)}
        values = [None if place in silent else float(row) for place, row in enumerate(share.numbers)]
        return lambda: ComponentScores(values, failures)
