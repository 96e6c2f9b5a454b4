"""Loads Hugging Face models: dtype, attention kernel, dropout off.

Causal LMs serve as actor and reference, sequence classifiers as reward model and critic, with one label, or for a
reward model with several heads one label per head, named in id2label. With a ZeRO-3 config transformers builds the
model in partitions and streams the weights into them: rank 0 maps the files and broadcasts one module at a time; the
other ranks never open them. MXFP4 weights (gpt-oss) are dequantised to the run's dtype; under ZeRO-3 each rank then
loads all weights before they are partitioned.

A model for images or sound is loaded with its towers, although only text is read: AutoModelForCausalLM has classes of
the language model alone for some types (Qwen3.5), and what is not loaded would be missing in what is saved.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import (
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.modeling_layers import GenericForSequenceClassification

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.models.families import TOWER_FAMILIES, keep_float32_logits
from hybrid_rlhf.models.families.vision import images_refused
from hybrid_rlhf.models.fused_layers import BackendLinear, fuse_layers
from hybrid_rlhf.models.packing import use_packing
from hybrid_rlhf.models.pretrained.folders import load_config, reading, stored_shapes
from hybrid_rlhf.models.pretrained.processors import keep_processor
from hybrid_rlhf.models.pretrained.quantised import dequantisation, require_whole_mxfp4
from hybrid_rlhf.models.pretrained.sources import quiet_transformers
from hybrid_rlhf.models.routers.modules import route_without_noise
from hybrid_rlhf.models.tiled_mlp import tile_mlps
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.world import default_device, default_dtype

Architecture = Literal["causal_lm", "scorer"]
AUTO_CLASS: dict[Architecture, Any] = {
    "causal_lm": AutoModelForCausalLM,
    "scorer": AutoModelForSequenceClassification,
}
_LAYER = re.compile(r"\b(?:layers|h|blocks)\.(\d+)\.")
_PLACE = re.compile(r".*?\.\d+(?=\.)|[^.]+")
"""A name up to its first number, or its first part."""
_OLD_BUFFER = re.compile(r"inv_freq$|position_ids$|\.(attn|attention)\.(masked_)?bias$|version$")
"""Names of buffers that earlier versions of transformers stored."""
_NO_HEAD = "a reward model must have a score head, {} has none: give one that a reward step saved"
_NO_LM_HEAD = "a causal LM must have a language model head, {} is a reward model: give the model of an SFT step"
_GPU_KERNELS = ("fla", "causal_conv1d", "mamba_ssm")
"""Packages with kernels for recurrent layers."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes by their names in configs."""


