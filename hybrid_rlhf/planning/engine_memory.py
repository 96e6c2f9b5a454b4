"""Memory of an engine: held permanently, added by training, added by a forward. Bytes on one rank.

Follows the optimizers of DeepSpeed 0.19, read from the JSON that the engine would get. What a forward or a backward
needs inside the model is measured on shapes (planning/shapes.py).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch

from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.training import OptimizerConfig, ZeroConfig
from hybrid_rlhf.engines.ds_config import deepspeed_config, sums_whole_gradients
from hybrid_rlhf.generation.image_loading import KEPT_PIXEL_BYTES
from hybrid_rlhf.models.distillation import CHUNK_LOGITS
from hybrid_rlhf.models.four_bit import SCALE_BYTES_PER_WEIGHT
from hybrid_rlhf.models.policy import CHUNK_TOKENS
from hybrid_rlhf.planning.inference_memory import inference_weight_bytes
from hybrid_rlhf.planning.shapes import BatchShape, ShapedModel

FLOAT32 = 4
_ADAM = 8
"""Bytes of AdamW's two moments per weight."""
_ADAM_8BIT = 2 + 2 * FLOAT32 / 256
"""Bytes of both in 8 bits, with the scales of their blocks of 256."""
_GRADIENT_BUCKET = 500_000_000
"""Gradient elements in one all-reduce bucket of an engine without ZeRO (default of DeepSpeed)."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one rank, by purpose."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    """Adam's moments and float32 master weights."""
    activations: float = 0.0
    inference: float = 0.0
    """Inference weights that are copies; views take no memory."""
    cache: float = 0.0
    """Keys and values, and the experts recorded with them."""
    buffers: float = 0.0
    """Largest temporaries: chunks of logits, ZeRO's buckets and gathered weights, copies in the optimizer step."""
    host: float = 0.0
    """Host memory of what is offloaded, and of recorded experts."""

    def __add__(self, other: MemoryUse) -> MemoryUse:
        return MemoryUse(*map(operator.add, vars(self).values(), vars(other).values()))

    @property
    def device(self) -> float:
        """All of it except host memory."""
        return sum(vars(self).values()) - self.host


@dataclass(frozen=True)
class EngineMemory:
    """Memory of one engine."""

    model: ShapedModel
    held: MemoryUse
    """Held permanently."""
    accumulated: MemoryUse = MemoryUse()
    """Added while gradients accumulate."""
    reduce_bucket: float = 0.0
    """Added by a backward."""
    gathered: float = 0.0
    """Added by a forward: ZeRO-3's gathered weights, and the weight that is dequantised."""
    optimizer_step: float = 0.0
    """Largest temporaries of an optimizer step."""
    movable: float = 0.0
    """Part of held that offload_states moves to the host."""
    backward_end: float = 0.0
    """Added by the end of a backward, when its activations are gone."""
    loaded: MemoryUse = MemoryUse()
    """Added while a forward runs: weights that otherwise are in host memory."""

    def training(self, batch: BatchShape) -> MemoryUse:
        """Added by training: the larger of a micro-batch and the optimizer step after it."""
        passage = self.model.measure(batch, backward=True)
        most = max(passage.peak + self.reduce_bucket + self.gathered, self.backward_end, self.optimizer_step)
        return self.accumulated + MemoryUse(activations=passage.kept, buffers=most - passage.kept, host=passage.host)

    def forward(self, batch: BatchShape) -> MemoryUse:
        """Added by a forward without a backward."""
        return self.loaded + MemoryUse(buffers=self.model.measure(batch, backward=False).peak + self.gathered)

    def of_tower(self, batch: BatchShape) -> MemoryUse | None:
        """The part of the vision tower in what is held and what training adds; None without one."""
        if (tower := self.model.tower) is None:
            return None
        elements = self.model.elements
        stored = sum(weight.numel() for weight in tower.weights) / elements.all
        learned = sum(weight.numel() for weight in tower.weights if weight.requires_grad) / max(1, elements.trained)
        used = self.held + self.accumulated
        passage = tower.measure(batch.image_tokens, backward=True)
        return MemoryUse(
            weights=stored * used.weights,
            gradients=learned * used.gradients,
            optimizer=learned * used.optimizer,
            activations=passage.kept,
            buffers=passage.peak - passage.kept,
            host=KEPT_PIXEL_BYTES,
        )

    def with_weights_on_host(self) -> EngineMemory:
        """The engine with its weights in host memory between uses; ZeRO-3 with offload keeps them there already."""
        weights = self.held.weights
        return replace(
            self, held=replace(self.held, weights=0.0, host=self.held.host + weights), loaded=MemoryUse(weights=weights)
        )


def _muon_bytes(stage: int, low: int, *, as_masters: bool) -> int:
    """Bytes of Muon's momentum per weight.

    Args:
        stage: ZeRO stage.
        low: bytes of a weight in training.
        as_masters: the momentum is laid out as master weights: in host memory, and in bfloat16 under stage 1.
    """
    if stage == 0 or as_masters:
        return FLOAT32
    return low if stage == 3 else 2 * low  # stages 1 and 2 compute the next momentum in a second buffer


def split_memory(model: ShapedModel, *, dtype: torch.dtype, ranks: int, device: torch.device) -> EngineMemory:
    """Memory of a frozen model in inference weights that a number of ranks split (engines/separate/)."""
    alone = RolloutConfig(tensor_parallel=ranks)
    held = inference_weight_bytes(model, alone, stage=0, dtype=dtype, device=device, in_use=True)
    return EngineMemory(model, MemoryUse(inference=held))


