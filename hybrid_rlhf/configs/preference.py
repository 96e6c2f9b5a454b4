"""Config of learning from preferences without a reward model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from hybrid_rlhf.configs.algorithms import PREFERENCE, PREFERENCE_KEYS, KeyRule, PreferenceName, PreferenceTraits
from hybrid_rlhf.configs.sections import LoraConfig, OptimizerConfig, StepConfig, TrainConfig, ZeroConfig, require


@dataclass(frozen=True, kw_only=True)
class PreferenceLossConfig:
    """What is learned from a preference. Defaults are DPO's; other algorithms bring their own (docs/algorithms.md)."""

    beta: float = 0.1
    """Strength of the pull to the reference (DPO); scale of the implicit reward (SimPO); weight of the odds (ORPO)."""
    label_smoothing: float = 0.0
    """Chance that a label is wrong (cDPO)."""
    target_margin: float = 0.0
    """By how much the better answer's reward should lead (SimPO's gamma)."""
    sft_coef: float = 0.0
    """Weight of the negative log-likelihood a token of the better answer, beside the preference (RPO, ORPO)."""
    desirable_weight: float = 1.0
    """Weight of good answers (KTO); those of both kinds should sum up alike, within a third."""
    undesirable_weight: float = 1.0
    """Weight of bad answers (KTO)."""

    def __post_init__(self) -> None:
        require(self.beta > 0, f"loss.beta must be above 0, got {self.beta}: give for example 0.1")
        require(
            0 <= self.label_smoothing < 0.5,
            f"loss.label_smoothing must be in [0, 0.5), got {self.label_smoothing}: give for example 0.1",
        )
        for name in ("target_margin", "sft_coef", "desirable_weight", "undesirable_weight"):
            value = getattr(self, name)
            require(value >= 0, f"loss.{name} must be 0 or more, got {value}: raise it")


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """What the actor is held against."""

    path: str | None = None
    """Model folder or hub name; none: where the actor starts."""
    logprobs: Literal["cached", "live"] = "cached"
    """cached: computed once before training, of the rows that the run uses, and no reference stays in memory; live: at
    each update."""


@dataclass(frozen=True, kw_only=True)
class PreferenceStepConfig(StepConfig):
    """An actor learns from preferred and rejected answers, by DPO or another algorithm, without a reward model."""

    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {name: traits.defaults for name, traits in PREFERENCE.items()}
    """Defaults that each algorithm brings."""
    KEY_RULES: ClassVar[tuple[KeyRule, ...]] = PREFERENCE_KEYS
    """Keys that some cases do not read."""

    algorithm: PreferenceName = "dpo"
    """What is learned from an answer or a pair; brings defaults of its own (docs/algorithms.md)."""
    output_dir: str = "output/preference"
    """Folder of the run: model, config.yaml, metrics.jsonl, checkpoints."""
    loss: PreferenceLossConfig = field(default_factory=PreferenceLossConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-6))
    train: TrainConfig = field(default_factory=TrainConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)

    @property
    def traits(self) -> PreferenceTraits:
        """What the algorithm needs."""
        return PREFERENCE[self.algorithm]

    @property
    def holds_reference(self) -> bool:
        """Whether a second model stays in memory while the actor learns."""
        own = self.lora.rank > 0 and self.reference.path in (None, self.model.path)
        return self.traits.reference and self.reference.logprobs == "live" and not own
