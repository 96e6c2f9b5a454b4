"""Converts config sections to DeepSpeed's JSON. Imports DeepSpeed only to validate sections set by the user.

A model that trains in 16 bits has float32 master weights and sums its gradients in float32. DeepSpeed's optimizer for
16 bits without ZeRO never scales float16's losses, counts only the first rank's part in norms under tensor parallelism,
starts Adam at step 1 and sums in 16 bits. Stage 0 is therefore stage 1 in 16 bits: the same training, with optimizer
states partitioned over the ranks.
"""

from __future__ import annotations

from typing import Any

import torch

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.training import OptimizerConfig, ZeroConfig
from hybrid_rlhf.runtime.files.reading import read_json_object

_OURS = {
    **dict.fromkeys(("optimizer", "scheduler", "managed_gradient_accumulation"), "the optimizer section"),
    **dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
        "train.micro_batch_size and the batch size of the step",
    ),
    "tensor_parallel": "model.tensor_parallel",
    "gradient_clipping": "max_grad_norm of the optimizer section",
}
"""Keys that a user may not set, and the settings to use instead. In float32 at stage 0, ModelEngine clips."""
_SECTIONS = ("zero_optimization", "bf16", "fp16")


def deepspeed_config(
    *, zero: ZeroConfig, dtype: torch.dtype, optimizer: OptimizerConfig | None, overrides: dict[str, Any]
) -> dict[str, Any]:
    """Return the DeepSpeed config of one engine.

    Args:
        zero: stage and offload. Stage 0 becomes stage 1 for a model that trains in 16 bits.
        dtype: dtype of the weights; if trained, bfloat16 and float16 have float32 master weights and gradients.
        optimizer: for gradient clipping and what its kind needs; none for a frozen engine.
        overrides: DeepSpeed JSON of the user, which takes precedence key by key.

    Raises:
        UserError: when DeepSpeed rejects the overrides together with the other settings.
    """
    has_masters = optimizer is not None and dtype is not torch.float32
    number = zero.stage if optimizer is None else trained_stage(zero.stage, dtype)
    config: dict[str, Any] = {
        # The trainers accumulate gradients, call step, and divide a loss once by its global count.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "steps_per_print": None,
        "bf16": {"enabled": dtype is torch.bfloat16, "check_grad_overflow": dtype is torch.bfloat16},
        "fp16": {"enabled": dtype is torch.float16},
        "zero_optimization": {"stage": number},
        # torch's fused AdamW runs on host and device and needs no compiler on the user's machine.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if optimizer is not None:
        config["gradient_clipping"] = optimizer.max_grad_norm
    stage: dict[str, Any] = config["zero_optimization"]
    if number in (1, 2):
        stage["overlap_comm"] = False  # not available with stage 1 when the caller runs the step
    if optimizer is not None and zero.offload_optimizer:
        stage["offload_optimizer"] = {"device": "cpu"}
    if zero.offload_parameters:
        stage["offload_param"] = {"device": "cpu"}
    if number == 3:
        # Small parameters are not partitioned: gathering them costs more than their memory.
        stage["stage3_param_persistence_threshold"] = 10_000
    muon = optimizer is not None and optimizer.name == "muon"
    if muon and number == 3:
        stage["reduce_scatter"] = False  # DeepSpeed's Muon requires it
    merged = merge(merge(config, _in_float32(dtype, number)) if has_masters else config, overrides)
    for name in (name for name in _SECTIONS if name in overrides):
        if (fault := _fault(name, merged[name])) is not None:
            raise UserError(
                f"deepspeed_config must fit the zero section and the dtype of the weights, its {name}{fault[0]} does "
                f"not with stage {zero.stage} and {dtype} ({fault[1]}): change or remove it"
            )
    merged_zero = merged["zero_optimization"]
    if has_masters and merged_zero["stage"] == 0:
        raise UserError(
            f"deepspeed_config's zero_optimization.stage must be 1 or more for training in {dtype}, got 0: remove it"
        )
    offload = merged_zero.get("offload_optimizer") or {}
    offloads = offload.get("device", "none") != "none"
    if optimizer is not None and optimizer.name == "adamw_8bit" and (merged_zero["stage"] == 3 or offloads):
        raise UserError(
            "optimizer.name adamw_8bit keeps its states on the GPU under ZeRO stages 0 to 2, got stage "
            f"{merged_zero['stage']}{' with offload_optimizer' * offloads}: set it to adamw"
        )
    if muon and merged_zero["stage"] == 3 and merged_zero.get("reduce_scatter", True):
        raise UserError(
            "deepspeed_config's zero_optimization.reduce_scatter must be false with optimizer.name muon under stage 3, "
            "got true: remove it"
        )
    return merged


def trained_stage(stage: int, dtype: torch.dtype) -> int:
    """Return the ZeRO stage of a model that trains in a dtype."""
    return stage if dtype is torch.float32 else max(stage, 1)


def sums_whole_gradients(config: dict[str, Any]) -> bool:
    """True if a config makes DeepSpeed use its optimizer for bfloat16, under stage 1 without offload.

    Each rank sums whole gradients in float32, which are reduced once per update in the order of the weights.
    """
    zero = config["zero_optimization"]
    is_float32 = config.get("data_types", {}).get("grad_accum_dtype") == "fp32"
    return bool(config["bf16"]["enabled"] and is_float32 and zero["stage"] == 1 and "offload_optimizer" not in zero)


def _in_float32(dtype: torch.dtype, stage: int) -> dict[str, Any]:
    """Keys for summing 16-bit gradients in float32."""
    keys: dict[str, Any] = {"data_types": {"grad_accum_dtype": "fp32"}}
    if dtype is torch.bfloat16:  # frees each gradient when it has been added, in the backward pass
        keys["bf16"] = {"immediate_grad_update": True}
    if stage == 1:  # gradients are sent once per update
        keys["communication_data_type"] = "fp32"
    return keys


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with the keys of `over`, merged recursively."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def read_overrides(path: str | None) -> dict[str, Any]:
    """Read the user's DeepSpeed JSON; empty if there is none.

    Raises:
        UserError: when the file is missing, is not a JSON object, or sets a key that the run must control.
    """
    if path is None:
        return {}
    overrides = read_json_object(path, "deepspeed_config")
    for key, ours in _OURS.items():
        if key in overrides:
            raise UserError(f"deepspeed_config may not set {key!r}, {path} does: use {ours}, or leave it out")
    for name in (name for name in _SECTIONS if name in overrides):
        section = overrides[name]
        if not isinstance(section, dict):
            raise UserError(f"deepspeed_config's {name} must be an object of keys, {path} has {section!r}: correct it")
        # auto: use the library's value
        overrides[name] = section = {key: value for key, value in section.items() if value != "auto"}
        fault = _fault(name, section)
        # a fault without a key is a combination, which the library's keys may still complete
        if fault is not None and fault[0]:
            raise UserError(
                f"deepspeed_config's {name} must be valid for DeepSpeed, {path} has {name}{fault[0]} ({fault[1]}): "
                "correct or remove it"
            )
    return overrides


def _fault(name: str, section: dict[str, Any]) -> tuple[str, str] | None:
    """Return the key of a section that DeepSpeed rejects ("" for a combination of keys) and the reason; None if
    valid."""
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError  # DeepSpeed's own

    kinds = {"zero_optimization": DeepSpeedZeroConfig, "bf16": DeepSpeedBF16Config, "fp16": DeepSpeedFP16Config}
    try:
        kinds[name](**section)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f".{part}" for part in first["loc"])
        return place, f"{first['msg']}, got {first['input']!r}" if place else first["msg"]
    except (AssertionError, TypeError, ValueError) as error:
        # from a deprecated key together with its successor, or a key "self"
        return "", str(error)
    return None
