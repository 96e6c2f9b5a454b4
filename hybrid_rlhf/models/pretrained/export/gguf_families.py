"""How each family is written to a GGUF file: llama.cpp's name of its architecture, metadata, layout of the weights.

llama.cpp differs from Hugging Face in two ways: it rotates neighbouring elements of Llama's queries and keys instead of
the two halves of a head, so their rows are reordered, and it multiplies by the weight of a Gemma norm where Hugging
Face multiplies by one more. Whatever metadata cannot express shows when the file is read back (gguf_file.py).

Source: the GGUF specification and llama.cpp's conversion script.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from hybrid_rlhf.configs.errors import UserError

if TYPE_CHECKING:
    from gguf import GGUFWriter


@dataclass(frozen=True)
class GGUFFamily:
    """A family as llama.cpp knows it."""

    architecture: str
    reordered: bool = False
    """Rows of queries and keys are reordered."""
    norm_offset: float = 0.0
    """Added to the weights of norms."""
    slides: bool = False
    """Metadata has the sliding window; others must have none."""


_FAMILIES = {
    "llama": GGUFFamily("llama", reordered=True),
    "mistral": GGUFFamily("llama", reordered=True),
    "qwen2": GGUFFamily("qwen2"),
    "qwen3": GGUFFamily("qwen3"),
    "gemma2": GGUFFamily("gemma2", norm_offset=1.0, slides=True),
    "gemma3_text": GGUFFamily("gemma3", norm_offset=1.0, slides=True),
}


def gguf_family(lm: PreTrainedModel) -> GGUFFamily:
    """The family of a causal LM.

    Raises:
        UserError: when there is none, or the model has what its metadata cannot express.
    """
    config = lm.config
    family = _FAMILIES.get(config.model_type)
    if family is None or not lm.can_generate():
        raise UserError(
            f"format gguf writes causal LMs of the families {', '.join(_FAMILIES)}, got {type(lm).__name__}: "
            "set --format safetensors"
        )
    kind = "sliding window" if _slides(config) and not family.slides else None
    if any(rope.get("rope_type", "default") != "default" for rope in _rotary(config)):
        kind = "scaling of positions"
    if kind is not None:
        raise UserError(
            f"format gguf writes {config.model_type} models without {kind}, this one has it: set --format safetensors"
        )
    return family


def write_metadata(writer: GGUFWriter, family: GGUFFamily, config: PreTrainedConfig, name: str) -> None:
    """Write the sizes and constants of a model."""
    writer.add_name(name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    head = head_size(config)
    writer.add_rope_dimension_count(head)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_freq_base(_rotary(config)[0]["rope_theta"])
    if family.slides:
        writer.add_sliding_window(config.sliding_window)
    for softcap, add in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
    ):
        if getattr(config, softcap, None) is not None:
            add(getattr(config, softcap))


def written_weight(name: str, weight: Tensor, family: GGUFFamily, config: PreTrainedConfig) -> Tensor:
    """A weight as the file has it, float32.

    Args:
        name: in the Hugging Face model.
        weight: its value.
        family: of the model.
        config: of the model.
    """
    value = weight.detach().to("cpu", torch.float32)
    if name.endswith("norm.weight"):
        value = value + family.norm_offset
    projection = name.split(".")[-2]
    if family.reordered and projection in ("q_proj", "k_proj"):
        heads = config.num_attention_heads if projection == "q_proj" else config.num_key_value_heads
        value = value.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return value.contiguous()


def head_size(config: PreTrainedConfig) -> int:
    """Elements of an attention head."""
    return getattr(config, "head_dim", None) or int(config.hidden_size // config.num_attention_heads)


def _rotary(config: PreTrainedConfig) -> list[dict[str, float]]:
    """Settings of rotary positions; those of layers that attend to everything first, where layers differ."""
    settings = config.rope_parameters
    if "rope_theta" in settings:
        return [settings]
    return [settings["full_attention"], *(value for kind, value in settings.items() if kind != "full_attention")]


def _slides(config: PreTrainedConfig) -> bool:
    return bool(getattr(config, "sliding_window", None)) and bool(getattr(config, "use_sliding_window", True))
