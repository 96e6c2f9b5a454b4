"""Sequence parallelism: the ranks of a group compute the packed rows of all of them together, each some of the tokens.

The rows of the group, one after the other, are one packed row. Each rank runs the layers on a contiguous part of its
tokens; attention exchanges parts of the tokens of all heads for all tokens of a part of the heads, and back. Afterwards
each rank receives the outputs of its own rows, and computes their loss: everything outside of the model sees ordinary
data parallelism, and gradients are summed over ranks as there.

Source: DeepSpeed-Ulysses (arXiv 2309.14509). Deviation from DeepSpeed's adapter for transformers (ALST, arXiv
2506.13996): it replaces the attention of all models of the process, drops the boundaries of packed rows, and gives all
ranks of a group the same rows, for which ZeRO 0 to 2 and ZeRO 3 scale gradients differently.

Shapes: B rows of this rank, T tokens of a row, S ranks of the group, N tokens of all rows of the group (a multiple of
S), C = N / S tokens of this rank's part, n real tokens of this rank's rows, A heads, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.functional.operations import with_gradient
from hybrid_rlhf.models.families import has_mixers
from hybrid_rlhf.models.packing.attention import PACKED_ATTENTION, tensor_world
from hybrid_rlhf.models.packing.batches import has_varlen_kernel, like_lengths
from hybrid_rlhf.models.packing.rows import ends, places, take
from hybrid_rlhf.models.structure import backbone_of, has_mixture
from hybrid_rlhf.runtime.world import World

_SPLIT_STYLES = {"colwise", "rowwise", "replicated_with_grad_allreduce", "embedding_rowwise"}
"""Styles of transformers' tensor-parallel plans that leave every weight of the layers whole or split in equal parts.
Embeddings stay whole."""


def _require_common(lm: PreTrainedModel, size: int, *, key: str) -> None:
    """Check what sequence and tensor parallelism need, for the error message with their key.

    Raises:
        UserError: for a model that does not support it.
    """
    name = type(lm).__name__
    if has_mixers(lm.config):
        raise UserError(
            f"{key} splits attention, {name} has other layers that mix tokens, such as recurrent ones: set it to 1"
        )
    if lm.config._attn_implementation != PACKED_ATTENTION:
        raise UserError(
            f"{key} needs packed rows with attention auto or sdpa, {name} has "
            f"{lm.config._attn_implementation}: set it to 1, or leave out model.attention"
        )
    if has_mixture(lm):
        raise UserError(f"{key} is for dense models, {name} has a mixture of experts: set it to 1")
    heads = lm.config.get_text_config().num_attention_heads
    if heads % size:
        raise UserError(
            f"{key} must divide the number of attention heads, {name} has {heads}, got {size}: give a divisor"
        )


def require_tensor_parallelism(lm: PreTrainedModel, size: int) -> None:
    """Check that so many ranks can hold parts of a model's weights.

    Raises:
        UserError: for a model that does not support it.
    """
    _require_common(lm, size, key="model.tensor_parallel")
    name = type(lm).__name__
    config = lm.config.get_text_config()
    if config is not lm.config:  # AutoTP reads the plan of the whole config, which has none
        raise UserError(f"model.tensor_parallel is for models of text alone, {name} has towers: set it to 1")
    plan = getattr(config, "base_model_tp_plan", None) or {}
    if not plan or not {*plan.values()} <= _SPLIT_STYLES:
        raise UserError(
            f"model.tensor_parallel needs a plan of transformers with rows and columns, {name} has "
            f"{', '.join(sorted({*plan.values()} - _SPLIT_STYLES)) or 'none'}: set it to 1"
        )
    for key in ("num_key_value_heads", "intermediate_size"):
        number = getattr(config, key, None) or size
        if number % size:
            raise UserError(f"model.tensor_parallel must divide {key}, {name} has {number}, got {size}: give a divisor")


def require_sequence_parallelism(lm: PreTrainedModel, size: int) -> None:
    """Check that groups of so many ranks can compute the rows of a model together.

    Raises:
        UserError: for a model that does not support it.
    """
    _require_common(lm, size, key="model.sequence_parallel")
    config = lm.config.get_text_config()
    name = type(lm).__name__
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if rotary in ("longrope", "dynamic"):
        raise UserError(
            f"model.sequence_parallel needs rotary positions that do not depend on the length, {name} has {rotary}: "
            "set it to 1"
        )


@dataclass(frozen=True)
class SequenceShard:
    """This rank's part of the packed row of its group."""

    world: World
    arguments: dict[str, Tensor]
    """Arguments of the backbone: tokens and positions [1, C], and the boundaries of all rows."""
    mine: Tensor
    """[n] index of each of this rank's tokens among the N."""
    asked: Tensor
    """The tokens of this part after which any rank reads a log-prob, by their index in the part."""
    labels: Tensor
    """The tokens after those."""
    computes_all: bool
    """True if each rank's backbone computes all tokens, with its part of the weights."""

    def hidden(self, lm: PreTrainedModel, head: nn.Module | None = None) -> Tensor:
        """Last hidden states [C, H] of this rank's part, or the output of a head after them."""
        hidden: Tensor = backbone_of(lm)(**self.arguments, use_cache=False).last_hidden_state[0]
        outputs = hidden if head is None else head(hidden)
        return _part_of_tokens(outputs, self.world) if self.computes_all else outputs

    def own(self, values: Tensor) -> Tensor:
        """Values [n, ...] of this rank's rows from those [C, ...] of the parts of all ranks; every rank calls."""
        world = self.world
        whole = with_gradient(
            values,
            lambda x: world.all_gather(x).flatten(0, 1),
            lambda grad: world.all_to_all(grad.unflatten(0, (world.size, -1))).sum(dim=0),
        )
        return take(whole, self.mine)


