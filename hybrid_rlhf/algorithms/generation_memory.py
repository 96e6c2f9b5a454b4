"""What generation takes on one rank beside the training weights: copies of weights, the KV cache, temporaries. Bytes.

It follows the inference layout (generation/weights.py) and the engine's slots (generation/slots.py) by their rules;
neither needs weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_rlhf.configs.rollout import RolloutConfig
from hybrid_rlhf.generation.engine import PREFILL_TOKENS
from hybrid_rlhf.generation.families import FAMILIES
from hybrid_rlhf.generation.slots import FREE_SHARE, Working, slot_tokens, slots_within
from hybrid_rlhf.models.shapes import Elements, ShapedModel

_FLOAT32 = 4


def layout_bytes(
    model: ShapedModel, rollout: RolloutConfig, *, stage: int, dtype: torch.dtype, device: torch.device,
    in_use: bool = False,
) -> float:  # fmt: skip
    """Copies that the inference layout makes of the weights of a rank (generation/weights.py).

    A CPU packs every product. A GPU takes views, but for weights that ZeRO-3 gathers for the moment, that adapters are
    merged into, or that are fused and lie apart.

    Args:
        model: the actor.
        rollout: how it generates.
        stage: of its ZeRO.
        dtype: of the layout.
        device: of the rank.
        in_use: by training at the same time, so that there are no views.
    """
    e: Elements = model.elements
    whole = stage == 3 or in_use
    base = e.all - (e.trained if e.adapted else 0)
    size, family = dtype.itemsize, FAMILIES.get(model.config.model_type)
    if rollout.layout == "module" or family is None:
        return size * float(base if whole else 0) + size * e.adapted
    if device.type == "cpu":
        tied = model.config.vocab_size * model.config.hidden_size if model.config.tie_word_embeddings else 0
        return size * float(base + tied if whole else e.products)
    if whole or dtype != model.lm.dtype:
        return size * base / rollout.tensor_parallel
    apart = 0 if stage in (1, 2) and rollout.tensor_parallel == 1 and not e.adapted else _fused(model, family.names)
    return size * float(max(apart, e.adapted)) / rollout.tensor_parallel


def _fused(model: ShapedModel, names: Any) -> int:
    """Elements of matrices that the layout fuses."""
    roles = ("q", "k", "v", "gate", "up") if "gate" in names else ("q", "k", "v")
    ends = tuple(f"{names[role].rpartition('.')[2]}.weight" for role in roles if role in names)
    return sum(p.numel() for name, p in model.lm.named_parameters() if name.replace(".base_layer", "").endswith(ends))


@dataclass(frozen=True)
class _Sizes:
    """Of a decoder, on this rank."""

    layers: int
    heads: float
    kv_heads: float
    head_dim: int
    hidden: int
    mlp: float
    vocabulary: float


def _sizes(model: ShapedModel, tensor_parallel: int) -> _Sizes:
    c: Any = model.config.get_text_config()
    heads, kv = c.num_attention_heads, getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    mlp = getattr(c, "intermediate_size", None) or getattr(c, "ffn_dim", None) or 4 * c.hidden_size
    return _Sizes(
        c.num_hidden_layers, heads / tensor_parallel, math.ceil(kv / tensor_parallel),
        getattr(c, "head_dim", None) or c.hidden_size // heads, c.hidden_size, mlp / tensor_parallel,
        c.vocab_size / tensor_parallel,
    )  # fmt: skip


def _capacity(rollout: RolloutConfig, device: torch.device) -> int:
    return slot_tokens(rollout.max_prompt_tokens + rollout.max_new_tokens, device)


def slot_bytes(model: ShapedModel, rollout: RolloutConfig, *, dtype: torch.dtype, device: torch.device) -> float:
    """Keys and values of one completion of full length."""
    s = _sizes(model, rollout.tensor_parallel)
    return 2.0 * s.layers * s.kv_heads * s.head_dim * dtype.itemsize * _capacity(rollout, device)


def decoded_rows(
    model: ShapedModel, rollout: RolloutConfig, *, ranks: int, room_bytes: float, dtype: torch.dtype,
    device: torch.device,
) -> tuple[int, int]:  # fmt: skip
    """Completions decoded at once, and as many as there would be had memory no end."""
    groups = max(1, ranks // rollout.tensor_parallel)
    wanted = -(-rollout.prompts_per_step // groups) * rollout.samples_per_prompt
    if rollout.max_decode_rows is not None:
        wanted = min(wanted, rollout.max_decode_rows)
    slot = slot_bytes(model, rollout, dtype=dtype, device=device)
    if rollout.kv_cache_gib is not None:
        return max(1, min(wanted, slots_within(rollout.kv_cache_gib * 2**30, slot, Working()))), wanted
    working = working_bytes(model, rollout, rows=wanted, dtype=dtype, device=device)
    return max(1, min(wanted, slots_within(FREE_SHARE[device.type] * room_bytes, slot, working))), wanted


def working_bytes(
    model: ShapedModel, rollout: RolloutConfig, *, rows: int, dtype: torch.dtype, device: torch.device
) -> Working:
    """The largest temporaries of generation: a prefill's layer, and for each row its logits, or its scores on a CPU."""
    s, size = _sizes(model, rollout.tensor_parallel), dtype.itemsize
    tokens = min(PREFILL_TOKENS[device.type], rows * rollout.max_prompt_tokens)
    qkv = (s.heads + 2 * s.kv_heads) * s.head_dim
    prefill = tokens * size * (3 * s.hidden + max(4 * qkv, 4 * s.mlp))
    cuts = rollout.top_p < 1 or rollout.top_k > 0
    logits = s.vocabulary * _FLOAT32 * (8 if cuts else 2 + (rollout.temperature != 1) + size / _FLOAT32)
    scores = s.heads * _capacity(rollout, device) * _FLOAT32 * 2 if device.type == "cpu" else 0.0
    return Working(prefill, max(logits, scores), captured=device.type == "cuda" and not rollout.max_staleness)


def decoding_bytes(
    model: ShapedModel, rollout: RolloutConfig, *, slots: int, dtype: torch.dtype, device: torch.device
) -> float:
    """Those of so many slots; the pool of captured steps keeps its own beside a prefill."""
    working = working_bytes(model, rollout, rows=slots, dtype=dtype, device=device)
    return max(working.prefill, slots * working.row) + (slots * working.row if working.captured else 0.0)
