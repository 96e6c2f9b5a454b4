"""What an engine takes in memory: always, while it learns, while it reads.

It follows DeepSpeed 0.19's optimizers, read from the very JSON that the engine would get; what passes through a model
is counted on shapes (models/shapes.py). Bytes on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from hybrid_rlhf.models.shapes import Batch, ShapedModel

FLOAT32 = 4
_ADAM = 8
"""Bytes of AdamW's two moments a weight."""
_GRADIENT_BUCKET = 500_000_000
"""Elements of gradients that an engine without ZeRO reduces at once (DeepSpeed's buffered_allreduce_fallback)."""


@dataclass(frozen=True)
class Need:
    """Bytes on one rank."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    """Adam's moments and float32 master weights."""
    activations: float = 0.0
    layout: float = 0.0
    """Copies of weights for generation; views cost nothing."""
    cache: float = 0.0
    """Keys and values."""
    buffers: float = 0.0
    """The largest temporaries: chunks of logits, ZeRO's buckets and gathered weights, copies in the optimizer step."""
    host: float = 0.0
    """Offloaded; a GPU does not see it."""

    def __add__(self, other: Need) -> Need:
        return Need(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    @property
    def device(self) -> float:
        """All but what is on the host."""
        return sum(getattr(self, f.name) for f in fields(self)) - self.host


@dataclass(frozen=True)
class EngineMemory:
    """What one engine takes."""

    model: ShapedModel
    held: Need
    """Always."""
    training: Need
    """Besides, while gradients accumulate."""
    bucket: float
    """Of a backward."""
    gathered: float
    """Of a forward."""
    step: float
    """Most that an optimizer step takes over the states."""
    movable: float
    """Of the held, what offload_states moves."""
    comes: Need = Need()
    """Besides, while it reads: weights that are elsewhere between uses."""

    def learning(self, batch: Batch) -> Need:
        """A micro-batch, or the step after it, whichever takes more; without what is held."""
        passage = self.model.passage(batch, learns=True)
        most = max(passage.peak + self.bucket + self.gathered, self.step)
        return self.training + Need(activations=passage.kept, buffers=most - passage.kept, host=passage.host)

    def reading(self, batch: Batch) -> Need:
        """A forward alone."""
        return self.comes + Need(buffers=self.model.passage(batch, learns=False).peak + self.gathered)

    def on_host(self) -> EngineMemory:
        """The engine with its weights in host memory between uses; under ZeRO-3 they are there already."""
        weights = self.held.weights
        return replace(self, held=replace(self.held, weights=0.0, host=self.held.host + weights),
                       comes=Need(weights=weights))  # fmt: skip


def engine_need(model: ShapedModel, zero: dict[str, Any], *, dtype: torch.dtype, ranks: int) -> EngineMemory:
    """What an engine takes under DeepSpeed 0.19 (measured on a CPU; the tests hold it to that).

    Args:
        model: its shape.
        zero: the section zero_optimization of its JSON.
        dtype: of the weights.
        ranks: that share the states.
    """
    e, low, stage = model.elements, dtype.itemsize, int(zero["stage"])
    trained = e.trained / (ranks if stage else 1)
    weights = low * e.all / (ranks if stage == 3 else 1)
    masters = FLOAT32 if stage or low < FLOAT32 else 0
    optimizer = (masters + _ADAM) * trained
    gradients = low * (trained if stage >= 2 else e.trained)
    bucket = low * float(zero.get("reduce_bucket_size", 5e8)) if stage and e.trained else 0.0
    lowered = FLOAT32 if low < FLOAT32 else 0
    if stage == 0:
        reduced = low * min(e.trained, _GRADIENT_BUCKET) if ranks > 1 else 0.0
        step = lowered * trained if lowered else reduced
    else:
        step = (low + lowered) * (min(trained, float(zero.get("sub_group_size", 1e9))) if stage == 3 else trained)
    held, training = Need(weights=weights, optimizer=optimizer), Need(gradients=gradients)
    offloads = "offload_optimizer" in zero and bool(e.trained)
    if stage == 3 and e.trained:  # one buffer of gradients and one of the bucket, for good
        held, training, bucket = replace(held, gradients=gradients, buffers=bucket), Need(), 0.0
    if offloads:
        # master weights and moments, float32 gradients, gradients as they came
        host = optimizer + (FLOAT32 + low) * trained + 2 * FLOAT32 * e.largest
        on_device = low * e.largest if stage < 3 else 0.0
        held = replace(held, optimizer=0.0, gradients=0.0, host=host, buffers=held.buffers + on_device)
        training, step = Need(gradients=gradients if stage == 1 else 0.0), 0.0
    gathered = 0.0
    if stage == 3 and (ranks > 1 or "offload_param" in zero):
        live = max(float(zero.get("stage3_max_live_parameters", 1e9)), e.largest)
        gathered = low * (min(e.all, live) + min(e.all, float(zero.get("stage3_prefetch_bucket_size", 5e7))))
    if "offload_param" in zero:
        held = replace(held, weights=0.0, host=held.host + weights)
    movable = 0.0 if offloads else (_ADAM if stage == 0 else masters + _ADAM) * trained
    return EngineMemory(model, held, training, bucket, gathered, step, movable)