def engine_memory(
    model: ShapedModel,
    zero_config: ZeroConfig,
    optimizer: OptimizerConfig | None,
    *,
    dtype: torch.dtype,
    ranks: int,
    overrides: dict[str, Any],
) -> EngineMemory:
    """Memory of an engine under DeepSpeed 0.19. Tests compare it with measurements on a CPU.

    Args:
        model: shapes of the model.
        zero_config: how the states are sharded and offloaded.
        optimizer: None for a frozen model.
        dtype: data type of the weights.
        ranks: number of ranks of the engine.
        overrides: the user's DeepSpeed JSON.
    """
    json = deepspeed_config(zero=zero_config, dtype=dtype, optimizer=optimizer, overrides=overrides)
    zero = json["zero_optimization"]
    e = model.local
    # a part of split experts is partitioned over fewer ranks, so a partition is as large as of whole experts
    whole = model.elements if model.tensor_parallel == 1 else e
    ranks //= model.tensor_parallel
    low = dtype.itemsize
    stage = int(zero["stage"])
    trained = whole.trained / ranks if stage else e.trained
    scales = SCALE_BYTES_PER_WEIGHT * e.four_bit  # ZeRO-3 does not partition them
    weights = ((whole.stored_bytes(low) - scales) / ranks if stage == 3 else e.stored_bytes(low) - scales) + scales
    masters = FLOAT32 if stage else 0
    moments = (_ADAM_8BIT if optimizer is not None and optimizer.name == "adamw_8bit" else _ADAM) * trained
    offloads = "offload_optimizer" in zero and bool(e.trained)
    # 16-bit gradients are summed in float32; by bfloat16's own optimizer under stage 1
    summed = FLOAT32 if json.get("data_types", {}).get("grad_accum_dtype") == "fp32" else low
    sums_whole = sums_whole_gradients(json)
    by_muon = 0.0
    if optimizer is not None and optimizer.name == "muon":
        by_muon = e.matrices / (ranks if stage else 1)
        moments += (_muon_bytes(stage, low, as_masters=offloads or sums_whole) - _ADAM) * by_muon
    states = masters * trained + moments
    gradients = summed * (trained if stage >= 2 else e.trained)
    bucket = low * float(zero.get("reduce_bucket_size", 5e8)) if stage and e.trained else 0.0
    if stage == 0 or sums_whole:
        bucket = low * min(e.largest, e.trained) if sums_whole else 0.0  # the gradient that is about to be added
        optimizer_step = summed * min(e.trained, _GRADIENT_BUCKET) if ranks > 1 else 0.0
    else:
        updated = max(by_muon, trained - by_muon)  # one group of parameters at a time
        if stage == 3:
            updated = min(updated, float(zero.get("sub_group_size", 1e9)))
        updates = summed * by_muon if stage == 1 else 0.0  # in addition to the gradients, which other stages replace
        optimizer_step = (summed + (FLOAT32 if summed < FLOAT32 else 0)) * updated + updates
    if stage == 2 and summed > low:  # added in place, and read by the optimizer as they are
        optimizer_step = summed * by_muon
    held = MemoryUse(weights=weights, optimizer=states)
    accumulated = MemoryUse(gradients=gradients)
    if stage == 3 and e.trained:  # the gradient buffer and the bucket are allocated permanently
        held = replace(held, gradients=gradients, buffers=bucket)
        accumulated = MemoryUse()
        bucket = 0.0
    backward_end = 0.0
    if stage == 2:
        # the bucket and the gradients that wait for it, two of the largest weight, and, beside the gradients of earlier
        # micro-batches, those of this one
        apart = low * (by_muon if summed > low else trained)
        backward_end = 2 * bucket + 2 * low * e.largest + (0.0 if offloads else apart)
    if offloads:
        # master weights and moments, float32 gradients, gradients in the training dtype
        host = states + (FLOAT32 + low) * trained + 2 * FLOAT32 * e.largest
        on_device = low * e.largest if stage < 3 else 0.0
        held = replace(held, optimizer=0.0, gradients=0.0, host=host, buffers=held.buffers + on_device)
        accumulated = MemoryUse(gradients=gradients if stage == 1 else 0.0)
        optimizer_step = 0.0
    gathered = 0.0
    dequantised = float(low * e.largest_four_bit)
    if stage == 3 and (ranks > 1 or "offload_param" in zero):
        live = max(float(zero.get("stage3_max_live_parameters", 1e9)), e.largest)
        elements = min(e.all, live) + min(e.all, float(zero.get("stage3_prefetch_bucket_size", 5e7)))
        gathered = e.stored_bytes(low) / e.all * elements
    if "offload_param" in zero:
        held = replace(held, weights=0.0, host=held.host + weights)
    if model.tower is not None:
        held = replace(held, host=held.host + KEPT_PIXEL_BYTES)
    movable = 0.0 if offloads else moments + (masters * trained if stage else 0.0)
    return EngineMemory(model, held, accumulated, bucket, gathered + dequantised, optimizer_step, movable, backward_end)


def divergence_memory(model: ShapedModel, *, trains_head: bool) -> MemoryUse:
    """Memory of the divergence between two models over the whole vocabulary, besides their own passes: the gradient of
    the head, which is kept until backward, and a chunk of the logits of both."""
    head = model.config.vocab_size * model.config.hidden_size if trains_head else 0
    return MemoryUse(buffers=FLOAT32 * (head + CHUNK_LOGITS * CHUNK_TOKENS * model.config.vocab_size))
