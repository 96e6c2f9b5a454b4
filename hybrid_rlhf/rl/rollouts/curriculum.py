"""A curriculum: prompts that are too easy or too hard for the current actor are skipped, by their running pass rates.

A prompt whose completions all pass or all fail has no advantages within its group, and one near either end few: what a
step can gain from a prompt is bounded from below by the variance p (1 - p) of its outcomes. The pass rate p is an
exponential average over the visits of a prompt; prompts that have not been visited are taken.

Order and length of a run stay defined: passes over the data have RowStream's seeded orders, a skipped prompt gives its
turn to the next one, and an epoch is as many prompts taken as the data has, in however many passes. Hence a run has the
same number of steps with and without a curriculum. In each of its turns a skipped prompt is taken with a small seeded
probability, so that its rate follows the actor, and a step always finds its prompts.

A step takes its prompts by the rates after the last step whose scores are known: the one before it, or with a policy
lag of k the (k + 1)th before it. Scores are the same on every rank, so rates and orders are, for any number of ranks.

Source: balanced online difficulty filtering (arXiv 2504.03380), which bounds p of completions that are sampled already;
prioritized sampling of Kimi k1.5 (arXiv 2501.12599), which takes prompts in proportion to 1 - p. Deviation: bounds on
the rates of earlier visits, so that skipped prompts cost no completions; `algorithm.dynamic_sampling` filters after
sampling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from hybrid_rlhf.configs.sections.rollout import CurriculumConfig
from hybrid_rlhf.data.loaders import RowStream


class Curriculum(RowStream):
    """The row indices of a data set in seeded orders, without those of other pass rates than wanted."""

    def __init__(self, rows: int, *, epochs: float | None, seed: int, config: CurriculumConfig) -> None:
        super().__init__(rows, epochs=epochs, seed=seed)
        self._config = config
        self._rates: dict[int, float] = {}
        """Pass rate of each visited row."""
        self._turns = 0
        """Number of turns that rows have had, over all passes; those that were skipped too."""
        self._skipped = 0
        """Number of turns skipped since the last metrics."""
        self._chances: tuple[int, list[float]] = (-1, [])
        """Number of a pass, and a random number for each of its turns."""

    def take(self, count: int) -> list[int]:
        """Take the next rows that are not skipped; fewer at the end of the last epoch."""
        count = min(count, self.left)
        taken: list[int] = []
        while len(taken) < count:
            row = self._row(self._turns)
            if self._is_wanted(row) or self._chance(self._turns) < self._config.revisit:
                taken.append(row)
            else:
                self._skipped += 1
            self._turns += 1
        self.taken += count
        return taken

    def observe(self, scores: Tensor, *, groups: Tensor, rows: Sequence[int]) -> dict[str, float]:
        """Renew the pass rates of the prompts of a step, and return the metrics.

        Args:
            scores: [N], scores of all completions that have one.
            groups: [N], place in the step of each completion's prompt.
            rows: rows of the step's prompts, by place.
        """
        passed = (scores > self._config.pass_score).double()
        for place in groups.long().unique().tolist():
            row, mean = rows[place], float(passed[groups == place].mean())
            before = self._rates.get(row, mean)
            self._rates[row] = self._config.decay * before + (1 - self._config.decay) * mean
        skipped = self._skipped
        self._skipped = 0
        seen = max(len(self._rates), 1)
        return {
            "curriculum/pass_rate": math.fsum(self._rates.values()) / seen,
            "curriculum/wanted_prompts": sum(map(self._is_wanted, self._rates)) / seen,
            "curriculum/skipped_prompts": float(skipped),
        }

    def _is_wanted(self, row: int) -> bool:
        """True if a row is not visited yet, or has a pass rate within the bounds."""
        rate = self._rates.get(row)
        return rate is None or self._config.min_pass_rate <= rate <= self._config.max_pass_rate

    def _chance(self, turn: int) -> float:
        number, place = divmod(turn, self._rows)
        if self._chances[0] != number:
            self._chances = number, np.random.default_rng([self._seed, number, 1]).random(self._rows).tolist()
        return self._chances[1][place]

    def state_dict(self) -> dict[str, Any]:
        """The position and the pass rates, for a checkpoint."""
        return {
            **super().state_dict(),
            "turns": self._turns,
            "skipped": self._skipped,
            "rows": list(self._rates),
            "rates": list(self._rates.values()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore position and pass rates from a checkpoint."""
        super().load_state_dict({"taken": state["taken"]})
        self._turns = state["turns"]
        self._skipped = state["skipped"]
        self._rates = dict(zip(state["rows"], state["rates"], strict=True))
