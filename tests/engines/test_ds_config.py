"""What a user's DeepSpeed JSON may say: mistakes in it are one line, not DeepSpeed's traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rlhf.configs.sections.training import OptimizerConfig, ZeroConfig
from hybrid_rlhf.engines.ds_config import deepspeed_config, read_overrides
from tests.support.errors import refused, user_error

BATCH = "use train.micro_batch_size and the batch size of the step, or leave it out"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"train_batch_size": "auto"}, f" may not set 'train_batch_size', FILE does: {BATCH}"),
    ({"optimizer": {}}, " may not set 'optimizer', FILE does: use the optimizer section, or leave it out"),
    (
        {"gradient_clipping": 0.5},
        " may not set 'gradient_clipping', FILE does: use max_grad_norm of the optimizer section, or leave it out",
    ),
    ({"bf16": True}, "'s bf16 must be an object of keys, FILE has True: correct it"),
    (
        {"zero_optimization": {"offload_param": {"device": "gpu"}}},
        "'s zero_optimization must be valid for DeepSpeed, FILE has zero_optimization.offload_param.device (Input "
        "should be 'none', 'cpu' or 'nvme', got 'gpu'): correct or remove it",
    ),
    (
        {"fp16": {"scale": 1}},
        "'s fp16 must be valid for DeepSpeed, FILE has fp16.scale (Extra inputs are not permitted, got 1): correct or "
        "remove it",
    ),
]


def config(file: Path, said: dict[str, Any], *, stage: int = 0) -> dict[str, Any]:
    file.write_text(json.dumps(said))
    zero, overrides = ZeroConfig(stage=stage), read_overrides(str(file))
    return deepspeed_config(zero=zero, dtype=torch.float32, optimizer=OptimizerConfig(), overrides=overrides)


@pytest.mark.parametrize(("said", "rule"), REFUSED, ids=lambda said: json.dumps(said) if isinstance(said, dict) else "")
def test_a_mistake_is_one_line(said: dict[str, Any], rule: str, tmp_path: Path) -> None:
    assert refused(config, tmp_path / "ds.json", said) == f"deepspeed_config{rule}".replace(
        "FILE", str(tmp_path / "ds.json")
    )


def test_what_does_not_fit_the_stage_is_one_line(tmp_path: Path) -> None:
    said = {"zero_optimization": {"compute_grad_norm": False}}
    assert config(tmp_path / "ds.json", said, stage=2)["zero_optimization"]["compute_grad_norm"] is False
    with user_error("its zero_optimization does not with stage 3 and torch.float32 .Value error, c"):
        config(tmp_path / "ds.json", said, stage=3)
    with user_error("multiple values for argument 'self'"):
        config(tmp_path / "ds.json", {"zero_optimization": {"self": 1}})


def test_auto_within_a_section_is_left_to_us(tmp_path: Path) -> None:
    said = {"zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto"}, "bf16": {"enabled": "auto"}}
    merged = config(tmp_path / "ds.json", said, stage=2)
    assert merged["zero_optimization"] == {"stage": 2, "overlap_comm": False} and merged["bf16"]["enabled"] is False


def test_the_users_deepspeed_json_wins(tmp_path: Path) -> None:
    said = {"zero_optimization": {"stage3_max_live_parameters": 7}, "steps_per_print": 5}
    merged = config(tmp_path / "ds.json", said, stage=3)
    assert merged["steps_per_print"] == 5
    assert merged["zero_optimization"]["stage3_max_live_parameters"] == 7 and merged["zero_optimization"]["stage"] == 3
