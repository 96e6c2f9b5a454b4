"""Config of step 1: supervised fine-tuning, or distillation from a teacher, on conversations and text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from hybrid_rlhf.configs.algorithms import SFT_KEYS, KeyRule
from hybrid_rlhf.configs.sections import (
    DataConfig,
    LoraConfig,
    OptimizerConfig,
    StepConfig,
    TrainConfig,
    ZeroConfig,
    require,
)


@dataclass(frozen=True, kw_only=True)
class SFTDataConfig(DataConfig):
    """Where the conversations come from, how they are put together and what they are told of their score."""

    too_long: Literal["truncate", "drop"] = "truncate"
    """What happens to longer rows: cut on their right (TRL's default), or left out; they are counted either way."""
    packing: Literal["none", "best_fit"] = "none"
    """best_fit: several conversations make one row of at most max_length tokens, none sees another; global_batch_size
    then counts packed rows."""
    condition_buckets: int = 0
    """Conditional SFT: rows have a number `score`, cut into this many buckets of equal size; each begins with its
    bucket; 0: off."""
    condition_template: str = "<score {bucket}/{buckets}> "
    """What is written before the first user turn, or text, of a row in a bucket; 1 is the lowest."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.condition_buckets == 0 or 2 <= self.condition_buckets <= 100,
            f"data.condition_buckets must be 0 (off) or 2 to 100, got {self.condition_buckets}: give for example 3",
        )
        require(
            "{bucket}" in self.condition_template,
            f"data.condition_template must hold {{bucket}}, got {self.condition_template!r}: add it",
        )


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """What a student learns from a teacher's whole distribution at each token of an answer."""

    teacher: str | None = None
    """Model folder or hub name, of the student's vocabulary."""
    divergence: Literal["forward", "reverse", "jensen_shannon"] = "forward"
    """forward: KL(teacher || student); reverse: KL(student || teacher); jensen_shannon: between (GKD)."""
    beta: float = 0.5
    """Share of the teacher in the mixture of jensen_shannon."""
    temperature: float = 1.0
    """Both models' logits are divided by it; the divergence counts times its square (Hinton et al. 2015)."""
    sft_coef: float = 0.0
    """Weight of the negative log-likelihood of the data's answers, beside the divergence; not in on-policy updates."""
    on_policy_fraction: float = 0.0
    """Chance of an update to learn from answers that the student samples in place of the data's (GKD's lambda)."""
    max_new_tokens: int = 128
    """Longest sampled answer, in tokens; with its prompt it stays within data.max_length."""
    sampling_temperature: float = 1.0
    """The student's logits are divided by it in sampling."""

    def __post_init__(self) -> None:
        require(0 < self.beta < 1, f"distill.beta must be in (0, 1), got {self.beta}: give for example 0.5")
        for name in ("temperature", "sampling_temperature"):
            value = getattr(self, name)
            require(value > 0, f"distill.{name} must be above 0, got {value}: give for example 1.0")
        require(self.sft_coef >= 0, f"distill.sft_coef must be 0 or more, got {self.sft_coef}: raise it")
        require(
            0 <= self.on_policy_fraction <= 1,
            f"distill.on_policy_fraction must be in [0, 1], got {self.on_policy_fraction}: give for example 0.5",
        )
        require(
            self.max_new_tokens >= 1, f"distill.max_new_tokens must be 1 or more, got {self.max_new_tokens}: raise it"
        )
        require(
            self.on_policy_fraction < 1 or self.sft_coef == 0,
            f"distill.sft_coef {self.sft_coef} needs the data's answers, got on_policy_fraction 1, which samples them "
            "all: lower one of the two",
        )


@dataclass(frozen=True, kw_only=True)
class SFTConfig(StepConfig):
    """Step 1: supervised fine-tuning on conversations, or distillation."""

    KEY_RULES: ClassVar[tuple[KeyRule, ...]] = SFT_KEYS
    """Keys that some cases do not read."""

    algorithm: Literal["sft", "distill"] = "sft"
    """sft: what the data's answers say; distill: what a teacher would say (docs/algorithms.md)."""
    output_dir: str = "output/step1_sft"
    """Folder of the run: model, config.yaml, metrics.jsonl, checkpoints."""
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=2e-5))
    train: TrainConfig = field(default_factory=TrainConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)

    def __post_init__(self) -> None:
        require(
            self.algorithm == "sft" or self.distill.teacher is not None,
            "algorithm distill learns from a teacher, got none: give --distill.teacher FOLDER",
        )
        require(
            self.algorithm == "distill" or self.distill.teacher is None,
            f"distill.teacher is for algorithm distill, got {self.distill.teacher} for {self.algorithm}: "
            "add --algorithm distill",
        )
