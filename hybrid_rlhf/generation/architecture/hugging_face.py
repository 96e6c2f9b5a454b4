"""Maps a Hugging Face model to a ModelDescription, using its row of the family table (models/families/table.py).

Models without a row generate through their Hugging Face module; `describe` gives the reason.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from hybrid_rlhf.generation.architecture.model_description import (
    Activation,
    AttentionKind,
    Experts,
    Latent,
    ModelDescription,
    Rotary,
)
from hybrid_rlhf.generation.architecture.recurrence import KINDS
from hybrid_rlhf.models.families import Family, family_of, head_convention
from hybrid_rlhf.models.families.vision import VISION_FAMILIES
from hybrid_rlhf.models.lora import plain_name
from hybrid_rlhf.models.structure import text_model_of

SCORE_HEAD = "score"
"""Role of a scorer's head. Every rank holds all of it; no row of the family table names it."""


class NotDescribed(Exception):
    """Raised for a model that the decoder cannot compute; the message gives the reason."""


def describe(lm: PreTrainedModel) -> tuple[ModelDescription, Mapping[str, str]]:
    """Return the description of a causal LM, and the names of its modules by role.

    Raises:
        NotDescribed: when no row of the table covers the model.
    """
    config = lm.config.get_text_config()
    family = family_of(lm)
    if family is None:
        raise NotDescribed(f"no row for model type {config.model_type}")
    for reason, holds in family.unsupported.items():
        if holds(config):
            raise NotDescribed(reason)
    settings = family.settings(config) | recurrent_fields(lm, family)
    head = head_convention(lm.config)
    heads, kv_heads, head_dim = attention_sizes(config, settings)
    common: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "mlp_size": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "norm": "rms" if hasattr(config, "rms_norm_eps") else "layer",
        "norm_eps": _first(config, *_NORM_EPS, default=1e-5),
        "activation": _first(config, "hidden_act", "hidden_activation", "activation_function"),
        "sinks": "sinks" in family.names,
        "gated_mlp": not family.names.keys().isdisjoint(("gate", "gate_up")),
        "final_softcap": head.softcap,
        "logit_scale": head.scale,
        "max_positions": _position_limit(config),
        "trained_positions": trained_positions(config),
        "banned_ids": head.banned,
    }
    settings |= _experts(lm, family)
    if "latent" in settings:
        settings["latent"] = Latent(**settings["latent"])
    kind_settings = {"scale": head_dim**-0.5} | {name: settings.pop(name) for name in _KIND_SETTINGS & settings.keys()}
    if settings.get("alibi") is not None:
        kind_settings["layers_without_rotary"] = range(config.num_hidden_layers)
    attended: Container[int] = range(config.num_hidden_layers)
    if family.recurrence is not None:
        attended = layers_with(lm, family, "o")
    kinds, layer_kinds = _kinds(lm, kind_settings, attended)
    if not kinds:
        raise NotDescribed("no layer with attention")
    fields = {**common, "kinds": kinds, "layer_kinds": layer_kinds, **settings}
    fields["layer_scales"] = _buffers(lm, family, "layer_scale")
    return ModelDescription(**{**fields, "activation": _activation(fields["activation"])}), family.names


def attention_sizes(config: PreTrainedConfig, settings: Mapping[str, Any]) -> tuple[int, int, int]:
    """Number of heads, number of KV heads and head size. A family's settings (Family) may set the last two."""
    heads: int = config.num_attention_heads
    # transformers raises for attributes that differ between layers, so the config is read last
    kv_heads = settings["kv_heads"] if "kv_heads" in settings else getattr(config, "num_key_value_heads", None)
    head_dim = settings["head_dim"] if "head_dim" in settings else getattr(config, "head_dim", None)
    return heads, kv_heads or heads, head_dim or config.hidden_size // heads


def _experts(lm: PreTrainedModel, family: Family) -> dict[str, Any]:
    if family.experts is None or not (layers := layers_with(lm, family, "router")):
        return {}
    return {
        "experts": Experts(**family.experts(lm.config.get_text_config())),
        "expert_layers": layers,
        "router_corrections": _buffers(lm, family, "router_correction"),
    }


def _buffers(lm: PreTrainedModel, family: Family, role: str) -> dict[int, Tensor]:
    """Buffers of a role by layer: flattened, float32, on the CPU. Layers where the role is not a buffer are left
    out."""
    pattern = family.names.get(role, "")
    layers = range(lm.config.get_text_config().num_hidden_layers)
    buffers = {plain_name(name): buffer for name, buffer in lm.named_buffers()}
    return {i: buffers[name].detach().float().flatten().cpu() for i in layers if (name := pattern.format(i)) in buffers}


def recurrent_fields(lm: PreTrainedModel, family: Family) -> dict[str, Any]:
    """Fields of ModelDescription for the recurrent layers of a family; empty if it has none."""
    if family.recurrence is None:
        return {}
    kind, fields = family.recurrence(lm.config.get_text_config())
    return {"recurrence": KINDS[kind](**fields), "recurrent_layers": layers_with(lm, family, "recurrent_out")}


def layers_with(lm: PreTrainedModel, family: Family, role: str) -> frozenset[int]:
    """Indices of the layers that have a weight for this role."""
    weights = {plain_name(name) for name, _ in lm.named_parameters()}
    layers = range(lm.config.get_text_config().num_hidden_layers)
    return frozenset(layer for layer in layers if f"{family.names[role].format(layer)}.weight" in weights)


def _first(owner: object, *names: str, default: Any = None) -> Any:
    return next((value for name in names if (value := getattr(owner, name, None)) is not None), default)


