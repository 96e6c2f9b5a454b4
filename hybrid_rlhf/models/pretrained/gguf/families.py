"""The layout of each family in a GGUF file: llama.cpp's name of the architecture, metadata, and names of the weights.

llama.cpp differs from Hugging Face in three ways: it rotates neighbouring elements of Llama's queries and keys instead
of the two halves of a head, so their rows are reordered; it multiplies by the weight of a Gemma norm where Hugging Face
multiplies by 1 + weight; and the gate and up projections of experts are two tensors. Properties that metadata cannot
express are detected when the file is read back (writing.py).

Source: the GGUF specification and llama.cpp's conversion script.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.models.pretrained.gguf.positions import rotary, scaling, write_scaling

if TYPE_CHECKING:
    from gguf import GGUFWriter


@dataclass(frozen=True)
class GGUFFamily:
    """A family in llama.cpp's terms."""

    architecture: str
    reordered: bool = False
    """True if the rows of queries and keys are reordered."""
    norm_offset: float = 0.0
    """Constant added to the weights of norms."""
    slides: bool = False
    """True if the metadata has the sliding window; models of other families must have none."""
    scalings: tuple[str, ...] = ("linear", "yarn")
    """Kinds of scaled rotary positions that llama.cpp computes for the architecture."""


@dataclass(frozen=True)
class NamedPart:
    """A tensor of a file: a weight of the model, or a part of one."""

    weight: str
    """Name of the weight in the model."""
    part: str
    """Name of the part, formed like the model's names."""
    written: str
    """Name of the tensor in the file."""
    value: Tensor


_LLAMA = GGUFFamily("llama", reordered=True, scalings=("linear", "yarn", "llama3"))
FAMILIES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "qwen2": GGUFFamily("qwen2"),
    "qwen3": GGUFFamily("qwen3"),
    "qwen2_moe": GGUFFamily("qwen2moe"),
    "qwen3_moe": GGUFFamily("qwen3moe"),
    "phi3": GGUFFamily("phi3", slides=True, scalings=("longrope",)),
    "gemma2": GGUFFamily("gemma2", norm_offset=1.0, slides=True, scalings=()),
    "gemma3_text": GGUFFamily("gemma3", norm_offset=1.0, slides=True, scalings=("linear",)),
}
"""Families by model_type."""
_OPTIONAL = {
    "attn_logit_softcapping": "add_attn_logit_softcapping",
    "final_logit_softcapping": "add_final_logit_softcapping",
    "num_experts": "add_expert_count",
    "num_experts_per_tok": "add_expert_used_count",
    "moe_intermediate_size": "add_expert_feed_forward_length",
    "shared_expert_intermediate_size": "add_expert_shared_feed_forward_length",
}
"""Settings that only some families have, with the writer's methods for them."""


def gguf_family(lm: PreTrainedModel) -> GGUFFamily:
    """The family of a causal LM.

    Raises:
        UserError: when there is none, or the model has a property that the metadata cannot express.
    """
    config = lm.config
    family = FAMILIES.get(config.model_type)
    if family is None or not lm.can_generate():
        raise UserError(
            f"format gguf writes causal LMs of the families {', '.join(FAMILIES)}, got {type(lm).__name__}: "
            "set --format safetensors"
        )
    kind = "sliding window" if _slides(config) and not family.slides else None
    first, *other_scalings = map(scaling, rotary(config))
    for kind_of_scaling, known in ((first, family.scalings), *((other_kind, ()) for other_kind in other_scalings)):
        if kind_of_scaling not in ("default", *known):
            kind = f"rotary positions of the kind {kind_of_scaling}"
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
    first = rotary(config)[0]
    writer.add_rope_dimension_count(int(head * first.get("partial_rotary_factor", 1.0)))
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_freq_base(first["rope_theta"])
    write_scaling(writer, config)
    if family.slides:
        writer.add_sliding_window(config.sliding_window or 0)  # llama.cpp recognizes Phi-4 by 0
    for key, method in _OPTIONAL.items():
        if getattr(config, key, None) is not None:
            getattr(writer, method)(getattr(config, key))


def named_parts(lm: PreTrainedModel, family: GGUFFamily) -> Iterator[NamedPart]:
    """The tensors of a file; a tied head is left out.

    Raises:
        UserError: when llama.cpp's architecture has no name for a weight.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    (architecture,) = (key for key, value in MODEL_ARCH_NAMES.items() if value == family.architecture)
    names = get_tensor_name_map(architecture, lm.config.num_hidden_layers)
    for name, weight in lm.named_parameters():
        for part, value in _parts(name, weight):
            written = names.get_name(part, try_suffixes=(".weight", ".bias"))
            if written is None:
                raise UserError(
                    f"format gguf has no name for the weight {name} of {type(lm).__name__}: set --format safetensors"
                )
            yield NamedPart(name, part, written, value)


def _parts(name: str, weight: Tensor) -> list[tuple[str, Tensor]]:
    """The parts of a weight in llama.cpp: gate and up projections of experts separate, a shared expert's gate a
    vector."""
    experts, is_pair, _ = name.rpartition("gate_up_proj")
    if is_pair and experts.endswith(".experts."):
        return [(f"{experts}{half}_proj.weight", v) for half, v in zip(("gate", "up"), weight.chunk(2, 1), strict=True)]
    if name.endswith(".experts.down_proj"):
        return [(f"{name}.weight", weight)]
    return [(name, weight.squeeze(0) if name.endswith(".shared_expert_gate.weight") else weight)]


def written_weight(name: str, weight: Tensor, family: GGUFFamily, config: PreTrainedConfig) -> Tensor:
    """The value of a tensor in the file, float32.

    Args:
        name: name of the part in the Hugging Face model.
        weight: its value.
        family: family of the model.
        config: config of the model.
    """
    value = weight.detach().to("cpu", torch.float32)
    if name.endswith("norm.weight"):
        value = value + family.norm_offset
    if (heads := _reordered_heads(name, family, config)) is not None:
        value = value.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return value.contiguous()


def read_weight(name: str, value: Tensor, family: GGUFFamily, config: PreTrainedConfig) -> Tensor:
    """The inverse of `written_weight`."""
    if name.endswith("norm.weight"):
        value = value - family.norm_offset
    if (heads := _reordered_heads(name, family, config)) is not None:
        value = value.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return value.contiguous()


def _reordered_heads(name: str, family: GGUFFamily, config: PreTrainedConfig) -> int | None:
    """Number of heads of a weight whose rows are reordered; None if they are not."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    return heads.get(name.split(".")[-2]) if family.reordered else None


def head_size(config: PreTrainedConfig) -> int:
    """Elements of an attention head."""
    return getattr(config, "head_dim", None) or int(config.hidden_size // config.num_attention_heads)


def _slides(config: PreTrainedConfig) -> bool:
    return bool(getattr(config, "sliding_window", None)) and bool(getattr(config, "use_sliding_window", True))
