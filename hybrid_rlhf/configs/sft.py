"""Settings of supervised fine-tuning and of distillation from a teacher."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Interval

from hybrid_rlhf.configs.sections.data import RowDataConfig
from hybrid_rlhf.configs.sections.generated_evaluation import GeneratingTrainConfig
from hybrid_rlhf.configs.sections.rules import (
    NonNegative,
    Positive,
    Settings,
    Share,
    advanced,
    require,
    section,
    setting,
)
from hybrid_rlhf.configs.sections.run import SupervisedConfig
from hybrid_rlhf.configs.sections.sampling import SamplingParams, require_sampled

_SAMPLING_KEYS = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p")


class SFTDataConfig(RowDataConfig):
    """Sources of conversations, and how they become rows."""

    too_long: Literal["truncate", "drop"] = "truncate"
    """Rows that are too long are truncated on the right (TRL's default) or dropped; both are counted."""
    packing: Literal["none", "best_fit"] = "none"
    """best_fit: several conversations share a row of at most max_length tokens, without attention between them;
    global_batch_size then counts packed rows."""


class ConditionConfig(Settings):
    """Conditional SFT: each prompt is prefixed with the bucket of its row's `score`."""

    buckets: Annotated[int, Interval(ge=2, le=100)] = 3
    """Number of equally sized buckets into which the scores are divided."""
    template: str = "<score {bucket}/{buckets}> "
    """Prefix of the first user turn, or of plain text; bucket 1 has the lowest scores."""

    def _check(self) -> None:
        require(
            "{bucket}" in self.template, f"condition.template must contain {{bucket}}, got {self.template!r}: add it"
        )


class DistillConfig(Settings):
    """Distillation: the student learns the teacher's distribution of each completion token."""

    teacher: str | None = None
    """Teacher: a model folder or hub name, with the student's vocabulary."""
    divergence: Literal["forward", "reverse", "jensen_shannon"] = "forward"
    """forward: KL(teacher || student); reverse: KL(student || teacher); jensen_shannon: an interpolation of both
    (GKD)."""
    beta: Annotated[float, Interval(gt=0, lt=1)] = 0.5
    """Weight of the teacher in the mixture of jensen_shannon (0.5, as in GKD)."""
    temperature: Positive = 1.0
    """Logits of both models are divided by this, and the divergence is multiplied by its square (arXiv 1503.02531)."""
    sft_coef: NonNegative = 0.0
    """Weight of the negative log-likelihood of the data's completions; not in on-policy updates."""
    on_policy_fraction: Share = 0.0
    """Fraction of updates that use completions sampled by the student instead of those in the data (lambda of GKD)."""
    sampling: SamplingParams = setting({}, keys=_SAMPLING_KEYS)

    def _check(self) -> None:
        require_sampled(self.sampling, _SAMPLING_KEYS, section="distill.sampling")
        require(
            self.on_policy_fraction < 1 or self.sft_coef == 0,
            f"distill.sft_coef {self.sft_coef} needs the data's completions, got on_policy_fraction 1: lower one of "
            "the two",
        )
        require(self.teacher is not None, "distill.teacher must name a model, got none: give --distill.teacher FOLDER")


class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning on conversations and text, or distillation from a teacher."""

    output_dir: str = setting("output/step1_sft", mutable=True)
    """Folder of the run: model, config.yaml, metrics.jsonl, checkpoints."""
    data: SFTDataConfig = section()
    train: GeneratingTrainConfig = section()
    loss: Literal["nll", "dft"] = advanced("nll")
    """nll: negative log-likelihood; dft: that of each token times its probability, as a constant (DFT, arXiv
    2508.05629)."""
    condition: ConditionConfig | None = None
    distill: DistillConfig | None = None

    def _check(self) -> None:
        require(
            self.distill is None or self.loss == "nll",
            f"distill has a loss of its own, got loss {self.loss}: leave it out",
        )
