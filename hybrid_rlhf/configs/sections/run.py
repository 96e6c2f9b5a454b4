"""Settings of every training step: output folder, seed, resume, logging and fault handling."""

from __future__ import annotations

import re
from dataclasses import field
from typing import Annotated, Literal

from hybrid_rlhf.configs.credentials import check_url
from hybrid_rlhf.configs.sections.data import DataConfig
from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.configs.sections.rules import Count, Settings, require, setting

SinkName = Literal["tensorboard", "csv", "wandb", "mlflow", "trackio"]


class LoggingConfig(Settings):
    """What is logged."""

    every: Count = setting(1, advanced=True)
    """Steps between lines of metrics."""
    sinks: list[SinkName] = setting(default_factory=lambda: ["tensorboard"], advanced=True)
    """Destinations of metrics besides metrics.jsonl: tensorboard, csv, wandb, mlflow, trackio; []: none."""
    project: str = setting("hybrid_rlhf", advanced=True)
    """Project of wandb and trackio, experiment of mlflow."""
    run_name: str | None = setting(None, advanced=True)
    """Name of the run in wandb, mlflow and trackio; null: the last two folders of output_dir."""
    webhook: str | None = setting(None, advanced=True)
    """URL that receives a JSON message when the run ends, fails or stalls, or when an advice rule fires; ${NAME} is
    replaced by an environment variable."""
    samples_every: Annotated[int, "0 (none) or more"] = 10
    """Steps between sample completions in samples.jsonl and on the console; 0: none."""
    tokens: bool = setting(True, advanced=True)
    """Record per-token values of the samples in the folder tokens: log-probs, values, advantages, ratios. A recorded
    step takes up to 45 bytes per response token and 5 per prompt token."""
    profile_steps: list[int] = setting(default_factory=list, advanced=True)
    """Steps whose torch profiler trace is written to the folder profile of the run."""

    def _check(self) -> None:
        require(
            len(set(self.sinks)) == len(self.sinks),
            f"logging.sinks must differ, got {', '.join(self.sinks)}: name each once",
        )
        if self.webhook is not None and re.fullmatch(r"\$\{\w+\}", self.webhook) is None:
            check_url(self.webhook, key="logging.webhook", remedy="write ${NAME} for a variable that holds the URL")
        require(
            all(step >= 1 for step in self.profile_steps),
            f"logging.profile_steps must be steps from 1 on, got {self.profile_steps}: leave the others out",
        )


class FaultsConfig(Settings):
    """Which faults end a run."""

    phase_timeout_seconds: float = setting(1800.0, advanced=True)
    """Time limit of a phase (generation, scoring, training, saving), in seconds; exceeding it ends the run and writes
    the stacks of all ranks to the folder stacks. 0: no limit."""
    max_skipped_steps: Annotated[int, "0 (never) or more"] = setting(3, advanced=True)
    """Number of consecutive steps skipped because of a non-finite gradient, score or log-prob after which the run ends;
    0: no limit."""

    @property
    def collective_timeout_seconds(self) -> float:
        """Time limit of a collective: longer than that of a phase, so that the watchdog acts first."""
        return self.phase_timeout_seconds + 120 if self.phase_timeout_seconds else 1e8

    def _check(self) -> None:
        require(
            0 <= self.phase_timeout_seconds < 1e8,
            "faults.phase_timeout_seconds must be 0 (never) or a number of seconds, got "
            f"{self.phase_timeout_seconds}: give for example 1800",
        )


class StepConfig(Settings):
    """Settings of every training step; the step itself adds `data`."""

    output_dir: str = setting("output", mutable=True)
    """Folder of the run: model, config.yaml, metrics.jsonl, checkpoints."""
    seed: int = 42
    """Seed of all randomness: new heads, data order, sampling."""
    resume: str = setting("never", mutable=True)
    """never: reject a folder that contains a run; auto: resume from its last complete checkpoint, or exit with 0 if the
    run is finished; a checkpoint folder to resume from; or a model folder of a run to start from its weights."""
    deterministic: bool = setting(False, advanced=True)
    """Bit-for-bit reproducible on a GPU, with slower kernels; runs on a CPU always are."""
    deepspeed_config: str | None = setting(None, advanced=True)
    """DeepSpeed JSON file; its keys override those derived from the sections."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    logging: LoggingConfig = setting(default_factory=LoggingConfig, mutable=True)
    faults: FaultsConfig = setting(default_factory=FaultsConfig, mutable=True)
