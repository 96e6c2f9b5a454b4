"""Config of step 2, the reward model."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from hybrid_rlhf.configs.sections import LoraConfig, OptimizerConfig, StepConfig, TrainConfig, ZeroConfig, require


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """What scores learn from."""

    loss: Literal["pairwise", "listwise", "binary", "steps"] = "pairwise"
    """pairwise: all pairs of an answer's list (Bradley-Terry); listwise: the order of the list (Plackett-Luce), without
    margins; binary: answers with a label, good or bad; steps: each step of an answer with a label (process reward)."""
    heads: list[str] = field(default_factory=list)
    """Names of several scores, for example [helpful, harmless]; a row's column `head` says which it teaches, the first
    if it has none. None: one score."""
    centering_coef: float = 0.0
    """Weight of (chosen + rejected)^2, which keeps scores around 0; 0.01 is usual (arXiv 2312.09244). Of pairs and
    lists; labels have their own 0."""
    step_separator: str = "\n"
    """Between the steps of an answer (steps)."""
    calibrate: bool = False
    """Fit a temperature and measure mean and deviation of scores on the held-out rows, and keep them in config.json."""

    def __post_init__(self) -> None:
        require(
            self.centering_coef >= 0,
            f"preference.centering_coef must be 0 or more, got {self.centering_coef}: give for example 0.01",
        )
        require(
            len(self.heads) != 1 and len(set(self.heads)) == len(self.heads),
            f"preference.heads are two or more different names, got {self.heads}: leave it out for one score",
        )
        for name in self.heads:
            require(
                re.fullmatch(r"[\w-]+", name) is not None,
                f"preference.heads: a name has letters, digits and _ - only, got {name!r}: rename it",
            )
        require(bool(self.step_separator), "preference.step_separator may not be empty: leave it out for a line break")


@dataclass(frozen=True, kw_only=True)
class RewardConfig(StepConfig):
    """Step 2: a reward model from preferences (Bradley-Terry), ranked lists, labels, or labels of steps."""

    output_dir: str = "output/step2_reward"
    """Folder of the run: model, config.yaml, metrics.jsonl, checkpoints."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    train: TrainConfig = field(default_factory=TrainConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)

    def __post_init__(self) -> None:
        require(
            not self.preference.calibrate or self.data.eval_fraction > 0 or bool(self.data.eval_sources),
            "preference.calibrate needs held-out rows, got data.eval_fraction 0: give for example 0.05",
        )
