"""Hugging Face models by config: dtype, attention kernel, dropout off.

Causal LMs serve as actor and reference, sequence classifiers as reward model and critic: one label, or of a reward
model one a head, named by id2label. With a ZeRO-3
config transformers builds the model in partitions and streams the weights into them: rank 0 maps the files and
broadcasts one module at a time, the other ranks never open them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections import ModelConfig
from hybrid_rlhf.functional.products import linear
from hybrid_rlhf.models.families import keep_float32_logits
from hybrid_rlhf.models.folders import load_config, reading, stored_elements
from hybrid_rlhf.models.fused_layers import fuse_layers
from hybrid_rlhf.models.packing import use_packing
from hybrid_rlhf.models.sources import quiet_transformers
from hybrid_rlhf.runtime.world import default_device, default_dtype

Architecture = Literal["causal_lm", "scorer"]
AUTO_CLASS: dict[Architecture, Any] = {
    "causal_lm": AutoModelForCausalLM,
    "scorer": AutoModelForSequenceClassification,
}
_LAYER = re.compile(r"\b(?:layers|h|blocks)\.(\d+)\.")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""By the names that configs use."""


def training_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype that model.dtype names on this device.

    Raises:
        UserError: for float16 on a CPU, which DeepSpeed does not train.
    """
    if config.dtype == "auto":
        return default_dtype(device)
    if config.dtype == "float16" and device.type == "cpu":
        raise UserError(
            "model.dtype float16 trains on GPUs only, this is a CPU: set model.dtype to float32 or bfloat16"
        )
    return DTYPES[config.dtype]


def load_model(
    path: str,
    architecture: Architecture,
    *,
    config: ModelConfig,
    dtype: torch.dtype,
    zero3_config: dict[str, Any] | None = None,
    heads: Sequence[str] | None = (),
) -> tuple[PreTrainedModel, bool]:
    """Load a resolved model for training or scoring.

    Args:
        path: folder or hub name, see `resolve_model`.
        architecture: causal_lm (logits) or scorer (one score a token).
        config: attention kernel, trust, gradient checkpointing.
        dtype: of the weights.
        zero3_config: the engine's DeepSpeed config when it shards parameters (stage 3), else none.
        heads: names of a scorer's several scores; empty: it has one; none: those that it is stored with.

    Returns:
        the model, dropout off; and whether its score head is fresh (a causal LM's folder has none).

    Raises:
        UserError: when transformers cannot load it, or it is a scorer with other heads.
    """
    hf_config = load_config(path, trust_remote_code=config.trust_remote_code)
    if architecture == "scorer" and heads is not None and is_scorer(hf_config):
        _require_heads(path, hf_config, heads)
    adapt_config(hf_config, architecture, heads=heads)
    rule = f"transformers cannot load {path} as a {architecture}"
    if Path(path).is_dir() and not config.trust_remote_code:
        with quiet_transformers(), reading(rule, "copy the model again, or choose another"):
            _require_stored(Path(path), architecture, hf_config)
    partitioning = HfDeepSpeedConfig(zero3_config) if zero3_config is not None else None
    try:
        with quiet_transformers(), reading(rule, "copy the model again, or choose another"):
            model, info = AUTO_CLASS[architecture].from_pretrained(
                path,
                config=hf_config,
                dtype=dtype,
                attn_implementation=None if config.attention == "auto" else config.attention,
                trust_remote_code=config.trust_remote_code,
                use_safetensors=True,
                output_loading_info=True,
            )
    finally:
        if partitioning is not None:
            unset_hf_deepspeed_config()  # it is global: the next model may not be partitioned
    missing = set(info["missing_keys"])
    _require_weights(path, model, architecture, missing)
    _require_all_layers(path, hf_config, info["unexpected_keys"])
    adapt_model(model, config)
    keep_float32_logits(model, config.head_dtype == "float32")
    return model, architecture == "scorer" and any(key.startswith("score.") for key in missing)


class _Linear(nn.Linear):
    """One whose products are ours; its weights, names and kin are those of torch's."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name is torch's
        return linear(input, self.weight, self.bias)


def _require_stored(folder: Path, architecture: Architecture, config: PreTrainedConfig) -> None:
    """Transformers would make up, in memory, all that config.json asks for and the files lack, before it says so."""
    stored = stored_elements(folder)
    with torch.device("meta"):
        wanted = AUTO_CLASS[architecture].from_config(copy.deepcopy(config)).num_parameters()
    if wanted > 4 * stored and not hasattr(config, "quantization_config"):  # quantised, several are stored as one
        raise ValueError(f"its config.json describes {wanted:,} weights, its files have {stored:,}")


def _require_weights(path: str, model: PreTrainedModel, architecture: Architecture, missing: set[str]) -> None:
    """All but those of a score head, which may be fresh, but must be one that a decoder has."""
    if architecture == "scorer" and not hasattr(model, "score"):
        raise UserError(
            f"{path} is a {type(model).__name__}, which has no score a token: take a reward model that is a decoder"
        )
    absent = {key for key in missing if not key.startswith("score.")} - set(getattr(model, "all_tied_weights_keys", {}))
    if absent:
        raise UserError(
            f"{path} lacks {len(absent)} weights of its architecture, for example {min(absent)}: copy it again"
        )


def _require_all_layers(path: str, config: PreTrainedConfig, unused: set[str]) -> None:
    """Weights that a model has no place for are left out in silence; a whole layer is no small thing."""
    layers = config.get_text_config().num_hidden_layers
    beyond = sorted(name for name in unused if (place := _LAYER.search(name)) and int(place[1]) >= layers)
    if beyond:
        raise UserError(f"config.json of {path} has {layers} layers, its weights have more ({beyond[0]}): mend it")


def is_scorer(config: PreTrainedConfig) -> bool:
    """Whether a stored model has a score head; a causal LM's config has labels too, which mean nothing."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def stored_heads(config: PreTrainedConfig) -> tuple[str, ...]:
    """Names of the scores of a scorer that has several, in their order; else none."""
    several = is_scorer(config) and config.num_labels > 1
    return tuple(config.id2label[place] for place in range(config.num_labels)) if several else ()


def _require_heads(path: str, config: PreTrainedConfig, heads: Sequence[str]) -> None:
    """A score cannot be told which of several it is to be."""
    stored = stored_heads(config)
    if stored != tuple(heads):
        wanted, found = (", ".join(names) or "one score" for names in (heads, stored))
        raise UserError(
            f"a scorer goes on with the scores it has, {path} has {found} where {wanted} is wanted: name the same in "
            "preference.heads, or start from a model without scores (critic.path, model.path)"
        )


def position_limit(model: PreTrainedModel) -> int | None:
    """Longest sequence that a table of learned positions has room for; none where positions are computed.

    Of rotary positions that are others once a sequence of the batch is longer, up to where they are not.
    """
    config = model.config.get_text_config()
    limit: int | None = getattr(config, "max_position_embeddings", None)
    rotary = getattr(config, "rope_parameters", None) or {}
    if rotary.get("rope_type") in ("longrope", "dynamic"):
        return int(rotary.get("original_max_position_embeddings") or limit or 0) or None
    words = model.get_input_embeddings()
    tables = (m for m in model.modules() if isinstance(m, nn.Embedding) and m is not words)
    # OPT's begins at its third row
    return limit if limit and any(limit <= table.num_embeddings <= limit + 2 for table in tables) else None


def adapt_config(config: PreTrainedConfig, architecture: Architecture, *, heads: Sequence[str] | None = None) -> None:
    """The scores of a scorer, see load_model, and every dropout 0 (N details, no. 13: PPO's ratio must start at 1)."""
    if architecture == "scorer":
        names = stored_heads(config) if heads is None else heads
        config.num_labels = max(len(names), 1)
        if names:
            config.id2label = dict(enumerate(names))
            config.label2id = {name: place for place, name in enumerate(names)}
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
            setattr(config, name, 0.0)


def adapt_model(model: PreTrainedModel, config: ModelConfig) -> None:
    """Dropout that no config names, products and fused layers of a CPU, packed attention, activation checkpointing."""
    on_cpu = default_device().type == "cpu"
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if on_cpu and type(module) is nn.Linear:
            module.__class__ = _Linear
    if on_cpu:
        fuse_layers(model)
    if config.attention in ("auto", "sdpa"):
        use_packing(model)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
