"""Settings of training: the optimizer, ZeRO, the training loop and its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Interval

from hybrid_rlhf.configs.sections.model import LoraConfig, ModelConfig
from hybrid_rlhf.configs.sections.rules import (
    Count,
    Natural,
    NonNegative,
    Positive,
    Settings,
    Share,
    ShareBelowOne,
    advanced,
    require,
    setting,
)


class OptimizerConfig(Settings):
    """The optimizer, AdamW (Loshchilov and Hutter 2017, arXiv 1711.05101), with moments in 32 or 8 bits, or Muon, and
    its schedule."""

    following = {"max_grad_norm": lambda values: 0.0 if values["name"] == "muon" else values["max_grad_norm"]}

    name: Literal["adamw", "adamw_8bit", "muon"] = advanced("adamw")
    """adamw_8bit: AdamW with 2 instead of 8 bytes of moments per weight, on a GPU through bitsandbytes (Dettmers et al.
    2021, arXiv 2110.02861). muon: orthogonalised momentum for the matrices of the layers, AdamW for all other weights.
    The learning rate is AdamW's: Muon's updates are scaled to the size of AdamW's (Moonlight, arXiv 2502.16982). Both
    not with lora."""
    lr: NonNegative | None = None
    """Peak learning rate; null: derived from the model's width and its adapters (docs/defaults.md), and logged."""
    weight_decay: NonNegative = 0.0
    """Weight decay per step, times lr; not applied to norms and biases."""
    betas: tuple[ShareBelowOne, ShareBelowOne] = advanced((0.9, 0.95))
    """Adam's averaging coefficients (InstructGPT, appendix C)."""
    eps: Positive = advanced(1e-8)
    """Added to Adam's denominator (torch's default)."""
    schedule: Literal["linear", "cosine", "constant"] = "cosine"
    """Decay of lr after the warm-up: to 0 (linear, cosine) or none (constant)."""
    warmup_fraction: Share = 0.03
    """Fraction of the steps in which lr rises linearly from 0."""
    max_grad_norm: NonNegative = 1.0
    """Gradients are clipped to this global norm; 0: not clipped, as always with muon, whose updates have a fixed
    size."""

    def _check(self) -> None:
        require(
            self.name != "muon" or self.max_grad_norm == 0,
            f"max_grad_norm must be 0 with Muon, got {self.max_grad_norm}: set it to 0",
        )


class AdamStep(Settings):
    """One AdamW update of an adapter among others (engines/adapters), with the constants of this update."""

    lr: NonNegative = 1e-4
    """Learning rate."""
    betas: tuple[ShareBelowOne, ShareBelowOne] = (0.9, 0.95)
    """Adam's averaging coefficients."""
    eps: Positive = 1e-8
    """Added to Adam's denominator."""
    weight_decay: NonNegative = 0.0
    """Weight decay per step, times lr."""
    max_grad_norm: NonNegative = 0.0
    """The gradient is clipped to this norm; 0: not clipped."""


def require_trainable(
    model: ModelConfig, optimizer: OptimizerConfig, lora: LoraConfig | None, *, section: str, stage: int
) -> None:
    """Require that a model can be trained as set: by adapters over quantised base weights, which cannot be trained; by
    all weights where ranks split them; and by whole matrices, neither adapters nor parts, with Muon and with moments
    in 8 bits.

    Args:
        model: the model section.
        optimizer: its optimizer.
        lora: its adapters.
        section: key of the adapters.
        stage: its ZeRO stage; under stage 3, bitsandbytes would keep all gathered weights until the backward pass,
            unless activations are recomputed.
    """
    parts = model.tensor_parallel
    require(
        model.quantization is None or stage < 3 or model.gradient_checkpointing,
        f"model.quantization {model.quantization} under zero.stage 3 needs model.gradient_checkpointing, got false: "
        "leave it out",
    )
    require(
        parts == 1 or lora is None,
        f"model.tensor_parallel trains all weights, got {parts} with {section}: leave one of the two out",
    )
    require(
        model.quantization is None or lora is not None,
        f"model.quantization {model.quantization} trains adapters, got {section} null: give --{section}.rank 16",
    )
    require(
        optimizer.name != "muon" or (lora is None and parts == 1),
        "optimizer.name muon orthogonalises updates of whole matrices, got "
        f"{f'model.tensor_parallel {parts}' if lora is None else section}: leave one of the two out",
    )
    split = {"model.tensor_parallel": parts, "model.expert_parallel": model.expert_parallel}
    found = [section] * (lora is not None) + [f"{key} {size}" for key, size in split.items() if size > 1]
    require(
        optimizer.name != "adamw_8bit" or not found,
        f"optimizer.name adamw_8bit trains all weights of a model that ranks do not split, got {', '.join(found)}: "
        "set it to adamw",
    )