_NORM_EPS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu2",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def _activation(name: str | None) -> Activation:
    if name is not None and name not in _ACTIVATIONS:
        raise NotDescribed(f"no activation {name}")
    return _ACTIVATIONS[name or "gelu"]


WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Layer types with windows, and the config field with the window size."""
ATTENTION_TYPES = {"full_attention", "hybrid", *WINDOWS}
"""`hybrid`: full attention with a recurrence beside it."""
_KIND_SETTINGS = {"scale", "layers_without_rotary", "with_rotary", "without_rotary", "kv_sizes"}
"""Settings of a family that belong to its kinds of attention: the scale, or a list of one per layer; the layers without
rotary positions; further fields of the kinds with and without rotary positions; and, if layer types differ, the number
of KV heads and the head size of each type."""


def layer_types(config: PreTrainedConfig) -> list[str]:
    """The type of each layer, as configs of transformers name it."""
    default = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    return getattr(config, "layer_types", None) or [default] * config.num_hidden_layers


def _kinds(
    lm: PreTrainedModel, kind_settings: Mapping[str, Any], attended: Container[int]
) -> tuple[tuple[AttentionKind, ...], tuple[int | None, ...]]:
    """Return the kinds of attention in a model, and for each layer the index of its kind.

    Kinds differ in window and rotary table, or in scale. `kind_settings` are those of _KIND_SETTINGS. Layers that are
    not in `attended` have no attention; their index is None.
    """
    config = lm.config.get_text_config()
    scale = kind_settings["scale"]
    layers = config.num_hidden_layers
    unrotated = kind_settings.get("layers_without_rotary", ())
    if isinstance(scale, list):
        return tuple(AttentionKind(layer_scale) for layer_scale in scale), tuple(range(layers))
    types = layer_types(config)
    if unknown := {name for layer, name in enumerate(types) if layer in attended} - ATTENTION_TYPES:
        raise NotDescribed(f"no layer type {min(unknown)}")
    layer_keys = [(name, layer not in unrotated) if layer in attended else None for layer, name in enumerate(types)]
    order = sorted({key for key in layer_keys if key is not None})
    kinds = tuple(
        AttentionKind(
            scale,
            getattr(config, WINDOWS[name]) if name in WINDOWS else None,
            chunked=name == "chunked_attention",
            rotary=_rotary(lm, name) if rotates else None,
            **kind_settings.get("with_rotary" if rotates else "without_rotary", {}),
            **dict(zip(("kv_heads", "head_dim"), kind_settings.get("kv_sizes", {}).get(name, ()), strict=False)),
        )
        for name, rotates in order
    )
    return kinds, tuple(None if key is None else order.index(key) for key in layer_keys)


_STATIC_ROPE = ("default", "linear", "llama3", "yarn", "proportional")
_LONG_ROPE = "longrope"


def _rotary(lm: PreTrainedModel, layer_type: str) -> Rotary | None:
    """Return the frequencies that the model's own rotary module computed; None if the model has no such module.

    Frequencies that change with the sequence length are not supported, except for longrope, which changes them once, at
    `_position_limit`.
    """
    module: Any = _first(text_model_of(lm), "rotary_emb", "pos_emb")
    if module is None:
        return None
    kind = module.rope_type
    prefix = ""
    if kind == _LONG_ROPE:
        short = module.original_inv_freq.detach()
        first = torch.zeros(1, 1, dtype=torch.long, device=short.device)
        cosines = module(short.float(), position_ids=first)[0]  # cosines of 0: the scale of short sequences
        return Rotary(short.float().cpu(), float(cosines.max()))
    if isinstance(kind, dict):  # a table for each layer type
        kind = kind[layer_type]
        prefix = f"{layer_type}_"
    if kind not in _STATIC_ROPE:
        raise NotDescribed(f"rotary positions of type {kind} change with the length")
    inv_freq = getattr(module, f"{prefix}inv_freq").detach().float().cpu()
    axes = _axes(module) if lm.config.model_type in VISION_FAMILIES else None
    return Rotary(inv_freq, float(getattr(module, f"{prefix}attention_scaling")), axes)


def _axes(module: Any) -> Tensor | None:
    """Return `Rotary.axes` of a rotary module, read from its own forward; None if it has one axis."""
    if not hasattr(module, "mrope_section"):
        return None
    like = module.inv_freq.new_zeros(1, dtype=torch.float32)

    def sines(*positions: int) -> Tensor:
        [[row]] = module(like, torch.tensor(positions, device=like.device)[:, None, None])[1]
        return row.cpu()  # type: ignore[no-any-return]

    first, second = sines(1, 1, 1).chunk(2)
    # each frequency is in both halves, or in neighbouring dimensions (GLM-4V)
    once = slice(len(first)) if torch.equal(first, second) else slice(None, None, 2)
    return torch.stack([sines(1, 0, 0), sines(0, 1, 0), sines(0, 0, 1)])[:, once].abs().argmax(dim=0)


def trained_positions(config: PreTrainedConfig) -> int | None:
    """Longest sequence, in tokens, that a model with rotary positions was trained for or extended to; none: unknown."""
    has_rotary = getattr(config, "rope_parameters", None) is not None
    return getattr(config, "max_position_embeddings", None) if has_rotary else None


def _position_limit(config: PreTrainedConfig) -> int | None:
    """Longest sequence, in tokens, for which longrope uses its short factors; none: the model does not use longrope."""
    rope = getattr(config, "rope_parameters", None) or {}
    return int(rope["original_max_position_embeddings"]) if rope.get("rope_type") == _LONG_ROPE else None
