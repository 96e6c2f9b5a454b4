"""Settings of learning from preferences without a reward model: one dataclass per loss, selected by `algorithm.name`.

The losses are in supervised/preference/, one file each; docs/algorithms.md compares them.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from annotated_types import Interval

from hybrid_rlhf.configs.sections.generated_evaluation import GeneratingTrainConfig
from hybrid_rlhf.configs.sections.rules import NonNegative, Positive, Settings, require, section, setting
from hybrid_rlhf.configs.sections.run import SupervisedConfig


class PreferenceLossConfig(Settings):
    """Settings of all preference losses."""

    needs_reference = True
    """True if the loss needs a reference's log-probs."""
    learns_labels = False
    """True if it learns from single completions labelled good or bad, false if from pairs."""

    name: ClassVar[str] = ""
    """Preference loss; it selects the keys of this section and their defaults (docs/algorithms.md)."""
    beta: Positive = 0.1
    """Strength of the regularization to the reference (0.1: DPO, arXiv 2305.18290)."""
    sft_coef: NonNegative = 0.0
    """Weight of the negative log-likelihood per token of the chosen completion (RPO, arXiv 2404.19733; ORPO)."""


class DPOConfig(PreferenceLossConfig):
    """DPO (Rafailov et al. 2023, arXiv 2305.18290)."""

    name = "dpo"


class CDPOConfig(PreferenceLossConfig):
    """Conservative DPO (Mitchell 2023), for noisy labels."""

    name = "cdpo"
    label_smoothing: Annotated[float, Interval(ge=0, lt=0.5)] = 0.1
    """Probability that a label is wrong (0.1: Mitchell 2023)."""


class IPOConfig(PreferenceLossConfig):
    """IPO (Azar et al. 2023, arXiv 2310.12036)."""

    name = "ipo"


class HingeConfig(PreferenceLossConfig):
    """Hinge loss on log-ratios (SLiC-HF, arXiv 2305.10425; RSO, arXiv 2309.06657)."""

    name = "hinge"


class SimPOConfig(PreferenceLossConfig):
    """SimPO (Meng et al. 2024, arXiv 2405.14734); no reference."""

    needs_reference = False

    name = "simpo"
    beta: Positive = 2.0
    """Scale of the implicit reward, the mean log-prob per token (2.0: the paper)."""
    target_margin: NonNegative = 1.0
    """Target margin between the rewards of chosen and rejected completion (gamma in the paper; 1.0 is in its range)."""


class ORPOConfig(PreferenceLossConfig):
    """ORPO (Hong et al. 2024, arXiv 2403.07691): SFT on the chosen completion and its odds ratio; no reference."""

    needs_reference = False

    name = "orpo"
    beta: Positive = 0.1
    """Weight of the odds ratio (0.1: the paper)."""
    sft_coef: NonNegative = 1.0
    """Weight of the negative log-likelihood per token of the chosen completion (1.0: the paper)."""


class KTOConfig(PreferenceLossConfig):
    """KTO (Ethayarajh et al. 2024, arXiv 2402.01306): single completions labelled good or bad."""

    learns_labels = True

    name = "kto"
    desirable_weight: NonNegative = 1.0
    """Weight of desirable completions; the paper recommends total weights of both kinds within a third of each
    other."""
    undesirable_weight: NonNegative = 1.0
    """Weight of undesirable completions."""


PREFERENCE_LOSSES: dict[str, type[PreferenceLossConfig]] = {
    kind.name: kind for kind in (DPOConfig, CDPOConfig, IPOConfig, HingeConfig, SimPOConfig, ORPOConfig, KTOConfig)
}
"""Every preference loss by its name."""


class PreferenceReferenceConfig(Settings):
    """The frozen reference of the loss."""

    path: str | None = None
    """Model folder or hub name; null: the initial actor."""
    logprobs: Literal["cached", "live"] = "cached"
    """cached: computed once before training, without keeping a reference in memory; live: computed in each update."""


class PreferenceStepConfig(SupervisedConfig):
    """Preference learning without a reward model, with DPO or another loss."""

    output_dir: str = setting("output/preference", mutable=True)
    """Folder of the run: model, config.yaml, metrics.jsonl, checkpoints."""
    train: GeneratingTrainConfig = section()
    algorithm: PreferenceLossConfig = setting(DPOConfig, variants=PREFERENCE_LOSSES)
    reference: PreferenceReferenceConfig | None = setting(None, needs="needs_reference")

    def _check(self) -> None:
        if self.algorithm.needs_reference and self.reference is None:
            object.__setattr__(self, "reference", PreferenceReferenceConfig())
        require(
            self.algorithm.needs_reference or self.reference is None,
            f"algorithm {self.algorithm.name} has no reference, got the section reference: leave it out",
        )

    @property
    def holds_reference(self) -> bool:
        """True if a second model stays in memory while the actor learns."""
        if self.reference is None or self.reference.logprobs != "live":
            return False
        return self.lora is None or self.reference.path not in (None, self.model.path)