def shard_rows(
    lm: PreTrainedModel, world: World, input_ids: Tensor, real: Tensor, before: Tensor, *, device: torch.device
) -> SequenceShard:
    """This rank's part of the rows of its group, on the host. Every rank calls.

    Args:
        lm: the model.
        world: the ranks of the group, `rows_world(lm)`.
        input_ids: [B, T] int64, rows of this rank, on the host.
        real: [B, T] bool, true on real tokens, on the host.
        before: indices, among the real tokens row by row, of those after which a log-prob is read.
        device: device of the model.
    """
    of_rows, by_rank, asked = zip(*_gathered_lists([real.sum(dim=1), input_ids[real], before], world), strict=True)
    lengths = [length for rows in of_rows for length in rows.tolist() if length]
    begins = [0, *itertools.accumulate(map(len, by_rank))]
    ids = torch.cat(by_rank)
    longest_first = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    sizes = [lengths[row] for row in longest_first]
    starts = torch.zeros(len(lengths), dtype=torch.long)
    starts[longest_first] = torch.tensor([0, *sizes]).cumsum(0)[:-1]
    order = torch.cat(
        [torch.arange(start, start + length) for start, length in zip(starts.tolist(), lengths, strict=True)]
        or [torch.arange(0)]
    )
    padding = -len(ids) % world.size or (0 if len(ids) else world.size)
    sizes += [padding] * bool(padding)
    if has_varlen_kernel(lm, device):
        mask = ends(torch.tensor(sizes))
    else:
        mask = places(sizes, like_lengths(sizes, device))
    packed = ids.new_zeros(len(ids) + padding).index_copy(0, order, ids)
    positions = torch.cat([torch.arange(size) for size in sizes])
    size = len(packed) // world.size
    part = slice(world.rank * size, (world.rank + 1) * size)
    is_asked = torch.zeros_like(packed, dtype=torch.bool)
    for begin, of_rank in zip(begins, asked, strict=False):
        is_asked[order[begin + of_rank]] = True
    places_asked = is_asked[part].nonzero().squeeze(1)
    computes_all = tensor_world(lm) is not None
    inputs = slice(None) if computes_all else part
    return SequenceShard(
        world,
        {"input_ids": packed[None, inputs], "position_ids": positions[None, inputs], "attention_mask": mask},
        order[begins[world.rank] : begins[world.rank + 1]],
        places_asked,
        packed.roll(-1)[part][places_asked],
        computes_all,
    )


def with_summed_gradient(weight: Tensor, world: World) -> Tensor:
    """A weight of which each rank computes a part of the gradient."""
    return with_gradient(
        weight,
        lambda x: x.view_as(x),
        lambda grad: world.all_reduce(grad.clone(memory_format=torch.contiguous_format)),
    )


def _part_of_tokens(x: Tensor, world: World) -> Tensor:
    """This rank's part [N / S, ...] of values [N, ...] that all ranks have computed."""
    return with_gradient(
        x,
        lambda x: x.chunk(world.size)[world.rank].clone(),
        lambda grad: world.all_gather(grad).flatten(0, 1),
    )


def _gathered_lists(values: Sequence[Tensor], world: World) -> list[tuple[Tensor, ...]]:
    """The int64 tensors [n] of all ranks, whose sizes differ, by rank; all on the host."""
    sizes = world.all_gather(torch.tensor([len(each) for each in values]).to(world.device)).tolist()
    whole = torch.cat([*values])
    padded = torch.nn.functional.pad(whole, (0, max(map(sum, sizes)) - len(whole)))
    by_rank = world.all_gather(padded.to(world.device)).cpu()
    return [row[: sum(of_rank)].split(of_rank) for row, of_rank in zip(by_rank, sizes, strict=True)]
