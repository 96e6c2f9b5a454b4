"""Memory of inference weights: those that are copies of the training weights. Bytes on one rank.

Follows generation/weights/inference_weights.py, from shapes and the names of the model's family alone.
"""

from __future__ import annotations

import torch

from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.engines.ds_config import trained_stage
from hybrid_rlhf.models.families import has_float32_logits, unread_weights
from hybrid_rlhf.models.four_bit import BYTES_PER_WEIGHT
from hybrid_rlhf.planning.shapes import ShapedModel

_FLOAT32 = 4
_PRODUCTS = (
    "q k v qkv o latent_q gate up gate_up down shared_gate shared_up shared_gate_up shared_down recurrent_out "
    "experts_up experts_down"
).split()
_REPLICATED = "q_down kv_down input_gate input_out".split()
"""Roles of the products of a layer, which a CPU packs and `rollout.quantization` quantises: those that tensor-parallel
ranks split (the inputs of recurrent layers are counted apart), and those that each rank has whole."""
_ADAPTER_COPIES = 4
"""Copies of the adapters of 4-bit weights: one that training does not change, and one fused by product, whose second
factor has a column for each adapter of the product."""
_SCALE_BYTES = {"cpu": 8, "cuda": 4}
"""Bytes of each output of a quantised product: its scale in float32, and on a CPU its offset in int32."""


def inference_weight_bytes(
    model: ShapedModel,
    rollout: RolloutConfig,
    *,
    stage: int,
    dtype: torch.dtype,
    device: torch.device,
    in_use: bool = False,
) -> float:
    """Inference weights that are copies of the training weights.

    A CPU packs the weight of every matrix product; what fills up the last tile of outputs is not counted. A GPU uses
    views, except for weights that ZeRO-3 gathers, experts that ranks split, weights that adapters are merged into, and
    those that are fused and not adjacent in memory. Quantised products take a byte per weight; the head, routers and
    embeddings keep their dtype.

    Args:
        model: the actor.
        rollout: settings of generation.
        stage: ZeRO stage of the actor.
        dtype: data type of the inference weights.
        device: device of the rank.
        in_use: whether training changes the weights meanwhile, which rules out views.
    """
    e = model.elements
    size = dtype.itemsize
    gathered = stage == 3 or in_use
    base = e.all - (e.trained if e.adapted else 0)
    if rollout.backend == "module" or model.family is None:
        if e.four_bit:  # adapters are not merged
            return e.stored_bytes(size) if gathered else 0.0
        return size * float(base if gathered else model.split_experts) + size * e.adapted
    copied = gathered or dtype != model.lm.dtype
    on_cpu = device.type == "cpu"
    ranks = rollout.tensor_parallel
    weights = dict(model.lm.named_parameters())
    read = base - sum(weights[name].numel() for name in unread_weights(model.lm, weights))  # vision towers
    elements, outputs, in_products = _products(model, ranks)
    if e.four_bit:
        in_products = e.four_bit
        stored = _ADAPTER_COPIES * size * e.trained + (BYTES_PER_WEIGHT * e.four_bit if stage == 3 else 0.0)
    elif rollout.quantization is not None:
        stored = elements + _SCALE_BYTES[device.type] * outputs
    elif on_cpu:
        stored = size * elements
    elif copied:
        return size * read / ranks
    else:
        apart = _made(model, adjacent=trained_stage(stage, dtype) in (1, 2) and ranks == 1 and not e.adapted)
        return size * float(max(apart, e.adapted) + model.split_experts) / ranks
    rest = read - in_products
    if on_cpu:
        head, tied = _head(model)
        project = sum(one.weight.numel() for one in model.named(["inputs_project"], layers=1))
        stored += (max(size, _FLOAT32) if has_float32_logits(model.lm) else size) * head / ranks + size * project
        rest -= project + (0 if tied else head)
    return stored + (size * rest / ranks if copied else 0.0)


def _products(model: ShapedModel, ranks: int) -> tuple[float, float, int]:
    """Elements and outputs of the products of the layers on a rank, and elements of their training weights, where keys
    that are values too (Gemma 4) count once."""
    transposed, transposed_experts = (fields.get("transposed", False) for fields in (model.settings, model.experts))
    kind = model.recurrent_layers.get("recurrence")
    inputs = [] if kind is None else list(kind.inputs(range(kind.units)))
    elements = 0.0
    outputs = 0.0
    seen = dict[str, int]()
    for roles, share in ((_PRODUCTS + inputs, 1 / ranks), (_REPLICATED, 1.0)):
        for one in model.named(roles):
            if one.name in seen and one.role != "v":  # shared experts may be the MLP of other layers (Granite 4)
                continue
            count = one.weight.numel() * share
            swapped = transposed_experts if one.weight.dim() == 3 else transposed
            elements += count
            outputs += count / one.weight.shape[-2 if swapped else -1]
            seen[one.name] = one.weight.numel()
    return elements, outputs, sum(seen.values())


def _made(model: ShapedModel, *, adjacent: bool) -> int:
    """Elements of the matrices that inference weights fuse, reorder or multiply, and so copy. `adjacent`: modules that
    follow one another do so in memory, and are fused without a copy; the latents of queries and of keys do not."""
    settings = model.settings
    roles = {"q_down", "kv_down"}
    roles |= {"latent_q"} if settings.get("interleaved_rotary") else set()
    if not adjacent:
        roles |= {"q", "k", "v", *settings.get("weight_scales", {})}
        for prefix in ("", "shared_"):
            roles |= {f"{prefix}gate", f"{prefix}up"} if f"{prefix}gate" in model.names else set()
        roles |= {"experts_up"} if model.experts.get("alternating") else set()
        kind = model.recurrent_layers.get("recurrence")
        if kind is not None and len(inputs := kind.inputs(range(kind.units))) > 1:
            roles |= set(inputs)
    return sum({one.name: one.weight.numel() for one in model.named(roles)}.values())


def _head(model: ShapedModel) -> tuple[int, bool]:
    """Elements of the head, and whether it is the embedding; a scorer's counts as other weights."""
    head = model.lm.get_output_embeddings()
    embed = model.lm.get_input_embeddings()
    if head is None:
        return 0, True
    return head.weight.numel(), head.weight is embed.weight
