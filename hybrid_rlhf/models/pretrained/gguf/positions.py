"""Scaled rotary positions in a GGUF file: as metadata, or as tensors of factors that divide the frequencies.

Linear scaling and YaRN are metadata. Llama 3's scaling is a tensor that llama.cpp supports for the architecture `llama`
alone, and LongRoPE is two tensors, for short and for long contexts. The parameters of Llama 3's scaling are not in the
file: the parameters that all its releases share are tried, and factors that they do not reproduce are read as factors.

Source: the GGUF specification and llama.cpp's conversion script.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

if TYPE_CHECKING:
    from gguf import GGUFWriter

# Names of the tensors of factors.
FREQUENCIES = "rope_freqs.weight"
LONG = "rope_factors_long.weight"
SHORT = "rope_factors_short.weight"
_TYPE = "rope.scaling.type"
_FACTOR = "rope.scaling.factor"
_CONTEXT = "rope.scaling.original_context_length"
_ATTENTION = "rope.scaling.attn_factor"
_BETAS = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rotary(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Settings of rotary positions, one entry if all layers are equal, else full attention first."""
    settings = config.rope_parameters
    if "rope_theta" in settings:
        return [settings]
    return [settings["full_attention"], *(value for kind, value in settings.items() if kind != "full_attention")]


def scaling(rope: Mapping[str, Any]) -> str:
    """The kind of scaling, "default" without scaling."""
    return str(rope.get("rope_type") or "default")


def write_scaling(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    """Write the metadata of a model's scaling. Unusual betas of YaRN, which llama.cpp does not apply, are not written:
    the file is then refused when it is read back."""
    from gguf import RopeScalingType

    rope = rotary(config)[0]
    kind = scaling(rope)
    context = _context(config, rope)
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(kind))
        writer.add_rope_scaling_factor(float(rope["factor"]))
    if context is not None:
        writer.add_rope_scaling_orig_ctx_len(context)
    if kind == "longrope":
        writer.add_rope_scaling_attn_factors(float(ROPE_INIT_FUNCTIONS[kind](config)[1]))


def scaling_tensors(config: PreTrainedConfig) -> dict[str, Tensor]:
    """The factors that divide the frequencies, float32, by the names of their tensors."""
    rope = rotary(config)[0]
    if scaling(rope) == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        size = 2 * len(scaled)
        powers = torch.arange(0, size, 2, dtype=torch.int64).float() / size
        return {FREQUENCIES: 1.0 / rope["rope_theta"] ** powers / scaled}
    if scaling(rope) == "longrope":
        return {LONG: torch.tensor(rope["long_factor"]).float(), SHORT: torch.tensor(rope["short_factor"]).float()}
    return {}


def read_scaling(config: PreTrainedConfig, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Complete the config of a file with its scaling.

    Args:
        config: config as transformers reads it, without scaling.
        metadata: metadata of the file, by keys without the architecture.
        tensors: tensors of factors in the file.
    """
    rope = rotary(config)[0]
    kind = metadata.get(_TYPE)
    context = metadata.get(_CONTEXT)
    if kind in ("linear", "yarn"):
        rope.update(rope_type=kind, factor=metadata[_FACTOR])
    if kind == "yarn":
        rope["original_max_position_embeddings"] = context or config.max_position_embeddings
        rope.update({key: metadata[name] for key, name in _BETAS.items() if name in metadata})
    if FREQUENCIES in tensors:
        _read_frequencies(config, rope, tensors[FREQUENCIES], context)
    if LONG in tensors:
        rope.update(
            rope_type="longrope",
            long_factor=tensors[LONG].tolist(),
            short_factor=tensors[SHORT].tolist(),
            original_max_position_embeddings=context or config.max_position_embeddings,
            attention_factor=metadata.get(_ATTENTION),
        )


def _read_frequencies(config: PreTrainedConfig, rope: dict[str, Any], factors: Tensor, context: int | None) -> None:
    """Set Llama 3's scaling if its parameters give these factors, else the same factors for all contexts."""
    llama3 = {"rope_type": "llama3", "factor": float(factors.max()), **_LLAMA3}
    rope |= llama3 | ({"original_max_position_embeddings": context} if context else {})
    if not torch.allclose(scaling_tensors(config)[FREQUENCIES], factors, rtol=1e-5, atol=0.0):
        for key in llama3:
            del rope[key]
        rope |= {
            "rope_type": "longrope",
            "long_factor": factors.tolist(),
            "short_factor": factors.tolist(),
            "original_max_position_embeddings": config.max_position_embeddings,
            "attention_factor": 1.0,
        }


def _context(config: PreTrainedConfig, rope: Mapping[str, Any]) -> int | None:
    """Number of tokens of the original context; None if the model does not state it."""
    key = "original_max_position_embeddings"
    value = rope.get(key) or getattr(config, key, None)
    return None if value is None else int(value)
