"""Reads a GGUF file: settings, weights and tokenizer by transformers, completed with settings that it ignores.

transformers ignores scaled rotary positions, and the sizes of experts (not their number), so that the model would
compute something else. It reads a mixture of experts of the architecture `llama` (Mixtral) as a dense model, so its
weights are read here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hybrid_rlhf.models.pretrained.gguf.families import FAMILIES, head_size, named_parts, read_weight
from hybrid_rlhf.models.pretrained.gguf.positions import FREQUENCIES, LONG, SHORT, read_scaling, rotary

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

_LEFT_OUT = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}
"""Settings that transformers does not read for all families that have them."""


def read_gguf(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The causal LM of a file, in float32, and its tokenizer.

    Raises:
        Exception: of transformers or gguf, for a file that they cannot read.
    """
    from gguf import GGUFReader

    config = read_gguf_config(file)
    place = str(file.parent)
    if isinstance(config, MixtralConfig):
        weights = _weights(GGUFReader(file), config)
        lm = MixtralForCausalLM.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32)
    else:
        lm = AutoModelForCausalLM.from_pretrained(place, gguf_file=file.name, config=config, dtype=torch.float32)
    return lm, AutoTokenizer.from_pretrained(place, gguf_file=file.name)


def read_gguf_config(file: Path) -> PreTrainedConfig:
    """The settings of a file, from its header.

    Raises:
        Exception: of transformers or gguf, for a file that they cannot read.
    """
    from gguf import GGUFReader

    config = AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name)
    if config.model_type not in FAMILIES:
        return config
    reader = GGUFReader(file)
    prefix = f"{reader.fields['general.architecture'].contents()}."
    metadata: dict[str, Any] = {
        name.removeprefix(prefix): field.contents() for name, field in reader.fields.items() if name.startswith(prefix)
    }
    if metadata.get("expert_count") and not hasattr(config, "num_experts"):
        config = _with_experts(config, metadata)
    for key, name in _LEFT_OUT.items():
        if key in metadata and hasattr(config, name):
            setattr(config, name, metadata[key] or None)  # a window of 0 tokens (Phi-4) means no window
    rope = rotary(config)[0]
    if "partial_rotary_factor" in rope and "rope.dimension_count" in metadata:
        rope["partial_rotary_factor"] = metadata["rope.dimension_count"] / head_size(config)
    factors = {t.name: _values(t) for t in reader.tensors if t.name in (FREQUENCIES, LONG, SHORT)}
    read_scaling(config, metadata, factors)
    return config


def _with_experts(config: PreTrainedConfig, metadata: dict[str, Any]) -> MixtralConfig:
    """The config of the mixture of experts that transformers reads as a dense model."""
    known = MixtralConfig().to_dict().keys() - {"architectures", "model_type", "transformers_version"}
    shared = {key: value for key, value in config.to_dict().items() if key in known}
    experts = {
        "num_local_experts": metadata["expert_count"],
        "num_experts_per_tok": metadata["expert_used_count"],
        "sliding_window": None,
    }
    return MixtralConfig(**(shared | experts))


def _weights(reader: GGUFReader, config: PreTrainedConfig) -> dict[str, Tensor]:
    """The weights of a file by their names in the model."""
    family = FAMILIES[config.model_type]
    stored = {tensor.name: tensor for tensor in reader.tensors}
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config)
    parts: dict[str, list[Tensor]] = {}
    for part in named_parts(lm, family):
        value = read_weight(part.part, _values(stored[part.written]), family, config)
        parts.setdefault(part.weight, []).append(value)
    return {name: torch.cat(values, dim=1) if len(values) > 1 else values[0] for name, values in parts.items()}


def _values(tensor: ReaderTensor) -> Tensor:
    from gguf import dequantize

    return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