def training_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype of model.dtype on a device.

    Raises:
        UserError: for float16 on a CPU, which DeepSpeed does not support.
    """
    if config.dtype == "auto":
        return default_dtype(device)
    if config.dtype == "float16" and device.type == "cpu":
        raise UserError("model.dtype float16 needs a GPU, this is a CPU: set model.dtype to float32 or bfloat16")
    return DTYPES[config.dtype]


def _use_torch_on_cpu() -> None:
    """Hide packages of GPU kernels on a CPU before a model's file is imported: transformers takes their functions
    wherever it can import them, and they fail there. Its advice to install them is not logged either."""
    if default_device().type == "cpu":
        sys.modules.update(dict.fromkeys(_GPU_KERNELS))  # type: ignore[arg-type]
        logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)


def lacks_kernels(model: nn.Module) -> bool:
    """True if a model has layers with a delta rule (Qwen3-Next, Qwen3.5) and their kernels are not installed."""
    return find_spec("fla") is None and any("Delta" in type(module).__name__ for module in model.modules())


def auto_class(config: PreTrainedConfig, architecture: Architecture) -> Any:
    """The class of transformers that builds a model with all its parts.

    Raises:
        UserError: for a type with towers that no class for text has, or that is not known to keep them.
    """
    _use_torch_on_cpu()
    auto = AUTO_CLASS[architecture]
    if architecture == "scorer" and images_refused(config) is None:
        _register_classifier(type(config))
    found = auto._model_mapping.get(type(config), None)
    if type(config) not in MODEL_FOR_MULTIMODAL_LM_MAPPING or getattr(found, "config_class", None) is type(config):
        return auto
    kind = config.model_type
    if architecture == "causal_lm" and kind in TOWER_FAMILIES:
        return AutoModelForMultimodalLM
    alone = "give its language model alone, saved as a model of text"
    if architecture == "scorer":
        raise UserError(
            f"a reward model or critic with towers for images or sound needs a classifier of transformers, {kind} has "
            f"none: {alone}"
        )
    raise UserError(
        f"a model with towers for images or sound must be of a type that docs/models.md lists, got {kind}: {alone}, or "
        "choose another"
    )


def _register_classifier(kind: type[PreTrainedConfig]) -> None:
    """Let transformers build a classifier of a vision-language model where it has no class of its own: a score over the
    whole model's last states, as its classes for Gemma 3 and Qwen3.5. Names of its weights in files are those of the
    generator."""
    if kind in AutoModelForSequenceClassification._model_mapping:
        return
    generator = MODEL_FOR_MULTIMODAL_LM_MAPPING[kind]
    family = next(part for part in generator.__mro__ if part.__name__.endswith("PreTrainedModel"))
    name = generator.__name__.replace("ForConditionalGeneration", "ForSequenceClassification")
    fields = {"config_class": kind, "__module__": generator.__module__}  # names of other modules' weights stay
    classifier = type(name, (GenericForSequenceClassification, family), fields)
    if (conversions := get_checkpoint_conversion_mapping(generator.__name__)) is not None:
        register_checkpoint_conversion_mapping(name, conversions)
    AutoModelForSequenceClassification.register(kind, classifier, exist_ok=True)  # else not for transformers' own types


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
        path: folder or hub name, the result of `resolve_model`.
        architecture: causal_lm (logits) or scorer (one score per token and head).
        config: attention kernel, trust, gradient checkpointing.
        dtype: dtype of the weights.
        zero3_config: the engine's DeepSpeed config if it partitions parameters (stage 3), else None.
        heads: names of a scorer's scores; empty: one score; None: the stored ones, at least one.

    Returns:
        the model, with dropout off; and whether its score head is newly initialised, as the folder has none.

    Raises:
        UserError: when transformers cannot load it, when a scorer has other heads or no head in its architecture, or
            when a causal LM is stored as a reward model.
    """
    hf_config = load_config(path, trust_remote_code=config.trust_remote_code)
    if architecture == "scorer":
        if heads is None:
            require_scorer(hf_config, path)
        elif is_scorer(hf_config):
            _require_heads(path, hf_config, heads)
    elif is_scorer(hf_config):
        raise UserError(_NO_LM_HEAD.format(path))
    build = auto_class(hf_config, architecture)
    adapt_config(hf_config, architecture, heads=heads)
    rule = f"transformers cannot load {path} as a {architecture}"
    faulty = partial(reading, rule, "copy the model again, or choose another", config=hf_config)
    dequantised = dequantisation(path, hf_config)
    if Path(path).is_dir() and not config.trust_remote_code:
        with quiet_transformers(), faulty():
            wanted = _require_stored(Path(path), architecture, hf_config)
        if dequantised:
            require_whole_mxfp4(Path(path), wanted)
    partitioning = HfDeepSpeedConfig(zero3_config) if zero3_config is not None else None
    try:
        with quiet_transformers(), faulty(), _unused_weights() as unused:
            model, info = build.from_pretrained(
                path,
                config=hf_config,
                dtype=dtype,
                attn_implementation=None if config.attention == "auto" else config.attention,
                trust_remote_code=config.trust_remote_code,
                use_safetensors=True,
                output_loading_info=True,
                **dequantised,
            )
    finally:
        if partitioning is not None:
            unset_hf_deepspeed_config()  # this config is global, and the next model may not be partitioned
    # else saving would use the names of MXFP4, or of an adapter beside the weights; None selects the family's names
    if dequantised or hasattr(model, "peft_config"):
        vars(model)["_weight_conversions"] = None
    elif (conversions := vars(model).get("_weight_conversions")) is not None:
        # those that renamed a weight; under ZeRO-3 transformers keeps all, and saving would use names of other files
        vars(model)["_weight_conversions"] = [conversion for conversion in conversions if conversion.was_used()]
    missing = set(info["missing_keys"])
    _require_weights(path, model, architecture, missing)
    _require_all_layers(path, hf_config, info["unexpected_keys"])
    if unused and architecture == "causal_lm":  # a scorer has another head
        _warn_of_unused(path, type(model).__name__, frozenset(unused))
    fresh = architecture == "scorer" and any(key.startswith("score.") for key in missing)
    if fresh and heads is None:
        raise UserError(_NO_HEAD.format(path))
    adapt_model(model, config)
    keep_float32_logits(model, config.head_dtype == "float32")
    keep_processor(model, path)
    return model, fresh


