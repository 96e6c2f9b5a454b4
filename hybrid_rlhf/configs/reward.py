"""Settings of reward model training."""

from __future__ import annotations

import re
from typing import Literal

from hybrid_rlhf.configs.sections.model import SCORER_KEYS, ModelConfig
from hybrid_rlhf.configs.sections.rules import NonNegative, Settings, advanced, require, section, setting
from hybrid_rlhf.configs.sections.run import SupervisedConfig


class RewardObjectiveConfig(Settings):
    """The loss of the reward model."""

    loss: Literal["pairwise", "listwise", "binary", "steps"] = "pairwise"
    """pairwise: all pairs of a prompt's completions (Bradley-Terry); listwise: their ranking (Plackett-Luce), without
    margins; binary: completions labelled good or bad; steps: each step of a completion labelled (process reward)."""
    heads: list[str] = []
    """Names of several scores, for example [helpful, harmless]; a row's column `head` selects the one that it trains,
    by default the first. Empty: one score."""
    centering_coef: NonNegative = 0.0
    """Weight of (chosen + rejected)^2, which centers scores at 0 (arXiv 2312.09244: 0.01); only for pairs and lists,
    because labels already define the zero."""
    step_separator: str = advanced("\n")
    """Separator between the steps of a completion (loss steps)."""
    calibrate: bool = False
    """Fit a temperature and measure the mean and standard deviation of scores on held-out rows; saved in
    config.json."""

    def _check(self) -> None:
        require(
            len(self.heads) != 1 and len(set(self.heads)) == len(self.heads),
            f"objective.heads are two or more different names, got {self.heads}: leave it out for one score",
        )
        for name in self.heads:
            require(
                re.fullmatch(r"[\w-]+", name),
                f"objective.heads: a name has letters, digits and _ - only, got {name!r}: rename it",
            )
        require(self.step_separator, "objective.step_separator may not be empty: leave it out for a line break")


class RewardConfig(SupervisedConfig):
    """Reward model training on preferences (Bradley-Terry), rankings, labels or step labels."""

    output_dir: str = setting("output/step2_reward", mutable=True)
    """Folder of the run: model, config.yaml, metrics.jsonl, checkpoints."""
    model: ModelConfig = setting({}, keys=SCORER_KEYS)
    objective: RewardObjectiveConfig = section()

    def _check(self) -> None:
        require(
            not self.objective.calibrate or self.data.eval_fraction > 0 or self.data.eval_sources,
            "objective.calibrate needs held-out rows, got data.eval_fraction 0: give for example 0.05",
        )
