"""Expert parallelism: the ranks of a group split the experts of each layer, and tokens travel to the ranks of theirs.

Rank r of N has the r-th N-th of a layer's experts: a part of the weights that transformers stacks in one parameter,
under the same name. A rank routes its tokens with the model's own router, sends each token to the ranks of its experts,
computes the tokens that it receives, and sends their outputs back, where they are weighted and summed. The ranks of a
group compute different rows; every rank must run the same number of forwards.

Source: GShard (arXiv 2006.16668), without a limit on the tokens of an expert, so no token is dropped. Deviation from
DeepSpeed's AutoEP: it replaces the layer and its router and renames the weights, which weight sync, saved models,
router losses and routing replay read.

Shapes: T tokens of this rank, k experts per token, E experts of a layer, N ranks of a group, R tokens received,
H hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.functional.operations import with_gradient
from hybrid_rlhf.models.weight_split import WeightSplit, note_split, split_of
from hybrid_rlhf.runtime.world import World


def expert_layers(lm: nn.Module) -> list[Any]:
    """Modules that compute the experts of a layer from stacked weights, with the interface that transformers' kernels
    for experts need: hidden states [T, H], chosen experts [T, k] and their weights [T, k] to outputs [T, H]."""
    return [module for module in lm.modules() if hasattr(module, "is_transposed") and hasattr(module, "num_experts")]


def require_expert_parallelism(lm: PreTrainedModel, size: int, *, ranks: int) -> None:
    """Check that groups of so many ranks can split the experts of a model.

    Args:
        lm: the model, on any device.
        size: model.expert_parallel.
        ranks: number of ranks of the model.

    Raises:
        UserError: for a model or a number of ranks that does not support it.
    """
    name = type(lm).__name__
    layers = expert_layers(lm)
    if not layers or any(len(weight) != layer.num_experts for layer in layers for weight in layer.parameters()):
        raise UserError(
            f"model.expert_parallel is for mixtures whose experts transformers stacks in one weight, {name} has none: "
            "set it to 1"
        )
    experts = next((layer.num_experts for layer in layers if layer.num_experts % size), None)
    if experts is not None:
        raise UserError(
            f"model.expert_parallel must divide the number of experts, {name} has {experts}, got {size}: give a divisor"
        )
    if ranks % size:
        raise UserError(f"model.expert_parallel must divide the number of ranks {ranks}, got {size}: give a divisor")


def split_experts(layer: Any, world: World, replace: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Let the ranks of a group compute the experts of a layer together.

    Args:
        layer: one of `expert_layers`.
        world: the group.
        replace: returns a new parameter with this rank's part of a parameter, whose split is noted.
    """
    split = WeightSplit(world, dim=0)
    for name, parameter in list(layer.named_parameters(recurse=False)):
        note_split(parameter, split)
        part = replace(parameter)
        note_split(part, split)
        setattr(layer, name, part)
    layer.num_experts //= world.size
    vars(layer)["forward"] = _Dispatch(layer.forward, layer.num_experts, world)


@contextlib.contextmanager
def whole_experts(lm: nn.Module) -> Iterator[None]:
    """Context in which each rank computes all experts alone, as for generation, whose ranks run different numbers of
    forwards. Every rank enters; the weights must be gathered from ZeRO-3, and not change."""
    split = [layer for layer in expert_layers(lm) if "forward" in vars(layer)]
    dispatches = [vars(layer).pop("forward") for layer in split]
    parts = [(weight, weight.data) for layer in split for weight in layer.parameters()]
    for layer, dispatch in zip(split, dispatches, strict=True):
        layer.num_experts *= dispatch.world.size
    for weight, part in parts:
        weight.data = split_of(weight).whole(part)
    try:
        yield
    finally:
        for weight, part in parts:
            weight.data = part
        for layer, dispatch in zip(split, dispatches, strict=True):
            layer.num_experts //= dispatch.world.size
            vars(layer)["forward"] = dispatch


class _Dispatch:
    """The forward of a layer whose experts are split."""

    def __init__(self, compute: Callable[..., Tensor], local: int, world: World) -> None:
        """Args: the forward of this rank's experts, their number, and the ranks that split the layer's experts."""
        self._compute = compute
        self._local = local
        self.world = world

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the outputs [T, H] of tokens [T, H] with chosen experts [T, k] and their weights [T, k]."""
        tokens, per_token = top_k_index.shape
        chosen = top_k_index.flatten()
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=self._local * self.world.size).view(self.world.size, self._local)
        incoming = self.world.all_to_all(counts)
        sent, received = torch.stack([counts.sum(dim=1), incoming.sum(dim=1)]).tolist()
        rows = _exchanged(hidden_states[order // per_token], self.world, sent, received)
        expert = torch.arange(self._local, device=rows.device).repeat(self.world.size)
        outputs = _exchanged(
            self._outputs(rows, expert.repeat_interleave(incoming.flatten())), self.world, received, sent
        )
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        weighted = outputs[place].view(tokens, per_token, -1) * top_k_weights[:, :, None]
        return weighted.sum(dim=1).to(hidden_states.dtype)

    def _outputs(self, rows: Tensor, expert: Tensor) -> Tensor:
        """Return the outputs [R, H] of rows [R, H] by experts [R] of this rank."""
        count = len(rows)
        if not count:  # so that backward reaches the weights in the same order on every rank: a row without effect
            rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
            expert = expert.new_zeros(1)
        return self._compute(rows, expert[:, None], rows.new_ones(len(rows), 1))[:count]


def _exchanged(rows: Tensor, world: World, sent: list[int], received: list[int]) -> Tensor:
    """Rows of all ranks, exchanged; the gradients travel back."""
    return with_gradient(
        rows,
        lambda x: world.exchange_rows(x, sent=sent, received=received),
        lambda grad: world.exchange_rows(grad, sent=received, received=sent),
    )