@contextlib.contextmanager
def _unused_weights() -> Iterator[set[str]]:
    """The names of stored weights that no module takes, after a load inside the block. Transformers says nothing of
    those of layers that it does not run, such as mtp."""
    unused: set[str] = set()
    adjust = PreTrainedModel._adjust_missing_and_unexpected_keys

    def noted(model: PreTrainedModel, info: Any) -> None:
        unused.update(name for name in info.unexpected_keys if not _OLD_BUFFER.search(name))
        adjust(model, info)

    PreTrainedModel._adjust_missing_and_unexpected_keys = noted
    try:
        yield unused
    finally:
        PreTrainedModel._adjust_missing_and_unexpected_keys = adjust


@functools.cache
def _warn_of_unused(path: str, model: str, unused: frozenset[str]) -> None:
    """Warn once of a model that several roles load."""
    places = Counter(_PLACE.match(name)[0] for name in sorted(unused))  # type: ignore[index]
    logger.warning(
        "%s has weights that no module of %s takes, which are neither trained nor in what is saved: %s",
        path,
        model,
        ", ".join(f"{place}.* ({count})" for place, count in places.items()),
    )


def _require_stored(folder: Path, architecture: Architecture, config: PreTrainedConfig) -> nn.Module:
    """The model on the meta device. A config.json of a larger model is rejected, because transformers would first
    allocate all weights that the files lack."""
    stored = sum(map(math.prod, stored_shapes(folder).values()))
    with torch.device("meta"):
        model: PreTrainedModel = auto_class(config, architecture).from_config(copy.deepcopy(config))
    wanted = model.num_parameters()
    if wanted > 4 * stored and not hasattr(
        config, "quantization_config"
    ):  # a stored element holds several quantised weights
        raise ValueError(f"its config.json describes {wanted:,} weights, its files have {stored:,}")
    return model


def _require_weights(path: str, model: PreTrainedModel, architecture: Architecture, missing: set[str]) -> None:
    """Require all weights except those of a score head, which may be new but must exist in the architecture."""
    if architecture == "scorer":
        require_score(model, path)
    absent = {key for key in missing if not key.startswith("score.")} - set(getattr(model, "all_tied_weights_keys", {}))
    if absent:
        raise UserError(
            f"{path} lacks {len(absent)} weights of its architecture, for example {min(absent)}: copy it again"
        )


def require_score(model: PreTrainedModel, path: str) -> None:
    """Require a model with a score per token; encoders have a score per row."""
    if not hasattr(model, "score"):
        raise UserError(
            f"a scorer must have a score per token, {path} is a {type(model).__name__}: use a decoder as reward model"
        )


def _require_all_layers(path: str, config: PreTrainedConfig, unused: set[str]) -> None:
    """Reject weights of more layers than config.json has: transformers ignores unused weights silently."""
    layers = config.get_text_config().num_hidden_layers
    beyond = sorted(name for name in unused if (place := _LAYER.search(name)) and int(place[1]) >= layers)
    if beyond:
        raise UserError(f"config.json of {path} has {layers} layers, its weights have more ({beyond[0]}): correct it")


