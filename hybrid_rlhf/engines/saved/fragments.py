"""A rank's part of a model as fragments of its parameters: weights and optimizer states.

Why not DeepSpeed's checkpoints: they fit only the number of ranks and the ZeRO stage that wrote them, they are pickles,
and the universal checkpoint cannot convert stage 3 to stage 1. A fragment states which part of which parameter it is,
so any number of ranks in any stage can read it, and a rank reads only the parts that it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.engines.deepspeed_internals import (
    full_elements,
    muon_momentum,
    optimizer_slice,
    partition_of,
    swaps_optimizer_states,
    wrapped_optimizer,
)
from hybrid_rlhf.models.fragment_files import WEIGHT, Fragment
from hybrid_rlhf.models.weight_split import split_of
from hybrid_rlhf.runtime.world import World

_MOMENTUM = "momentum_buffer"
"""Kind of Muon's momentum."""
_EIGHT_BIT = ("state1", "state2", "absmax1", "absmax2")
"""Kinds of bitsandbytes' states: codes of both moments, and the largest magnitude of each block."""


def _held(name: str, parameter: nn.Parameter, world: World, *, is_replicated: bool) -> Fragment:
    """Return the fragment that this rank and its replicas have of a parameter, without tensors.

    Args:
        name: name of the parameter.
        parameter: the parameter, whole or split.
        world: the ranks of the engine.
        is_replicated: true if ZeRO does not partition the fragment.
    """
    split = split_of(parameter)
    ranks = split.ranks
    return Fragment(
        f"{name}@{ranks.rank}of{ranks.size}" if split.dim else name,
        ranks.rank * full_elements(parameter) if split.dim == 0 else 0,
        {},
        copy=world.rank // ranks.size if is_replicated else 0,
        copies=world.size // ranks.size if is_replicated else 1,
        is_copy=split.dim is None and ranks.rank > 0,
    )


def parameter_fragments(
    parameters: Iterable[tuple[str, nn.Parameter]], values: Iterable[Tensor], *, kind: str, world: World
) -> Iterator[Fragment]:
    """Yield this rank's fragments of parameters, or of tensors with the same layout: full, or the ZeRO-3 partition.

    Args:
        parameters: parameters with their names.
        values: one tensor per parameter, with the size of this rank's part.
        kind: kind of the values, see WEIGHT.
        world: the ranks of the engine.
    """
    for (name, parameter), value in zip(parameters, values, strict=True):
        elements = full_elements(parameter)
        is_partition = partition_of(parameter) is not None
        held = _held(name, parameter, world, is_replicated=not is_partition)
        offset = value.numel() * (world.rank // split_of(parameter).ranks.size) if is_partition else 0
        if offset < elements:  # the last partitions may be padding
            yield held.part(offset, {kind: value.detach().flatten()[: elements - offset]})


def local_values(parameter: nn.Parameter) -> Tensor:
    """Return this rank's part of a parameter: its ZeRO-3 partition, or the whole parameter."""
    partition = partition_of(parameter)
    return parameter.data if partition is None else partition.data


def training_fragments(engine: DeepSpeedEngine, world: World) -> Iterator[Fragment]:
    """Yield this rank's fragments of the trained weights and their optimizer states.

    Raises:
        UserError: when DeepSpeed offloads the states to NVMe.
    """
    if swaps_optimizer_states(engine):
        raise UserError(
            "checkpoints need the optimizer's states in memory, deepspeed_config offloads them to NVMe: set "
            "offload_optimizer to cpu, or disable checkpoints"
        )
    states = wrapped_optimizer(engine).state
    is_replicated = engine.zero_optimization_stage() == 0
    for name, parameter in engine.module.named_parameters():
        place = optimizer_slice(engine, parameter) if parameter.requires_grad else None
        if place is None:
            continue
        held = _held(name, parameter, world, is_replicated=is_replicated)
        if has_eight_bits(engine):
            yield held.part(place.offset, {WEIGHT: place.of(place.flat)})
            continue
        if getattr(parameter, "use_muon", False):
            momentum = muon_momentum(engine, parameter, place)
            yield held.part(place.offset, {WEIGHT: place.of(place.flat)})
            yield replace(held, is_copy=momentum.is_copy).part(momentum.offset, {_MOMENTUM: momentum.values})
            continue
        if not states[place.flat]:  # AdamW creates the states in its first step
            zeros = torch.zeros_like
            states[place.flat].update(
                step=torch.zeros((), dtype=torch.float32, device=place.flat.device),
                exp_avg=zeros(place.flat),
                exp_avg_sq=zeros(place.flat),
            )
        moments = {kind: state for kind, state in states[place.flat].items() if state.dim()}
        states_of_weight = {WEIGHT: place.flat, **moments}
        yield held.part(place.offset, {kind: place.of(state) for kind, state in states_of_weight.items()})
    if has_eight_bits(engine):
        yield from _eight_bit_fragments(engine, world)


def has_eight_bits(engine: DeepSpeedEngine) -> bool:
    """True if the moments are in 8 bits: only the same ranks and ZeRO stage can read their blocks."""
    return hasattr(wrapped_optimizer(engine), "name2qmap")


def _eight_bit_fragments(engine: DeepSpeedEngine, world: World) -> Iterator[Fragment]:
    """Yield the moments of each tensor that bitsandbytes updates, as this rank has them."""
    optimizer = wrapped_optimizer(engine)
    for number, group in enumerate(optimizer.param_groups):
        for place, flat in enumerate(group["params"]):
            states = optimizer.state[flat]
            if not states:
                optimizer.init_state(group, flat, number, place)
            for kind in (kind for kind in _EIGHT_BIT if kind in states):
                name = f"optimizer.{number}.{place}@{world.rank}of{world.size}"
                yield Fragment(name, 0, {kind: states[kind].view(-1)})


def optimizer_steps(engine: DeepSpeedEngine) -> int:
    """Return the optimizer's step count."""
    states = wrapped_optimizer(engine).state.values()
    return max((int(state["step"]) for state in states if "step" in state), default=0)


def set_optimizer_steps(engine: DeepSpeedEngine, steps: int) -> None:
    """Set the optimizer's step count; it must have states. Muon's have none."""
    for state in wrapped_optimizer(engine).state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"].fill_(steps)
        elif "step" in state:
            state["step"] = steps


def named_tensors(fragments: Iterable[Fragment]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of fragments, with their names on disk."""
    for fragment in fragments:
        for kind, tensor in fragment.tensors.items():
            yield f"{fragment.name}/{fragment.offset}/{kind}", tensor


class HostCopies:
    """Copies of tensors in host memory, which training does not change. The memory is reused."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copy tensors; earlier copies with the same names are overwritten."""
        copies = {}
        for name, tensor in tensors:
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty_like(tensor, device="cpu", requires_grad=False)
            copies[name] = buffer.copy_(tensor.detach())
        self._buffers = copies
        return copies
