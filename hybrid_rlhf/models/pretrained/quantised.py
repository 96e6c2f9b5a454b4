"""Stored quantised weights: MXFP4 (gpt-oss) is dequantised while it is loaded, other formats are refused.

Experts [E, K, N] of the model are stored as blocks [E, N, K / 32, 16] of two 4-bit numbers per byte, and scales
[E, N, K / 32], one per 32 weights (OCP Microscaling, version 1.0, section 5.1). They are compared with config.json
first, since transformers does not name a weight that does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Mxfp4Config, PreTrainedConfig

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.models.pretrained.folders import stored_shapes

_BLOCK = 32
_PARTS = ("_blocks", "_scales")


def dequantisation(path: str, config: PreTrainedConfig) -> dict[str, Any]:
    """Arguments of from_pretrained to dequantise a stored model; {} for weights that are not quantised.

    Raises:
        UserError: for a format whose weights cannot be trained.
    """
    stored = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(), "quantization_config", None
    )
    if stored is None:
        return {}
    method = stored.get("quant_method")
    if method is None:
        raise UserError(
            f"quantization_config must name a quant_method, that of {path} has none: remove it from config.json if the "
            "weights are unquantised, or copy the model again"
        )
    if method != "mxfp4":
        raise UserError(
            f"weights must be unquantised or in MXFP4, those of {path} are in {method}: give a folder with "
            "unquantised ones"
        )
    return {"quantization_config": Mxfp4Config(dequantize=True)}


def require_whole_mxfp4(folder: Path, model: nn.Module) -> None:
    """Require blocks and scales, both of the right shape, of each MXFP4 weight of a model built on the meta device.

    Raises:
        UserError: with the name of the first weight that lacks them.
    """
    stored = stored_shapes(folder)
    for name, weight in model.named_parameters():
        if name not in stored and any(name + part in stored for part in _PARTS):
            _require_parts(folder, name, tuple(weight.shape), stored)


def _require_parts(folder: Path, name: str, shape: tuple[int, ...], stored: Mapping[str, tuple[int, ...]]) -> None:
    *experts, inputs, outputs = shape
    blocks = (*experts, outputs, inputs // _BLOCK, _BLOCK // 2)
    for part, wanted in zip(_PARTS, (blocks, blocks[:-1]), strict=True):
        actual = stored.get(name + part)
        if actual != wanted:
            raise UserError(
                f"{name}{part} must have the shape {list(wanted)}, in {folder} "
                f"{'it is missing' if actual is None else f'it has {list(actual)}'}: copy the model again, or correct "
                "config.json"
            )
