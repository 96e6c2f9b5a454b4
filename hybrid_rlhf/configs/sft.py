"""Config of step 1, supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybrid_rlhf.configs.sections import LoraConfig, OptimizerConfig, StepConfig, TrainConfig, ZeroConfig


@dataclass(frozen=True, kw_only=True)
class SFTConfig(StepConfig):
    """Step 1: supervised fine-tuning on conversations."""

    output_dir: str = "output/step1_sft"
    """Folder of the run: model, config.yaml, metrics.jsonl, checkpoints."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=2e-5))
    train: TrainConfig = field(default_factory=TrainConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