class ZeroConfig(Settings):
    """ZeRO sharding over the ranks (Rajbhandari et al. 2019, arXiv 1910.02054) and offloading to the host."""

    stage: Literal[0, 1, 2, 3] = 0
    """Sharded over the ranks: 0 nothing (in bfloat16 and float16 as 1), 1 optimizer states, 2 also gradients, which are
    reduced in every micro-batch, 3 also parameters."""
    offload_optimizer: bool = False
    """Keep optimizer states and master weights in host memory (stage 1 or more)."""
    offload_parameters: bool = False
    """Keep parameters in host memory between uses (stage 3)."""

    def _check(self) -> None:
        require(
            not self.offload_optimizer or self.stage >= 1,
            f"zero.offload_optimizer needs zero.stage 1 or more, got {self.stage}: set zero.stage to 2",
        )
        require(
            not self.offload_parameters or self.stage == 3,
            f"zero.offload_parameters needs zero.stage 3, got {self.stage}: set zero.stage to 3",
        )


def frozen_zero(sibling: ZeroConfig) -> ZeroConfig:
    """Sharding of a frozen model: none, or that of the trained model under ZeRO-3."""
    if sibling.stage < 3:
        return ZeroConfig()
    return ZeroConfig(stage=3, offload_parameters=sibling.offload_parameters)


class CheckpointConfig(Settings):
    """When checkpoints are written, and which are kept; SIGTERM and SIGUSR1 request one too."""

    save_every: Natural = setting(0, mutable=True)
    """Steps between checkpoints; 0: none."""
    save_minutes: NonNegative = advanced(0.0, mutable=True)
    """Minutes between checkpoints, written at the end of a step; 0: none."""
    save_async: bool = advanced(False, mutable=True)
    """Write checkpoints in the background, from a copy in host memory."""
    keep_last: Count = advanced(2, mutable=True)
    """Number of newest checkpoints to keep; an older one is used if the newest is damaged."""
    keep_every: Natural = advanced(0, mutable=True)
    """Checkpoints of steps divisible by this are never deleted; 0: none."""
    keep_best: str | None = advanced(None, mutable=True)
    """Also keep the checkpoint with the best metric, as max:eval/scores or min:eval/loss; null: none."""

    def _check(self) -> None:
        require(
            self.keep_best is None or self.keep_best.startswith(("max:", "min:")),
            f"train.keep_best is max:METRIC or min:METRIC, got {self.keep_best!r}: give for example min:eval/loss",
        )

    @property
    def best_metric(self) -> tuple[int, str] | None:
        """Sign and name of the metric of keep_best: the checkpoint with the largest product of both is the best."""
        if self.keep_best is None:
            return None
        how, _, name = self.keep_best.partition(":")
        return (1 if how == "max" else -1), name


