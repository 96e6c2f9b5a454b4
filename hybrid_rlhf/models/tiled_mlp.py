"""MLPs that compute the tokens of a long row in parts, so that their intermediate values exist for one part at a time.

Each part is computed again in backward. The number of parts is fixed, whatever the number of tokens: under ZeRO-3 each
part gathers the weights, and all ranks need the same number of calls.

Source: tiled MLP of ALST (arXiv 2506.13996, section 3.2).
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.models.families import family_of
from hybrid_rlhf.models.structure import layer_list


def tile_mlps(lm: PreTrainedModel, parts: int) -> None:
    """Let the MLPs of all layers compute tokens in so many parts.

    Raises:
        UserError: for a model whose layers have no module for their MLP, or a mixture of experts.
    """
    family = family_of(lm)
    layers = layer_list(lm)
    pattern = None if family is None or family.experts is not None else family.names.get("down")
    modules = dict(lm.named_modules())
    for number, layer in enumerate(layers or ()):
        name = "" if pattern is None else pattern.format(number).rpartition(".")[0]
        mlp: Any = modules.get(name)
        if mlp is None or mlp is layer or mlp is lm:
            raise UserError(
                f"model.mlp_parts is for dense models whose layers have an MLP module, {type(lm).__name__} has none: "
                "set it to 1"
            )
        kind: Any = type(mlp)
        if len(inspect.signature(kind.forward).parameters) != 2:
            raise UserError(
                f"model.mlp_parts is for MLPs that read hidden states alone, {kind.__name__} reads more: set it to 1"
            )
        mlp.__class__ = _tiled(kind)
        vars(mlp)["parts"] = parts


@functools.cache
def _tiled(kind: Any) -> Any:
    """A subclass of an MLP whose forward computes parts of the tokens [1, T, H] one after the other."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        whole = functools.partial(kind.forward, self)
        parts = hidden_states.tensor_split(self.parts, dim=-2)
        if torch.is_grad_enabled():
            return torch.cat([checkpoint(whole, part, use_reentrant=False) for part in parts], dim=-2)
        return torch.cat([whole(part) for part in parts], dim=-2)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
