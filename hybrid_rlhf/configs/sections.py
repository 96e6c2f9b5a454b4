"""The config sections that the steps share.

Each field says its meaning, its unit and where its default comes from. The docstrings are the text of ``--help``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from hybrid_rlhf.configs.batch_plan import MicroBatches
from hybrid_rlhf.configs.faults import FaultsConfig
from hybrid_rlhf.configs.rules import require, require_template_variables


def require_shares(split: list[float]) -> None:
    """Raise UserError unless there is a share for each of the three steps."""
    require(
        len(split) == 3 and all(share >= 0 for share in split) and sum(split) > 0,
        f"data.split must be three shares, one a step, got {split}: give for example [2, 4, 4]",
    )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, and how it computes."""

    path: str | None = None
    """Hugging Face folder, hub name or .gguf file of the model to start from."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights in training; auto: bfloat16 on a GPU, float32 on a CPU."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "auto"
    """Attention kernel, by its transformers name; auto: sdpa where the model has it, else eager."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward: less memory, about a third more time."""
    activation_offload: bool = False
    """Activations wait for backward in host memory; with gradient_checkpointing, the one a layer keeps."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for sources you trust."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) through peft; merged when the model is saved."""

    rank: int = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: float = 16.0
    """The adapters' output is scaled by alpha / rank (peft's customary 16)."""
    target_modules: str | list[str] = "all-linear"
    """Names of the linear layers to adapt; all-linear: each but the head (QLoRA, arXiv 2305.14314)."""

    def __post_init__(self) -> None:
        require(self.rank >= 0, f"lora.rank must be 0 (off) or more, got {self.rank}: give 0 or for example 16")
        require(self.rank <= 2**16, f"lora.rank must be at most 65536, got {self.rank}: give for example 16")
        require(self.alpha > 0, f"lora.alpha must be above 0, got {self.alpha}: give for example 16")


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """One source of a blend."""

    path: str
    """A .jsonl, .json or .parquet file, a folder of datasets.save_to_disk, or a hub name."""
    weight: float = 1.0
    """Passes over this source an epoch: 0.5 takes half of its rows, 2 takes each row twice."""
    split_name: str = "train"
    """Split to take from a hub name or a DatasetDict folder."""

    def __post_init__(self) -> None:
        require(self.weight > 0, f"weight of {self.path} must be above 0, got {self.weight}: leave the source out")
        require(self.weight <= 1000, f"weight of {self.path} must be at most 1000 passes, got {self.weight}: lower it")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the rows come from and how they become tokens."""

    sources: list[str | DataSource] = field(default_factory=list)
    """Paths, or {path, weight, split_name}, blended."""
    eval_sources: list[str | DataSource] = field(default_factory=list)
    """Held-out sources; none: eval_fraction of the sources is held out."""
    eval_fraction: float = 0.05
    """Share of the rows held out when there are no eval_sources (0 holds nothing out)."""
    max_eval_rows: int = 512
    """At most this many rows are held out or evaluated on."""
    split: list[float] | None = None
    """Shares of one data set dealt to the three steps without overlap, e.g. [2, 4, 4] (DeepSpeed-Chat)."""
    max_length: int = 1024
    """Longest row in tokens, prompt and completion together (TRL's SFT default)."""
    too_long: Literal["truncate", "drop"] = "drop"
    """What happens to longer rows; they are counted and reported either way. A truncated prompt keeps BOS and the
    system's turn."""
    cache_dir: str | None = None
    """Folder for tokenised rows; none: ~/.cache/hybrid_rlhf."""
    chat_template: str | None = None
    """Jinja file that replaces the tokenizer's chat template, and is saved with the model; none: the tokenizer's."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as {enable_thinking: false}; they become its defaults, and are saved."""

    def __post_init__(self) -> None:
        require(
            0 <= self.eval_fraction < 1,
            f"data.eval_fraction must be in [0, 1), got {self.eval_fraction}: give for example 0.05",
        )
        require(self.max_eval_rows >= 1, f"data.max_eval_rows must be 1 or more, got {self.max_eval_rows}: raise it")
        require(self.max_length >= 2, f"data.max_length must be 2 tokens or more, got {self.max_length}: raise it")
        require_template_variables(self.chat_template_kwargs)
        if self.split is not None:
            require_shares(self.split)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2017, arXiv 1711.05101) and its schedule."""

    lr: float = 1e-5
    """Highest learning rate; where lora.rank is set the default is ten times higher (TRL, lora_without_regret.md)."""
    weight_decay: float = 0.0
    """Decay a step, times lr; norms and biases are spared."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's averaging coefficients (InstructGPT, appendix C)."""
    eps: float = 1e-8
    """Added to Adam's denominator (torch's default)."""
    schedule: Literal["linear", "cosine", "constant"] = "cosine"
    """How lr falls after the warm-up: to 0 (linear, cosine) or not at all."""
    warmup_fraction: float = 0.03
    """Share of the steps in which lr rises linearly from 0."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 does not clip."""

    def __post_init__(self) -> None:
        require(self.lr >= 0, f"optimizer.lr must be 0 or more, got {self.lr}: give for example 1e-5")
        require(
            self.weight_decay >= 0,
            f"optimizer.weight_decay must be 0 or more, got {self.weight_decay}: give for example 0.1",
        )
        require(
            all(0 <= beta < 1 for beta in self.betas),
            f"optimizer.betas must be in [0, 1), got {self.betas}: give for example [0.9, 0.95]",
        )
        require(self.eps > 0, f"optimizer.eps must be above 0, got {self.eps}: give for example 1e-8")
        require(
            0 <= self.warmup_fraction <= 1,
            f"optimizer.warmup_fraction must be in [0, 1], got {self.warmup_fraction}: give for example 0.03",
        )
        require(
            self.max_grad_norm >= 0,
            f"optimizer.max_grad_norm must be 0 (off) or more, got {self.max_grad_norm}: give for example 1.0",
        )


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """What ZeRO (Rajbhandari et al. 2019, arXiv 1910.02054) shards over the ranks, and what lives on the host."""

    stage: Literal[0, 1, 2, 3] = 0
    """0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters."""
    offload_optimizer: bool = False
    """Keep optimizer states and master weights in host memory (stage 1 or more)."""
    offload_parameters: bool = False
    """Keep parameters in host memory between uses (stage 3)."""

    def __post_init__(self) -> None:
        require(
            not self.offload_optimizer or self.stage >= 1,
            f"zero.offload_optimizer needs zero.stage 1 or more, got {self.stage}: set zero.stage to 2",
        )
        require(
            not self.offload_parameters or self.stage == 3,
            f"zero.offload_parameters needs zero.stage 3, got {self.stage}: set zero.stage to 3",
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints to resume from are written, and which are kept; SIGTERM and SIGUSR1 ask for one too."""

    save_every: int = 0
    """Steps between checkpoints to resume from; 0: none."""
    save_minutes: float = 0.0
    """Minutes after which the end of a step writes one all the same; 0: none."""
    save_async: bool = False
    """Training goes on while a checkpoint is written, from a copy of it in host memory."""
    keep_last: int = 2
    """Newest checkpoints that are kept; an older one serves where the newest is broken."""
    keep_every: int = 0
    """Checkpoints of steps divisible by this are kept for good; 0: none."""
    keep_best: str | None = None
    """Also keep the best by a metric of its step, as max:eval/scores or min:eval/loss; none: no such."""

    def __post_init__(self) -> None:
        for name in ("save_every", "save_minutes", "keep_every"):
            require(getattr(self, name) >= 0, f"train.{name} must be 0 or more, got {getattr(self, name)}: raise it")
        require(self.keep_last >= 1, f"train.keep_last must be 1 or more, got {self.keep_last}: raise it")
        require(
            self.keep_best is None or self.keep_best.partition(":")[0] in ("max", "min") and ":" in self.keep_best,
            f"train.keep_best is max:METRIC or min:METRIC, got {self.keep_best!r}: give for example min:eval/loss",
        )

    @property
    def best_metric(self) -> tuple[int, str] | None:
        """Sign and name of the metric of keep_best: the largest product is the best."""
        if self.keep_best is None:
            return None
        how, _, name = self.keep_best.partition(":")
        return (1 if how == "max" else -1), name


@dataclass(frozen=True, kw_only=True)
class LoopConfig(CheckpointConfig):
    """How long a step runs, and in which portions."""

    micro_batch_size: int | None = None
    """Rows that pass through a model at once on a rank; none: as many as micro_batch_tokens allows."""
    micro_batch_tokens: int = 8192
    """Tokens that pass through a model at once on a rank; padding counts only for models that cannot do without."""
    epochs: int = 1
    """Passes over the data."""
    max_steps: int | None = None
    """Stop after this many steps; none: after the last epoch."""
    eval_every: int = 0
    """Steps between evaluations on held-out rows; 0: only before the first and after the last step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("micro_batch_size", "max_steps"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"train.{name} must be 1 or more, got {value}: leave it out")
        for name in ("micro_batch_tokens", "epochs"):
            require(getattr(self, name) >= 1, f"train.{name} must be 1 or more, got {getattr(self, name)}: raise it")
        require(self.eval_every >= 0, f"train.eval_every must be 0 or more, got {self.eval_every}: raise it")

    @property
    def micro_batches(self) -> MicroBatches:
        """What passes through a model at once."""
        return MicroBatches(self.micro_batch_size, self.micro_batch_tokens)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LoopConfig):
    """How long a supervised step runs, and in which portions."""

    global_batch_size: int = 32
    """Rows in one optimizer update, over all ranks and micro-batches."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.global_batch_size >= 1,
            f"train.global_batch_size must be 1 or more, got {self.global_batch_size}: raise it",
        )


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What is told about a run."""

    every: int = 1
    """Steps between two lines of metrics."""
    tensorboard: bool = True
    """Write TensorBoard events beside metrics.jsonl."""
    samples_every: int = 10
    """Steps between two prints of sample completions; 0: none."""
    profile_steps: list[int] = field(default_factory=list)
    """Steps whose torch profiler trace is written to the run's profile folder."""

    def __post_init__(self) -> None:
        require(self.every >= 1, f"logging.every must be 1 or more, got {self.every}: raise it")
        require(
            self.samples_every >= 0,
            f"logging.samples_every must be 0 (none) or more, got {self.samples_every}: give for example 10",
        )
        require(
            all(step >= 1 for step in self.profile_steps),
            f"logging.profile_steps must be steps from 1 on, got {self.profile_steps}: leave the others out",
        )


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """What every training step has."""

    output_dir: str = "output"
    """Folder of the run: model, config.yaml, metrics.jsonl, checkpoints."""
    seed: int = 42
    """Seed of all randomness: initial heads, data order, sampling."""
    resume: str = "never"
    """never: refuse a folder that holds a run; auto: go on from its newest whole checkpoint, or exit with 0 if it is
    finished; a checkpoint folder; or a model folder that a run made, whose weights are the start of a new run."""
    deterministic: bool = False
    """The same seed and layout give the same bits on a GPU too, with slower kernels; a CPU does so anyway."""
    deepspeed_config: str | None = None
    """DeepSpeed JSON file; its keys win over what the sections derive."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
