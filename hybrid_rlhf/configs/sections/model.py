"""Which model a step trains, how it computes, and low-rank adapters."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, ClassVar, Literal

from hybrid_rlhf.configs.sections.rules import Positive, Settings, require, setting

ROUTER_KEYS = ("router_aux_loss_coef", "router_z_loss_coef")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Settings):
    """The model, its dtypes and kernels."""

    path: str | None = None
    """Model to start from: a Hugging Face folder, a hub name or a .gguf file."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights in training; auto: bfloat16 on a GPU, float32 on a CPU."""
    head_dtype: Literal["float32", "model"] = setting("float32", advanced=True)
    """Type of the logits in training and sampling: float32 (ScaleRL, arXiv 2510.13786), or that of the model."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = setting(
        "auto", advanced=True
    )
    """Attention kernel, by its transformers name; auto: sdpa if the model supports it, else eager."""
    gradient_checkpointing: bool = setting(False, mutable=True)
    """Recompute activations in the backward pass: less memory, about a third more time."""
    router_aux_loss_coef: Annotated[float, "0 (off) or more"] | None = setting(None, advanced=True)
    """Weight of the load-balancing loss of a mixture of experts (Switch, arXiv 2101.03961, eq. 4); null: the model's
    own value if its config sets output_router_logits, as in transformers, else 0."""
    router_z_loss_coef: Annotated[float, "0 (off) or more"] | None = setting(None, advanced=True)
    """Weight of the router z-loss of a mixture of experts (ST-MoE, arXiv 2202.08906, eq. 5: 0.001); null: as above."""
    activation_offload: bool = setting(False, advanced=True, mutable=True)
    """Keep activations in host memory until the backward pass; with gradient_checkpointing, one per layer."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for sources you trust."""


SCORER_KEYS = tuple(key.name for key in fields(ModelConfig) if key.name not in ROUTER_KEYS)
"""Keys of a model that is trained as a scorer only."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Settings):
    """Low-rank adapters (LoRA, arXiv 2106.09685) through peft. A saved model contains them merged; its folder adapter
    contains them alone.

    The default learning rate of adapters is ten times that of all weights (LoRA Without Regret, 2025).
    """

    least_rank: ClassVar[int] = 1

    rank: int = 16
    """Rank of the adapters (16: a common default of peft users)."""
    alpha: Positive = 16.0
    """The adapters' output is scaled by alpha / rank (16: a common default of peft users)."""
    target_modules: str | list[str] = setting("all-linear", advanced=True)
    """Names of the linear layers to adapt; all-linear: all except the head (QLoRA, arXiv 2305.14314)."""

    def _check(self) -> None:
        require(
            self.least_rank <= self.rank <= 2**16,
            f"lora.rank must be {self.least_rank} to 65536, got {self.rank}: give for example 16, or lora null to "
            f"train "
            "all weights",
        )


@dataclass(frozen=True, kw_only=True)
class CriticLoraConfig(LoraConfig):
    """Adapters of the critic; rank 0 trains all its weights even if the actor has adapters."""

    least_rank = 0

    rank: int = 16
    """Rank of the adapters (16: a common default of peft users); 0: all weights are trained."""
