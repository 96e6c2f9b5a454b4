"""What a run that a server follows has trained, from its checkpoints.

A checkpoint has the trained weights as fragments, in a file of each rank, whatever the ZeRO stage and the number of
ranks (models/fragment_files.py): all weights, or the factors of the adapter of a run with LoRA.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.models.fragment_files import WEIGHT, Fragment, SavedFragments
from hybrid_rlhf.models.pretrained.adapters import LowRank
from hybrid_rlhf.runtime.files.checkpoint_folder import read_manifest

_ACTOR = "actor"
_DOWN = ".lora_A.default.weight"
_UP = ".lora_B.default.weight"


def read_trained(lm: PreTrainedModel, checkpoint: Path) -> dict[str, LowRank]:
    """Read what the actor of a run has trained, or the only model of a run: weights into a model, or an adapter.

    Args:
        lm: the model that the run began with.
        checkpoint: a complete checkpoint.

    Returns:
        the factors of the adapter by the names of the weights; empty if the run trains the weights.

    Raises:
        UserError: when the checkpoint belongs to another model, or its adapter is not of linear layers alone.
    """
    manifest = read_manifest(checkpoint)
    roles = list(manifest["engines"])
    role = _ACTOR if _ACTOR in roles else roles[0]
    saved = SavedFragments(sorted(checkpoint.glob(f"{role}_*.safetensors")))
    parameters = dict(lm.named_parameters())
    if any(name.endswith(_DOWN) for name in saved.names):
        return _read_adapter(lm, checkpoint, saved, parameters, manifest["config"])
    _read_weights(checkpoint, saved, parameters)
    return {}


def _read_weights(checkpoint: Path, saved: SavedFragments, parameters: Mapping[str, Tensor]) -> None:
    """Read all trained weights; of a weight that ranks split along its last dimension, the parts one by one."""
    fragments = []
    parts: list[tuple[Tensor, Tensor]] = []
    """Parts of weights, and the values that are read for them."""
    for name in saved.names:
        whole, _, place = name.partition("@")
        inner = _parameter_name(whole, parameters)
        if inner is None:
            raise _other_model(checkpoint, name)
        weight = parameters[inner].data
        values = weight.view(-1)
        if place:
            number, _, count = place.partition("of")
            part = weight.chunk(int(count), dim=-1)[int(number)]
            values = torch.empty(part.numel(), dtype=part.dtype)
            parts.append((part, values))
        fragments.append(_whole_fragment(checkpoint, saved, name, values))
    if not fragments:
        raise _other_model(checkpoint, "no weights")
    saved.fill(fragments)
    for part, values in parts:
        part.copy_(values.view(part.shape))


def _read_adapter(
    lm: PreTrainedModel,
    checkpoint: Path,
    saved: SavedFragments,
    parameters: Mapping[str, Tensor],
    config: Mapping[str, Any],
) -> dict[str, LowRank]:
    section = _ACTOR + ".lora" if f"{_ACTOR}.lora.rank" in config else "lora"
    rank = int(config[f"{section}.rank"])
    scale = float(config[f"{section}.alpha"]) / rank
    fragments = []
    factors = {}
    for name in saved.names:
        if not name.endswith((_DOWN, _UP)):
            raise UserError(
                f"a run that is followed must train all weights or an adapter alone, {checkpoint} has {name} beside "
                "its adapter: serve what the run saves at its end"
            )
        if name.endswith(_UP):
            continue
        layer_name = name.removesuffix(_DOWN)
        weight_name = _parameter_name(f"{layer_name}.weight", parameters)
        if weight_name is None:
            raise UserError(
                f"the adapter of a run that is followed must change linear layers of the served model, {checkpoint} "
                f"changes {layer_name}: serve what the run saves at its end"
            )
        transposed = isinstance(lm.get_submodule(weight_name.removesuffix(".weight")), Conv1D)
        outputs, inputs = parameters[weight_name].shape[:: -1 if transposed else 1]
        down = torch.empty(rank, inputs)
        up = torch.empty(outputs, rank)
        for factor_name, factor in ((name, down), (f"{layer_name}{_UP}", up)):
            fragments.append(_whole_fragment(checkpoint, saved, factor_name, factor.view(-1)))
        factors[weight_name] = LowRank(up, down, transposed)
    saved.fill(fragments)
    for change in factors.values():
        change.up.mul_(scale)
    return factors


def _whole_fragment(checkpoint: Path, saved: SavedFragments, name: str, values: Tensor) -> Fragment:
    """The fragment that reads all elements of a parameter into `values`."""
    if saved.elements(name) != len(values):
        raise _other_model(checkpoint, f"{saved.elements(name)} elements in {name} instead of {len(values)}")
    return Fragment(name, 0, {WEIGHT: values})


def _other_model(checkpoint: Path, name: str) -> UserError:
    return UserError(
        f"a run that is followed must train the weights of the served model, {checkpoint} has {name}: serve the model "
        "that the run began with"
    )


def _parameter_name(name: str, parameters: Iterable[str]) -> str | None:
    """The name of a parameter of the model for one of a training engine, which may wrap the model."""
    parts = name.split(".")
    tails = (".".join(parts[start:]) for start in range(min(3, len(parts))))
    return next((tail for tail in tails if tail in parameters), None)
