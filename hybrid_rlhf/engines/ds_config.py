"""Config sections to DeepSpeed's JSON. Pure: needs no DeepSpeed."""

from __future__ import annotations

from typing import Any

import torch

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.files import read_json_object
from hybrid_rlhf.configs.sections import OptimizerConfig, ZeroConfig


def deepspeed_config(
    *, zero: ZeroConfig, dtype: torch.dtype, optimizer: OptimizerConfig | None, overrides: dict[str, Any]
) -> dict[str, Any]:
    """The DeepSpeed config of one engine.

    Args:
        zero: stage and offload.
        dtype: of the weights; bfloat16 and float16 keep float32 master weights where the engine trains.
        optimizer: its gradient clip; none for a frozen engine.
        overrides: the user's own DeepSpeed JSON, which wins key by key.
    """
    config: dict[str, Any] = {
        # We accumulate and step ourselves, and divide a loss once by its global count.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "steps_per_print": None,
        "bf16": {"enabled": dtype is torch.bfloat16, "check_grad_overflow": dtype is torch.bfloat16},
        "fp16": {"enabled": dtype is torch.float16},
        "zero_optimization": {"stage": zero.stage},
        # torch's fused AdamW runs on host and device alike and needs no compiler on the user's machine.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if optimizer is not None:
        config["gradient_clipping"] = optimizer.max_grad_norm
    stage: dict[str, Any] = config["zero_optimization"]
    if zero.stage in (1, 2):
        stage["overlap_comm"] = False  # with stage 1, not available when the caller owns the step
    if optimizer is not None and zero.offload_optimizer:
        stage["offload_optimizer"] = {"device": "cpu"}
    if zero.offload_parameters:
        stage["offload_param"] = {"device": "cpu"}
    if zero.stage == 3:
        # Partitions of frozen and tiny parameters stay whole: gathering them costs more than they weigh.
        stage["stage3_param_persistence_threshold"] = 10_000
    return merge(config, overrides)


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with the keys of `over` put over it, section by section."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def read_overrides(path: str | None) -> dict[str, Any]:
    """The user's DeepSpeed JSON, or {}.

    Raises:
        UserError: when the file is missing, is not a JSON object, or sets what the run depends on.
    """
    if path is None:
        return {}
    overrides = read_json_object(path, "deepspeed_config")
    for key in ("optimizer", "scheduler", "managed_gradient_accumulation"):
        if key in overrides:
            raise UserError(
                f"deepspeed_config may not set {key!r}, {path} does: use the optimizer section, or leave it out"
            )
    return overrides
