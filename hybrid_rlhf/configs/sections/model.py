"""Settings of the model that a step trains, its computation, and low-rank adapters."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Literal

from annotated_types import Interval

from hybrid_rlhf.configs.sections.rules import (
    Count,
    FloatType,
    NonNegative,
    Positive,
    Settings,
    advanced,
    require,
    setting,
)


class ModelConfig(Settings):
    """The model, its dtypes and kernels."""

    following = {"gradient_checkpointing": lambda values: values["quantization"] is not None}
    """4-bit weights are for machines with little memory."""

    path: str | None = None
    """Model to start from: a Hugging Face folder, a hub name or a .gguf file."""
    dtype: FloatType = "auto"
    """Type of the weights in training; auto: bfloat16 on a GPU, float32 on a CPU."""
    head_dtype: Literal["float32", "model"] = advanced("float32")
    """Type of the logits in training and sampling: float32 (ScaleRL, arXiv 2510.13786), or that of the model."""
    vision: Literal["freeze", "train"] = advanced("freeze")
    """What images do to the tower and projector of a vision-language model: freeze keeps them; train trains them with
    the language model, without weight decay. Not with lora."""
    quantization: Literal["nf4"] | None = None
    """nf4: the base weights of linear layers in 4 bits, with adapters that train (QLoRA, arXiv 2305.14314); needs lora
    and bitsandbytes. For all models of the run."""
    sequence_parallel: Count = advanced(1, mutable=True)
    """Number of ranks that compute the tokens of a row together (DeepSpeed-Ulysses, arXiv 2309.14509), in training and
    scoring; a divisor of the number of attention heads and of ranks. For rows too long for one GPU."""
    expert_parallel: Count = advanced(1, mutable=True)
    """Number of ranks that split the experts of each layer of a mixture (GShard, arXiv 2006.16668), in training and
    scoring; a divisor of the number of experts and of ranks. For mixtures whose experts are most of the memory."""
    tensor_parallel: Count = advanced(1)
    """Number of ranks that share the weights of each layer and compute rows together (Megatron-LM, arXiv 1909.08053),
    in training and scoring; a divisor of the numbers of attention and key heads and of ranks. Not with lora."""
    mlp_parts: Count = advanced(1, mutable=True)
    """Number of parts in which an MLP computes the tokens of a micro-batch, recomputed in the backward pass; 8 or more
    for long rows (ALST, arXiv 2506.13996)."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = advanced("auto")
    """Attention kernel, by its transformers name; auto: sdpa if the model supports it, else eager."""
    gradient_checkpointing: bool = setting(False, mutable=True)
    """Recompute activations in the backward pass: less memory, about a third more time. With quantization: true."""
    router_aux_loss_coef: NonNegative | None = advanced(None)
    """Weight of the load-balancing loss of a mixture of experts (Switch, arXiv 2101.03961, eq. 4); null: the model's
    own value if its config sets output_router_logits, as in transformers, else 0."""
    router_z_loss_coef: NonNegative | None = advanced(None)
    """Weight of the router z-loss of a mixture of experts (ST-MoE, arXiv 2202.08906, eq. 5: 0.001); null: as above."""
    activation_offload: bool = advanced(False, mutable=True)
    """Keep activations in host memory until the backward pass; with gradient_checkpointing, one per layer."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for sources you trust."""

    @property
    def ranks_together(self) -> int:
        """Number of ranks that compute a micro-batch together."""
        return max(self.sequence_parallel, self.tensor_parallel)

    def _check(self) -> None:
        for key, parts in (("expert_parallel", "experts"), ("tensor_parallel", "weights")):
            value = getattr(self, key)
            require(
                value == 1 or self.quantization is None,
                f"model.{key} {value} splits {parts} in the dtype of the model, got model.quantization "
                f"{self.quantization}: leave one out",
            )
        sizes = {
            f"model.{name}": getattr(self, name) for name in ("sequence_parallel", "tensor_parallel", "expert_parallel")
        }
        set_keys = [f"{key} {size}" for key, size in sizes.items() if size > 1]
        require(
            len(set_keys) < 2,
            f"one of {', '.join(sizes)} can be more than 1, got {' and '.join(set_keys)}: leave one out",
        )


SCORER_KEYS = tuple(key.name for key in fields(ModelConfig) if not key.name.startswith("router_"))
"""Keys of a model that is trained only as a scorer."""


class LoraConfig(Settings):
    """Low-rank adapters (LoRA, arXiv 2106.09685) through peft. A saved model contains them merged; its folder adapter
    contains them alone.

    The default learning rate of adapters is ten times that of all weights (LoRA Without Regret, 2025).
    """

    rank: Annotated[int, Interval(ge=1, le=65536), "give for example 16, or lora null to train all weights"] = 16
    """Rank of the adapters (16: a common default of peft users)."""
    alpha: Positive = 16.0
    """The adapters' output is scaled by alpha / rank (16: a common default of peft users)."""
    target_modules: str | list[str] = advanced("all-linear")
    """Names of the linear layers to adapt; all-linear: all except the head (QLoRA, arXiv 2305.14314)."""


class CriticLoraConfig(LoraConfig):
    """Adapters of the critic; rank 0 trains all its weights even if the actor has adapters."""

    rank: Annotated[int, Interval(ge=0, le=65536)] = 16
    """Rank of the adapters (16: a common default of peft users); 0: all weights are trained."""