def shape_model(
    config: PreTrainedConfig, architecture: Architecture, section: ModelConfig, *, dtype: torch.dtype
) -> PreTrainedModel:
    """The model of a config as `load_model` prepares it, on the meta device.

    Args:
        config: config of the model, which is changed.
        architecture: causal_lm or scorer.
        section: attention kernel, trust, gradient checkpointing.
        dtype: dtype of the weights.
    """
    with quiet_transformers(), torch.device("meta"):
        model: PreTrainedModel = auto_class(config, architecture).from_config(
            config,
            dtype=dtype,
            attn_implementation=None if section.attention == "auto" else section.attention,
            trust_remote_code=section.trust_remote_code,
        )
        adapt_model(model, section)
        keep_float32_logits(model, section.head_dtype == "float32")
    return model


def is_scorer(config: PreTrainedConfig) -> bool:
    """Return True if a stored model has a score head; labels do not tell, as a causal LM's config has them too."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def require_scorer(config: PreTrainedConfig, shown: str) -> None:
    """Require a model to be stored with a score head, as a new head gives random scores; errors call the model
    `shown`."""
    if not is_scorer(config):
        raise UserError(_NO_HEAD.format(shown))


def stored_heads(config: PreTrainedConfig) -> tuple[str, ...]:
    """Names of the scores of a stored scorer with several scores, in order; empty for other models."""
    several = is_scorer(config) and config.num_labels > 1
    return tuple(config.id2label[place] for place in range(config.num_labels)) if several else ()


def _require_heads(path: str, config: PreTrainedConfig, heads: Sequence[str]) -> None:
    """Require the heads that the scorer is stored with, as scores cannot be matched otherwise."""
    stored = stored_heads(config)
    if stored != tuple(heads):
        wanted, present = (", ".join(names) or "one score" for names in (heads, stored))
        raise UserError(
            f"a stored scorer keeps its scores, {path} has {present}, the run needs {wanted}: set objective.heads to "
            "the same, or start from a model without scores (critic.path, model.path)"
        )


def position_limit(model: PreTrainedModel) -> int | None:
    """Number of rows of a table of learned positions; None if positions are computed.

    For rotary positions that change once a sequence exceeds a length (longrope, dynamic), it is that length.
    """
    config = model.config.get_text_config()
    limit: int | None = getattr(config, "max_position_embeddings", None)
    rotary = getattr(config, "rope_parameters", None) or {}
    if rotary.get("rope_type") in ("longrope", "dynamic"):
        return int(rotary.get("original_max_position_embeddings") or limit or 0) or None
    words = model.get_input_embeddings()
    tables = (m for m in model.modules() if isinstance(m, nn.Embedding) and m is not words)
    # OPT's table starts at its third row
    return limit if limit and any(limit <= table.num_embeddings <= limit + 2 for table in tables) else None


def adapt_config(config: PreTrainedConfig, architecture: Architecture, *, heads: Sequence[str] | None = None) -> None:
    """Set a scorer's heads (see `load_model`) and every dropout to 0 (N details, no. 13: PPO's ratio starts at 1)."""
    if architecture == "scorer":
        names = stored_heads(config) if heads is None else heads
        config.num_labels = max(len(names), 1)
        if names:
            config.id2label = dict(enumerate(names))
            config.label2id = {name: place for place, name in enumerate(names)}
    for part in (config, config.get_text_config()):
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
                setattr(part, name, 0.0)


def adapt_model(model: PreTrainedModel, config: ModelConfig) -> None:
    """Disable dropout that has no config key; set faster layers on a CPU, MLPs in parts, packed attention, routers
    without noise, and activation checkpointing."""
    on_cpu = default_device().type == "cpu"
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if on_cpu and type(module) is nn.Linear:
            module.__class__ = BackendLinear
    if on_cpu:
        fuse_layers(model)
    if config.mlp_parts > 1:
        tile_mlps(model, config.mlp_parts)
    if config.attention in ("auto", "sdpa"):
        use_packing(model)
    route_without_noise(model)
    if config.gradient_checkpointing:
        # transformers 5.23 deprecates the older name
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
