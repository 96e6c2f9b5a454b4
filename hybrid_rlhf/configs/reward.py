"""Config of step 2, the reward model."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybrid_rlhf.configs.sections import LoraConfig, OptimizerConfig, StepConfig, TrainConfig, ZeroConfig, require


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """The pairwise loss."""

    centering_coef: float = 0.0
    """Weight of (chosen + rejected)^2, which keeps scores around 0; 0.01 is usual (arXiv 2312.09244)."""

    def __post_init__(self) -> None:
        require(
            self.centering_coef >= 0,
            f"preference.centering_coef must be 0 or more, got {self.centering_coef}: give for example 0.01",
        )


@dataclass(frozen=True, kw_only=True)
class RewardConfig(StepConfig):
    """Step 2: a reward model from preferences (Bradley-Terry)."""

    output_dir: str = "output/step2_reward"
    """Folder of the run: model, config.yaml, metrics.jsonl, checkpoints."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    train: TrainConfig = field(default_factory=TrainConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
