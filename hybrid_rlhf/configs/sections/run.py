"""Settings of every training step: output folder, seed, resume, logging and fault handling."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Interval

from hybrid_rlhf.configs.credentials import check_url, is_placeholder
from hybrid_rlhf.configs.sections.data import DataConfig, RowDataConfig
from hybrid_rlhf.configs.sections.model import LoraConfig, ModelConfig
from hybrid_rlhf.configs.sections.rules import Count, Natural, Settings, advanced, require, section, setting
from hybrid_rlhf.configs.sections.training import OptimizerConfig, TrainConfig, ZeroConfig, require_trainable

SinkName = Literal["tensorboard", "csv", "wandb", "mlflow", "trackio"]


class LoggingConfig(Settings):
    """What is logged."""

    every: Count = advanced(1)
    """Steps between lines of metrics."""
    sinks: list[SinkName] = advanced(["tensorboard"])
    """Destinations of metrics besides metrics.jsonl: tensorboard, csv, wandb, mlflow, trackio; []: none."""
    project: str = advanced("hybrid_rlhf")
    """Project of wandb and trackio, experiment of mlflow."""
    run_name: str | None = advanced(None)
    """Name of the run in wandb, mlflow and trackio; null: the last two folders of output_dir."""
    webhook: str | None = advanced(None)
    """URL that receives a JSON message when the run ends, fails or stalls, or when an advice rule fires; ${NAME} is
    replaced by an environment variable."""
    samples_every: Natural = 10
    """Steps between sample completions in samples.jsonl and on the console, with the last step; 0: none."""
    tokens: bool = advanced(True)
    """Record per-token values of the samples in the folder tokens: log-probs, values, advantages, ratios. A recorded
    step takes up to 45 bytes per response token and 5 per prompt token."""
    profile_steps: list[Annotated[int, Interval(ge=1), "leave the others out"]] = advanced([])
    """Steps whose torch profiler trace is written to the folder profile of the run."""

    def _check(self) -> None:
        require(
            len(set(self.sinks)) == len(self.sinks),
            f"logging.sinks must differ, got {', '.join(self.sinks)}: name each once",
        )
        if self.webhook is not None and not is_placeholder(self.webhook):
            check_url(self.webhook, key="logging.webhook", remedy="write ${NAME} for a variable that holds the URL")


class FaultsConfig(Settings):
    """Which faults end a run."""

    phase_timeout_seconds: Annotated[
        float, Interval(ge=0, lt=100000000), "give for example 1800, or 0 for no limit"
    ] = advanced(1800.0)
    """Time limit of a phase (generation, scoring, training, saving), in seconds; exceeding it ends the run and writes
    the stacks of all ranks to the folder stacks. 0: no limit."""
    max_skipped_steps: Natural = advanced(3)
    """Number of consecutive steps skipped because of a non-finite gradient, score or log-prob after which the run ends;
    0: no limit. Overflows of float16 count once its loss scale has fallen to 1."""

    @property
    def collective_timeout_seconds(self) -> float:
        """Time limit of a collective: longer than that of a phase, so that the watchdog acts first."""
        return self.phase_timeout_seconds + 120 if self.phase_timeout_seconds else 1e8


class StepConfig(Settings):
    """Settings of every training step; the step itself adds `data`."""

    output_dir: str = setting("output", mutable=True)
    """Folder of the run: model, config.yaml, metrics.jsonl, checkpoints."""
    seed: Natural = 42
    """Seed of all randomness: new heads, data order, sampling."""
    resume: str = setting("never", mutable=True)
    """never: reject a folder that contains a run; auto: resume from its last complete checkpoint, or exit with 0 if the
    run is finished; a checkpoint folder to resume from; or a model folder of a run to start from its weights."""
    deterministic: bool = advanced(False)
    """Bit-for-bit reproducible on a GPU, with slower kernels; runs on a CPU always are."""
    deepspeed_config: str | None = advanced(None)
    """DeepSpeed JSON file; its keys override those derived from the sections."""
    model: ModelConfig = section()
    data: DataConfig = section()
    logging: LoggingConfig = setting({}, mutable=True)
    faults: FaultsConfig = setting({}, mutable=True)


class SupervisedConfig(StepConfig):
    """Settings of the training steps on rows: SFT, reward model, preference."""

    data: RowDataConfig = section()
    lora: LoraConfig | None = None
    optimizer: OptimizerConfig = section()
    train: TrainConfig = section()
    zero: ZeroConfig = setting({}, mutable=True)

    def _check(self) -> None:
        require_trainable(self.model, self.optimizer, self.lora, section="lora", stage=self.zero.stage)
