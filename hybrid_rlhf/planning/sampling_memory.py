"""Memory of a rank while it samples: inference weights, KV cache and temporaries."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.engines.hybrid import BUCKET_ELEMENTS
from hybrid_rlhf.planning.engine_memory import MemoryUse
from hybrid_rlhf.planning.generation_memory import CachePlan, cache_plan, decode_buffer_bytes
from hybrid_rlhf.planning.inference_memory import inference_weight_bytes
from hybrid_rlhf.planning.phase_memory import Device, PhaseMemory
from hybrid_rlhf.planning.shapes import ShapedModel


@dataclass(frozen=True)
class InferenceBytes:
    """Bytes of inference weights."""

    weights: float
    """Bytes of copies of the training weights; views take none."""
    building: float
    """Largest temporaries of a weight sync, before the cache is allocated."""


def inference_bytes(
    model: ShapedModel,
    rollout: RolloutConfig,
    *,
    stage: int,
    gathers: bool,
    dtype: torch.dtype,
    device: torch.device,
    in_use: bool = False,
) -> InferenceBytes:
    """Bytes of the inference weights of an actor.

    Args:
        model: the actor.
        rollout: settings of generation.
        stage: ZeRO stage of the actor.
        gathers: the training weights are gathered from ZeRO-3's parts.
        dtype: data type of the inference weights.
        device: device of the rank.
        in_use: training changes the weights meanwhile, which rules out views.
    """
    weights = inference_weight_bytes(model, rollout, stage=stage, dtype=dtype, device=device, in_use=in_use)
    building = 2.0 * model.elements.largest * dtype.itemsize
    if gathers:
        building += min(BUCKET_ELEMENTS, model.elements.all) * dtype.itemsize
    if rollout.quantization is not None:  # all are there in their own dtype before the first is quantised
        whole = replace(rollout, quantization=None)
        building += (
            inference_weight_bytes(model, whole, stage=stage, dtype=dtype, device=device, in_use=in_use) - weights
        )
    return InferenceBytes(weights, building)


@dataclass(frozen=True)
class SamplingMemory:
    """Memory of the phase `generation`."""

    phase: PhaseMemory
    cache: CachePlan
    step_buffers: float
    """Bytes of the temporaries of a decoding step."""


def sampling_memory(
    model: ShapedModel,
    rollout: RolloutConfig,
    base: MemoryUse,
    inference: InferenceBytes,
    machine: Device,
    *,
    ranks: int,
    dtype: torch.dtype,
    copies: float = 0.0,
    records_routes: bool = True,
) -> SamplingMemory:
    """Memory of a rank that samples.

    Args:
        model: the actor.
        rollout: settings of generation.
        base: what the rank holds besides.
        inference: of the actor's inference weights.
        machine: device of the rank.
        ranks: number of ranks that sample.
        dtype: data type of the inference weights.
        copies: bytes of further copies of the weights, which older rollouts are sampled from.
        records_routes: the experts of a mixture are recorded in the cache.
    """
    room = machine.device_bytes - (base + MemoryUse(inference=inference.weights)).device
    cache = cache_plan(
        model,
        rollout,
        ranks=ranks,
        room_bytes=room,
        dtype=dtype,
        device=machine.device,
        records_routes=records_routes,
    )
    buffers = decode_buffer_bytes(model, rollout, rows=cache.rows, dtype=dtype, device=machine.device)
    need = base + MemoryUse(
        inference=inference.weights + copies,
        cache=cache.cache_bytes,
        buffers=max(buffers, inference.building - cache.cache_bytes),
    )
    note = ""
    if cache.full_length_rows < cache.wanted_rows:
        note = f"{cache.rows} of {cache.wanted_rows} completions at once, {cache.full_length_rows} at full length"
    return SamplingMemory(PhaseMemory("generation", need, machine, note), cache, buffers)
