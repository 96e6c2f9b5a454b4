"""What a rank holds of a model by the place in its parameters: weights, and what the optimizer keeps beside them.

Why our own: DeepSpeed's checkpoint files fit the ranks and the ZeRO stage that wrote them, are pickles, and its
universal checkpoint does not lead from stage 3 to stage 1. A fragment says which part of which parameter it is, so
every layout reads what any other wrote, and a rank reads no more than it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.world import World

WEIGHT = "weight"
"""Beside the names of the optimizer's states: the weights that the optimizer moves, float32 where it keeps a copy."""
_PARTITIONS = "fp32_groups_flat_partition"
"""Where DeepSpeed's optimizer for bfloat16 without ZeRO keeps the part of a rank."""


@dataclass(frozen=True)
class Fragment:
    """A stretch of one parameter; its tensors [n] are views of what the engine computes with."""

    name: str
    """Of the parameter."""
    offset: int
    """Of its first element in the flat parameter."""
    tensors: Mapping[str, Tensor]
    is_everywhere: bool
    """Whether every rank holds the same; else this one alone holds it."""

    def share(self, world: World) -> Fragment:
        """The part that this rank writes."""
        if not self.is_everywhere:
            return self
        size = len(next(iter(self.tensors.values())))
        first, end = size * world.rank // world.size, size * (world.rank + 1) // world.size
        return replace(
            self, offset=self.offset + first, tensors={kind: t[first:end] for kind, t in self.tensors.items()}
        )


@dataclass(frozen=True)
class _Place:
    """Where the optimizer keeps a stretch of a parameter."""

    flat: Tensor
    """The tensor that the optimizer steps."""
    start: int
    """Of the stretch in it."""
    offset: int
    """Of the stretch in the flat parameter."""
    elements: int


def parameter_fragments(
    parameters: Iterable[tuple[str, nn.Parameter]], values: Iterable[Tensor], *, kind: str, world: World
) -> Iterator[Fragment]:
    """What this rank holds of parameters, or of tensors laid out as they are: whole, or a ZeRO-3 partition.

    Args:
        parameters: by name.
        values: one a parameter, of the size of what the rank holds of it.
        kind: what the values are.
        world: the ranks that share the parameters.
    """
    for (name, parameter), value in zip(parameters, values, strict=True):
        elements: int = getattr(parameter, "ds_numel", parameter.numel())
        is_partition = hasattr(parameter, "ds_tensor")
        offset = value.numel() * world.rank if is_partition else 0
        if offset < elements:  # the last partitions may be padding
            yield Fragment(name, offset, {kind: value.detach().flatten()[: elements - offset]}, not is_partition)


def held(parameter: nn.Parameter) -> Tensor:
    """What this rank holds of a parameter: its ZeRO-3 partition, or all of it."""
    partition = getattr(parameter, "ds_tensor", None)
    return parameter.data if partition is None else partition.data


def release(parameter: nn.Parameter) -> None:
    """Leave a rank its partition alone: ZeRO-3 keeps small parameters whole, and would not see that it changes."""
    if getattr(parameter, "ds_status", None) is ZeroParamStatus.AVAILABLE:
        parameter.partition()  # type: ignore[attr-defined]


def training_fragments(engine: DeepSpeedEngine) -> Iterator[Fragment]:
    """All that this rank holds of the weights that learn; all ranks hold all of it where no stage partitions.

    Raises:
        UserError: when DeepSpeed keeps the states on NVMe.
    """
    if getattr(engine.optimizer, "swap_optimizer", False):
        raise UserError(
            "checkpoints need the optimizer's states in memory, deepspeed_config offloads them to NVMe: set "
            "offload_optimizer to cpu, or take no checkpoints"
        )
    states = _inner(engine).state
    is_everywhere = engine.zero_optimization_stage() == 0 and not hasattr(engine.optimizer, _PARTITIONS)
    for name, parameter in engine.module.named_parameters():
        place = _place(engine, parameter) if parameter.requires_grad else None
        if place is None:
            continue
        if not states[place.flat]:  # AdamW makes them at its first step
            zeros = torch.zeros_like
            states[place.flat].update(
                step=torch.zeros((), dtype=torch.float32, device=place.flat.device),
                exp_avg=zeros(place.flat), exp_avg_sq=zeros(place.flat),
            )  # fmt: skip
        moments = {kind: state for kind, state in states[place.flat].items() if state.dim()}
        yield Fragment(
            name,
            place.offset,
            {
                kind: tensor.detach().flatten()[place.start : place.start + place.elements]
                for kind, tensor in {WEIGHT: place.flat, **moments}.items()
            },
            is_everywhere,
        )


def optimizer_steps(engine: DeepSpeedEngine) -> int:
    """Updates that Adam counts."""
    return max((int(state["step"]) for state in _inner(engine).state.values()), default=0)


def set_optimizer_steps(engine: DeepSpeedEngine, steps: int) -> None:
    """Put Adam's count, after its states have been held."""
    for state in _inner(engine).state.values():
        state["step"].fill_(steps)


def weights_from_fragments(engine: DeepSpeedEngine) -> None:
    """Bring the model's weights up to what was written into the fragments; every rank must call."""
    optimizer: Any = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        optimizer.checkpoint_event_prologue()
        for group in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        optimizer.checkpoint_event_epilogue()
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
    elif hasattr(optimizer, "fp32_groups"):
        for weights, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for weight, master in zip(weights, masters, strict=True):
                weight.data.copy_(master.data)


def _inner(engine: DeepSpeedEngine) -> Any:
    """The AdamW under DeepSpeed's wrapper, if there is one."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _place(engine: DeepSpeedEngine, parameter: nn.Parameter) -> _Place | None:
    optimizer: Any = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        group, start, elements = optimizer.grad_position[optimizer.get_param_id(parameter)]
        offset = elements * optimizer._get_param_partition_rank(parameter)
        elements = min(elements, parameter.ds_numel - offset)  # type: ignore[attr-defined]
        return _Place(optimizer.fp32_partitioned_groups_flat[group], start, offset, elements) if elements > 0 else None
    if hasattr(parameter, "_hp_mapping"):  # stages 1 and 2, and bfloat16 without ZeRO
        mapping: Any = parameter._hp_mapping
        if mapping is None:
            return None
        name = "single_partition_of_fp32_groups" if engine.zero_optimization_stage() else _PARTITIONS
        flat, here = getattr(optimizer, name)[mapping.param_group_index], mapping.hp_fragment_address
        return _Place(flat, here.start, mapping.lp_fragment_address.start, here.numel)
    return _Place(_stepped(optimizer, parameter), 0, 0, parameter.numel())


def _stepped(optimizer: Any, parameter: nn.Parameter) -> Tensor:
    """The tensor that stands for a parameter in the optimizer: itself, or its float32 copy."""
    for weights, masters in zip(
        getattr(optimizer, "fp16_groups", ()), getattr(optimizer, "fp32_groups", ()), strict=True
    ):
        for weight, master in zip(weights, masters, strict=True):
            if weight is parameter:
                return master  # type: ignore[no-any-return]
    return parameter