MICRO_BATCH_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Default of train.micro_batch_tokens by type of device, on a GPU its smallest (docs/defaults.md)."""
HALVED_FILE = "micro_batch_tokens"
"""File of a run folder with the tokens of a micro-batch after the default was out of memory."""


FORWARD_FACTOR = {"cpu": 1, "cuda": 4}
"""Tokens of a micro-batch without gradient, relative to one with gradient, by type of device; a CPU gains nothing."""


@dataclass(frozen=True)
class MicroBatches:
    """Size of the micro-batches on a rank."""

    rows: int | None = None
    """Number of rows; None: as many as `tokens` allows."""
    tokens: int = 8192
    """Largest number of real tokens, unless a single row has more."""
    padded: bool = False
    """True if some layers of the model compute padding; tokens are then rows times the longest row."""
    ranks: int = 1
    """Number of ranks that compute a micro-batch together."""
    forward_factor: int = 1
    """So many times `tokens` are in a micro-batch without gradient, of which nothing is kept for a backward."""
    shares_prefixes: bool = False
    """True if tokens that rows have in common at their beginning count once."""


class LoopConfig(CheckpointConfig):
    """Length and micro-batches of a step."""

    micro_batch_size: Count | None = advanced(None, mutable=True)
    """Rows per micro-batch and rank; null: as many as micro_batch_tokens allows."""
    micro_batch_tokens: Count | None = setting(None, mutable=True)
    """Tokens per micro-batch and rank; padding counts only for models that need it, a prompt of several rows once where
    its tokens are computed once. null: 2048 on a CPU; on a GPU 8192 to 65536, as the memory plan and the size of the
    layers allow."""
    epochs: Count | Annotated[float, Interval(gt=0)] | None = None
    """Passes over the data, also a fraction; null: as many as max_steps needs, 1 without it."""
    max_steps: Count | None = None
    """Number of steps; the data repeats until it is reached, unless epochs is given and ends earlier. null: to the end
    of the last epoch."""
    eval_every: Natural = 0
    """Steps between evaluations on held-out rows; 0: only before the first and after the last step."""

    @property
    def passes(self) -> float | None:
        """Passes over the data; None if it repeats until max_steps."""
        return 1 if self.epochs is None and self.max_steps is None else self.epochs

    def total_steps(self, steps: int) -> int:
        """Steps of the run.

        Args:
            steps: those of all epochs, of a single one if `epochs` is null.
        """
        if self.max_steps is None:
            return steps
        return self.max_steps if self.epochs is None else min(steps, self.max_steps)

    def length_text(self, steps: int) -> str:
        """What ends the run, if max_steps does not by itself in the first epoch; empty otherwise. Argument as of
        `total_steps`."""
        if self.max_steps is None or (self.epochs is None and self.max_steps <= steps):
            return ""
        most = f"train.max_steps {self.max_steps:,}"
        if self.epochs is None:
            return f"{most}: the data repeats, an epoch has {steps:,} step{'s' * (steps != 1)}"
        all_epochs = f"train.epochs {self.epochs:,} ({steps:,} step{'s' * (steps != 1)})"
        if self.max_steps <= steps:
            return f"{most} ends the run, not {all_epochs}"
        return f"{all_epochs} ends the run, not {most}"

    def tokens_on(self, device: str) -> int:
        """Tokens of a micro-batch per rank on a type of device: cpu or cuda."""
        return self.micro_batch_tokens or MICRO_BATCH_TOKENS[device]

    def micro_batches(self, device: str, model: ModelConfig | None = None) -> MicroBatches:
        """The size of the micro-batches on a type of device, which several ranks of a model with sequence or tensor
        parallelism compute together; without a model one rank."""
        model = model or ModelConfig()
        tokens = self.tokens_on(device) * model.sequence_parallel
        factor = FORWARD_FACTOR[device] if self.micro_batch_size is None else 1
        return MicroBatches(self.micro_batch_size, tokens, ranks=model.ranks_together, forward_factor=factor)


class TrainConfig(LoopConfig):
    """Length and batch sizes of a supervised step."""

    global_batch_size: Count = 32
    """Rows in one optimizer update, over all ranks and micro-batches."""
