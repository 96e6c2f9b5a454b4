"""Exchanges among ranks that compute rows together (sequence.py): of tokens for heads inside attention, under sequence
parallelism, and of the parts of gradients after the backbone, under tensor parallelism.

Shapes: S ranks, N tokens of the group, C = N / S tokens of a rank, A heads, D head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hybrid_rlhf.functional.operations import with_gradient
from hybrid_rlhf.runtime.world import World

_ATTRIBUTE = "sequence_world"
"""Attribute of the modules of a model under sequence parallelism: the ranks of the group."""
_TENSOR_ATTRIBUTE = "tensor_world"
"""Attribute of a model under tensor parallelism: the ranks of the group."""


def set_sequence_world(lm: nn.Module, world: World) -> None:
    """Set the ranks that compute the rows of a model together."""
    for module in lm.modules():
        vars(module)[_ATTRIBUTE] = world


def sequence_world(module: nn.Module) -> World | None:
    """The ranks that compute the rows of a model or of one of its modules together; None without sequence
    parallelism."""
    world: World | None = vars(module).get(_ATTRIBUTE)
    return world


def set_tensor_world(lm: nn.Module, world: World) -> None:
    """Set the ranks that hold parts of a model's weights and compute its rows together."""
    vars(lm)[_TENSOR_ATTRIBUTE] = world


def tensor_world(lm: nn.Module) -> World | None:
    """The ranks that hold parts of a model's weights and compute its rows together; None without tensor parallelism."""
    world: World | None = vars(lm).get(_TENSOR_ATTRIBUTE)
    return world


def with_summed_gradient(weight: Tensor, world: World | None) -> Tensor:
    """A weight of which each rank computes a part of the gradient; None: it is returned."""
    if world is None:
        return weight
    return with_gradient(
        weight,
        lambda x: x.view_as(x),
        lambda grad: world.all_reduce(grad.clone(memory_format=torch.contiguous_format)),
    )


def part_of_tokens(x: Tensor, world: World) -> Tensor:
    """This rank's part [N / S, ...] of values [N, ...] that all ranks have computed."""
    return with_gradient(
        x,
        lambda x: x.chunk(world.size)[world.rank].clone(),
        lambda grad: world.all_gather(grad).flatten(0, 1),
    )


def heads_of_all_tokens(x: Tensor, world: World) -> Tensor:
    """[1, A / S, N, D], this rank's heads of all tokens, from [1, A, C, D], all heads of this rank's tokens.

    Fewer heads than ranks, as grouped keys and values may have, are repeated: each rank gets the one of its queries.
    """
    heads = x.shape[1]
    x = x.repeat_interleave(math.lcm(heads, world.size) // heads, dim=1) if heads % world.size else x
    return tokens_of_all_heads(x, world)


def tokens_of_all_heads(x: Tensor, world: World) -> Tensor:
    """The inverse: [1, C, A, D] from [1, N, A / S, D]; the same exchange, as is the gradient."""
    parts = with_gradient(x[0].unflatten(0, (world.size, -1)), world.all_to_all, world.all_to_all)
    return parts.transpose(0, 1).flatten(1, 2)[None]
